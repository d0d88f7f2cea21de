//! A member that moves. A record with a wrong address is a member less, and without a majority it
//! cannot be replaced; so the leader proposes it only once the member has answered at the new
//! address: the answering machine has its id and the nodes' key. What was forced, and wrong, is
//! undone by [`Config::member_addresses`].

use std::net::SocketAddr;

use cyclone_packet::ProbeOutcome;
use cyclone_wire::membership::Record;

use super::{MemberError, MemberRequest};
use crate::config::Config;
use crate::node::Node;
use crate::requests::{Origin, Outcome, Ticket};

/// A move whose member has not answered yet.
pub(super) struct PendingMove {
    ticket: Ticket,
    request: MemberRequest,
}

/// Where a member's packets go: as the record says, unless this node is configured otherwise.
pub(super) fn packet_address(config: &Config, id: u64, recorded: SocketAddr) -> SocketAddr {
    let told = config.member_addresses.iter().find(|(of, _)| *of == id);
    told.map_or(recorded, |(_, address)| *address)
}

impl Node {
    /// The new address at which a member has to answer before this record is proposed.
    fn unproven_address(
        &self,
        request: &MemberRequest,
        record: &Record,
    ) -> Option<(u64, SocketAddr)> {
        let MemberRequest::Move {
            id,
            packet,
            force: false,
            ..
        } = request
        else {
            return None;
        };
        let before = self.membership.record.as_ref();
        let members = before.map_or(&record.members, |before| &before.members);
        let founded = self.config.members.iter().find(|it| it.id == *id);
        let recorded = match before {
            Some(_) => members.iter().find(|it| it.id == *id).map(|it| it.packet),
            None => founded.map(|it| it.packet),
        };
        let runs_there =
            *id == self.config.id && self.config.own().is_ok_and(|own| own.packet == *packet);
        let is_proven = recorded == Some(*packet) || runs_there;
        (!is_proven).then_some((*id, *packet))
    }

    /// Begins a change that was accepted: at once, or when the member has answered where it is to
    /// be.
    pub(super) fn begin_change(
        &mut self,
        ticket: Ticket,
        request: &MemberRequest,
        record: &Record,
    ) {
        let Some((id, packet)) = self.unproven_address(request, record) else {
            return self.propose_record(Origin::Local(ticket), record);
        };
        if self.membership.moving.is_some() {
            let refused = (ticket, MemberError::InProgress);
            return self.membership.refused.push(refused);
        }
        let now_us = self.now_us();
        // This node itself runs elsewhere.
        let asks = id != self.config.id && self.port.probe(now_us, id, packet);
        if !asks {
            let refused = (ticket, MemberError::NotThere { id, packet });
            return self.membership.refused.push(refused);
        }
        self.membership.moving = Some(PendingMove {
            ticket,
            request: request.clone(),
        });
    }

    /// Goes on with a move whose member has answered, or has not in time.
    pub(super) fn resume_move(&mut self) {
        let Some(ProbeOutcome {
            id,
            address,
            answered,
        }) = self.port.take_probe_outcome()
        else {
            return;
        };
        let Some(PendingMove { ticket, request }) = self.membership.moving.take() else {
            return;
        };
        if let Err(outcome) = self.check_leadership() {
            return self.answers.push((Origin::Local(ticket), outcome));
        }
        if !answered {
            let packet = address;
            let refused = (ticket, MemberError::NotThere { id, packet });
            return self.membership.refused.push(refused);
        }
        // Others may have asked for something meanwhile.
        match self.accept(&request) {
            Ok(None) => {
                let done = Outcome::Done(cyclone_wire::reply::Reply::Ok);
                self.answers.push((Origin::Local(ticket), done));
            }
            Ok(Some(record)) => self.propose_record(Origin::Local(ticket), &record),
            Err(error) => self.membership.refused.push((ticket, error)),
        }
    }
}

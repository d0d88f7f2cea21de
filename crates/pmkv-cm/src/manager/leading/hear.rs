//! What servers say: hellos, renewals, finished copies, counts.

use super::Leading;
use crate::config::{ServerId, Standing};
use crate::manager::StepContext;
use crate::message::{FromServer, Hello, Load, Refusal, ToServer};
use crate::planted::{self, Mistake};

impl Leading {
    pub(super) fn hear(&mut self, now_us: u64, message: FromServer, desk: &mut StepContext) {
        match message {
            FromServer::Hello(hello) => self.hear_hello(hello, desk),
            FromServer::Renew {
                server,
                session,
                number,
                adopted,
            } => self.renew(now_us, server, session, number, adopted, desk),
            FromServer::Copied {
                server,
                shard,
                since,
            } => {
                let wanted = self.stored.as_ref().is_some_and(|stored| {
                    let shard = stored.config.shards.get(usize::from(shard));
                    shard.is_some_and(|s| s.joining.iter().any(|c| c.server == server))
                });
                if wanted {
                    self.copied.insert((server, shard, since));
                }
            }
            FromServer::Loads {
                server,
                session,
                loads,
                ..
            } => self.count(server, session, &loads),
        }
    }

    pub(super) fn hear_hello(&mut self, hello: Hello, desk: &mut StepContext) {
        let id = hello.server;
        if let Some(stored) = &self.stored {
            let refuse = |reason| ToServer::Refused {
                session: hello.session,
                reason,
            };
            let member = stored.config.member(id);
            if let Some(member) = member {
                if hello.session < member.session {
                    let session = member.session;
                    return desk.send(id, refuse(Refusal::OldSession { session }));
                }
                if hello.session == member.session && member.standing != Standing::Down {
                    return desk.send(id, ToServer::Prepare(stored.config.clone()));
                }
                let is_other = hello.incarnation != member.incarnation;
                let is_down = member.standing == Standing::Down;
                if is_other && is_down && stored.config.holds(id) {
                    let expected = member.incarnation;
                    return desk.send(id, refuse(Refusal::OtherMemory { expected }));
                }
            } else if stored.config.members.len() >= crate::config::MAX_MEMBERS {
                let limit = crate::config::MAX_MEMBERS as u32;
                return desk.send(id, refuse(Refusal::Full(limit)));
            }
        }
        let newer = self
            .hellos
            .get(&id)
            .is_none_or(|known| known.session <= hello.session);
        if newer
            && (self.hellos.len() < crate::config::MAX_MEMBERS || self.hellos.contains_key(&id))
        {
            self.hellos.insert(id, hello);
        }
    }

    pub(super) fn renew(
        &mut self,
        now_us: u64,
        id: ServerId,
        session: u64,
        number: u64,
        adopted: u64,
        desk: &mut StepContext,
    ) {
        let Some(stored) = &self.stored else {
            return;
        };
        let member = stored
            .config
            .member(id)
            .filter(|member| member.session == session && member.standing != Standing::Down);
        let Some(member) = member else {
            return desk.send(id, ToServer::Stranger { session });
        };
        self.roll.heard(now_us, id, session, adopted);
        // A server about to be dropped gets no more leases; nor one that may still believe in an
        // earlier membership.
        let leaving = self.writing.iter().chain(&self.doubtful).any(|writing| {
            writing
                .config
                .member(id)
                .is_none_or(|next| next.standing == Standing::Down || next.session != session)
        });
        let current = adopted >= member.since || planted::has(Mistake::LeaseBeforeAdoption);
        if current && !leaving && self.settled_in && self.in_office(now_us) {
            self.roll.granted(now_us, id, desk.rules);
            desk.send(
                id,
                ToServer::Grant {
                    epoch: self.office.epoch,
                    number,
                    lease_us: desk.rules.lease_us,
                    committed: self.committed,
                },
            );
        }
        self.prepare(now_us, id, desk);
    }

    pub(super) fn prepare(&mut self, now_us: u64, id: ServerId, desk: &mut StepContext) {
        let Some(stored) = self.stored.as_ref().filter(|_| self.settled_in) else {
            return;
        };
        if self.roll.adopted(id) < stored.config.term
            && self.roll.send_due(now_us, id, desk.rules.resend_us)
        {
            desk.send(id, ToServer::Prepare(stored.config.clone()));
        }
    }

    pub(super) fn count(&mut self, server: ServerId, session: u64, loads: &[Load]) {
        let Some(config) = self.stored.as_ref().map(|stored| stored.config.clone()) else {
            return;
        };
        if config.member(server).is_none_or(|m| m.session != session) {
            return;
        }
        for load in loads {
            let shard = config.shards.get(usize::from(load.shard));
            if shard.is_some_and(|shard| shard.primary == server) {
                self.loads.insert(load.shard, *load);
            }
        }
        self.reported.insert(server);
    }
}

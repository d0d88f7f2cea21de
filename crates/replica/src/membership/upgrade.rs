//! The cluster's format version (docs/adr/0088): which one is recorded, what it allows to write,
//! and raising it.
//!
//! The leader of all logs asks every member which version its program supports, and writes the new
//! version into log 0 only when all have answered:
//!
//! ```text
//!   finalize_upgrade    FORMAT_QUERY to every other member, again every ASK_US
//!   FORMAT_REPORT       from all, each at least CURRENT: SetFormatVersion is proposed
//!                       one lower, or missing after PATIENCE_US: refused with its id and address
//!   apply               the state machine keeps the version; writers ask Node::is_allowed
//! ```
//!
//! Programs of version 1 do not know the query and do not answer it.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use cyclone_packet::{Outgoing, Peer};
use cyclone_wire::codec::DecodeError;
use cyclone_wire::command::{Command, Operation};
use cyclone_wire::envelope;
use cyclone_wire::format_version::{Feature, FormatVersion};
use cyclone_wire::reply::Reply;

use crate::config::Member;
use crate::node::{Node, NodeError};
use crate::requests::{Origin, Outcome, Ticket};

/// How often members that have not answered are asked.
const ASK_US: u64 = 200_000;
/// A member that has not answered after so long does not answer.
const PATIENCE_US: u64 = 2_000_000;

/// Why the format version was not raised; nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpgradeError {
    /// The state machine keeps no version.
    #[error("this engine records no format version")]
    NoRecord,
    /// Who comes has not been asked.
    #[error("a change of the members is in progress; try again when it is over")]
    MembersChanging,
    /// Another request waits for the members.
    #[error("another request to finalize the upgrade is being served; try again later")]
    InProgress,
    /// A member's program is too old.
    #[error(
        "member {id} at {packet} supports format version {supported}, and version {wanted} is to be recorded: upgrade it first"
    )]
    Unsupported {
        /// The member.
        id: u64,
        /// Where its packets go.
        packet: SocketAddr,
        /// What its program supports.
        supported: FormatVersion,
        /// What was to be recorded.
        wanted: FormatVersion,
    },
    /// A member has not answered.
    #[error(
        "member {id} at {packet} does not say that it supports format version {wanted}: it is down, or its program supports only \
         version 1; upgrade and start it, or remove it"
    )]
    NoAnswer {
        /// The member.
        id: u64,
        /// Where its packets go.
        packet: SocketAddr,
        /// What was to be recorded.
        wanted: FormatVersion,
    },
}

impl UpgradeError {
    /// Whether the same may be taken later without anything else having changed.
    pub fn is_temporary(&self) -> bool {
        matches!(
            self,
            UpgradeError::MembersChanging | UpgradeError::InProgress
        )
    }

    /// The code of the error reply, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            UpgradeError::NoRecord => "ERR",
            UpgradeError::MembersChanging | UpgradeError::InProgress => "TRYAGAIN",
            UpgradeError::Unsupported { .. } => "UNSUPPORTED",
            UpgradeError::NoAnswer { .. } => "NOANSWER",
        }
    }
}

/// Why a request is not served.
enum Refusal {
    /// As for any command.
    Outcome(Outcome),
    /// For a reason that only this request has.
    Error(UpgradeError),
}

/// A request that waits for the members' answers.
struct PendingUpgrade {
    origin: Origin,
    began_us: u64,
    next_ask_us: u64,
    reports: BTreeMap<u64, FormatVersion>,
}

/// Raising the format version.
#[derive(Default)]
pub(crate) struct Upgrade {
    pending: Option<PendingUpgrade>,
    refused: Vec<(Ticket, UpgradeError)>,
}

/// Whether all others support the version: `None` while answers are missing and may still come.
fn decide(
    others: &[Member],
    reports: &BTreeMap<u64, FormatVersion>,
    wanted: FormatVersion,
    is_late: bool,
) -> Option<Result<(), UpgradeError>> {
    let mut missing = None;
    for member in others {
        let (id, packet) = (member.id, member.packet);
        match reports.get(&id) {
            Some(supported) if *supported < wanted => {
                return Some(Err(UpgradeError::Unsupported {
                    id,
                    packet,
                    supported: *supported,
                    wanted,
                }));
            }
            Some(_) => {}
            None => {
                missing.get_or_insert(UpgradeError::NoAnswer { id, packet, wanted });
            }
        }
    }
    match missing {
        None => Some(Ok(())),
        Some(error) if is_late => Some(Err(error)),
        Some(_) => None,
    }
}

impl Node {
    /// The format version that the cluster has recorded, as far as this replica has applied log 0.
    pub fn format_version(&self) -> FormatVersion {
        self.store.format_version()
    }

    /// Whether the cluster's format version allows this to be written. Readers do not ask: a
    /// program reads all formats up to [`FormatVersion::CURRENT`].
    pub fn is_allowed(&self, feature: Feature) -> bool {
        self.format_version().allows(feature)
    }

    /// Raises the cluster's format version to [`FormatVersion::CURRENT`] if all members support it.
    /// The outcome, an array of the version before and the version now, comes back under `ticket`
    /// when it is applied here; a refusal by [`Node::take_upgrade_refusals`].
    pub fn finalize_upgrade(&mut self, ticket: Ticket) {
        match self.begin_upgrade(Origin::Local(ticket)) {
            Ok(()) => {}
            Err(Refusal::Outcome(outcome)) => self.answers.push((Origin::Local(ticket), outcome)),
            Err(Refusal::Error(error)) => self.upgrade.refused.push((ticket, error)),
        }
    }

    /// The same for a new cluster, whose format version no operator has to finalize. Returns true
    /// if the members are being asked; the outcome is not reported.
    pub fn raise_format_version(&mut self) -> bool {
        self.begin_upgrade(Origin::Internal).is_ok()
    }

    fn begin_upgrade(&mut self, origin: Origin) -> Result<(), Refusal> {
        self.check_leadership().map_err(Refusal::Outcome)?;
        if !self.has_current_record() {
            return Err(Refusal::Outcome(Outcome::Busy));
        }
        if !self.store.keeps_members() {
            return Err(Refusal::Error(UpgradeError::NoRecord));
        }
        let recorded = self.format_version();
        if recorded >= FormatVersion::CURRENT {
            let number = Reply::Int(i64::from(recorded.number()));
            let done = Outcome::Done(Reply::Array(vec![number.clone(), number]));
            return Err(Refusal::Outcome(done));
        }
        if self.is_changing_members() {
            return Err(Refusal::Error(UpgradeError::MembersChanging));
        }
        if self.upgrade.pending.is_some() {
            return Err(Refusal::Error(UpgradeError::InProgress));
        }
        self.upgrade.pending = Some(PendingUpgrade {
            origin,
            began_us: self.now_us(),
            next_ask_us: 0,
            reports: BTreeMap::new(),
        });
        Ok(())
    }

    /// Takes the refusals of what this process asked for.
    pub fn take_upgrade_refusals(&mut self) -> std::vec::Drain<'_, (Ticket, UpgradeError)> {
        self.upgrade.refused.drain(..)
    }

    /// Asks the members, and proposes the version when all support it. Returns true if it did.
    pub(crate) fn upgrade_housekeeping(&mut self) -> Result<bool, NodeError> {
        let Some(pending) = &self.upgrade.pending else {
            return Ok(false);
        };
        let origin = pending.origin;
        let (now_us, own) = (self.now_us(), self.config.id);
        let list = self.membership.list().iter();
        let others: Vec<Member> = list.filter(|member| member.id != own).cloned().collect();
        let is_late = now_us.saturating_sub(pending.began_us) >= PATIENCE_US;
        let wanted = FormatVersion::CURRENT;
        let decision = match self.check_leadership() {
            Err(outcome) => Some(Err(Refusal::Outcome(outcome))),
            // Who comes now has not been asked.
            Ok(()) if self.is_changing_members() => {
                Some(Err(Refusal::Error(UpgradeError::MembersChanging)))
            }
            Ok(()) => decide(&others, &pending.reports, wanted, is_late)
                .map(|decided| decided.map_err(Refusal::Error)),
        };
        match decision {
            Some(Err(refusal)) => {
                self.upgrade.pending = None;
                match (origin, refusal) {
                    (_, Refusal::Outcome(outcome)) => self.answers.push((origin, outcome)),
                    (Origin::Local(ticket), Refusal::Error(error)) => {
                        self.upgrade.refused.push((ticket, error));
                    }
                    (_, Refusal::Error(error)) => {
                        tracing::warn!(%error, "the format version of this new cluster is not recorded yet");
                    }
                }
            }
            Some(Ok(())) => {
                self.upgrade.pending = None;
                self.propose_format_version(origin, wanted);
                return Ok(true);
            }
            None => self.ask_format_versions(&others)?,
        }
        Ok(false)
    }

    /// When [`Node::upgrade_housekeeping`] is to be called again at the latest.
    pub(crate) fn upgrade_deadline_us(&self) -> u64 {
        match self.upgrade.pending {
            Some(_) => self.next_housekeeping_us,
            None => u64::MAX,
        }
    }

    fn propose_format_version(&mut self, origin: Origin, version: FormatVersion) {
        tracing::info!(
            from = self.format_version().number(),
            to = version.number(),
            "all members support the format version: it is recorded"
        );
        let command = Command {
            session: None,
            operation: Operation::SetFormatVersion { version },
        };
        self.logs[0].write_bytes(origin, |out| command.encode(out));
    }

    fn ask_format_versions(&mut self, others: &[Member]) -> Result<(), NodeError> {
        let now_us = self.now_us();
        let Some(pending) = &mut self.upgrade.pending else {
            return Ok(());
        };
        if now_us < pending.next_ask_us {
            return Ok(());
        }
        pending.next_ask_us = now_us + ASK_US;
        let silent = others
            .iter()
            .filter(|member| !pending.reports.contains_key(&member.id));
        let parts: [&[u8]; 1] = [&[envelope::FORMAT_QUERY]];
        let burst: Vec<Outgoing<'_>> = silent
            .map(|member| Outgoing {
                to: Peer::Node(member.id),
                parts: &parts,
            })
            .collect();
        if !burst.is_empty() {
            self.port.send(now_us, &burst).map_err(NodeError::Port)?;
        }
        Ok(())
    }

    /// Another replica asks which version this program supports.
    pub(crate) fn answer_format_query(&mut self, from: u64) {
        let mut bytes = vec![envelope::FORMAT_REPORT];
        FormatVersion::CURRENT.encode(&mut bytes);
        let (now_us, parts): (u64, [&[u8]; 1]) = (self.now_us(), [&bytes]);
        let to = Peer::Node(from);
        // What is lost is asked for again.
        let _ = self.port.send(now_us, &[Outgoing { to, parts: &parts }]);
    }

    /// Another replica says which version its program supports.
    pub(crate) fn on_format_report(&mut self, from: u64, bytes: &[u8]) -> Result<(), DecodeError> {
        let supported = FormatVersion::decode(bytes)?;
        let is_member = self.membership.list().iter().any(|it| it.id == from);
        if let Some(pending) = self.upgrade.pending.as_mut().filter(|_| is_member) {
            pending.reports.insert(from, supported);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(id: u64) -> Member {
        Member {
            id,
            packet: SocketAddr::from(([10, 0, 0, id as u8], 7000)),
            redis: None,
        }
    }

    #[test]
    fn version_is_raised_only_when_all_members_support_it() {
        let others = [member(2), member(3)];
        let (wanted, old) = (FormatVersion::CURRENT, FormatVersion::V1);
        let mut reports = BTreeMap::from([(2, wanted)]);
        assert_eq!(decide(&others, &reports, wanted, false), None);
        let silent = UpgradeError::NoAnswer {
            id: 3,
            packet: others[1].packet,
            wanted,
        };
        let told = silent.to_string();
        assert!(told.contains("member 3 at 10.0.0.3:7000"), "{told}");
        assert_eq!(decide(&others, &reports, wanted, true), Some(Err(silent)));
        reports.insert(3, old);
        let unsupported = UpgradeError::Unsupported {
            id: 3,
            packet: others[1].packet,
            supported: old,
            wanted,
        };
        let told = unsupported.to_string();
        let words = "member 3 at 10.0.0.3:7000 supports format version 1, and version 2";
        assert!(told.contains(words), "{told}");
        for is_late in [false, true] {
            let decided = decide(&others, &reports, wanted, is_late);
            assert_eq!(decided, Some(Err(unsupported.clone())));
        }
        reports.insert(3, wanted);
        assert_eq!(decide(&others, &reports, wanted, false), Some(Ok(())));
        assert_eq!(decide(&[], &reports, wanted, false), Some(Ok(())));
    }
}

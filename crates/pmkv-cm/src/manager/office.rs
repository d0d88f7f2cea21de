//! Getting into office: watching the record that the one in office renews, and taking over when it
//! stands still for a whole lease (see [`crate::store`] for why that is safe).

use super::{Event, LeaseRenewal, StepContext};
use crate::codec::{LeaderRecord, Leases};
use crate::planted::{self, Mistake};
use crate::store::{Answer, Key, Record, Report, Request, Revision};

/// A manager that watches.
pub(super) struct Standby {
    /// The record as last seen, and since when it has not changed.
    seen: Option<(Record, u64)>,
    /// A question or a bid in flight.
    asking: Option<u64>,
    bid: Option<LeaseRenewal>,
    /// A bid whose outcome is not known.
    doubtful: Option<LeaseRenewal>,
    next_ask_us: u64,
}

/// Won: the record, its revision, and when the request was sent.
pub(super) type Won = (LeaderRecord, Revision, u64);

impl Standby {
    pub(super) fn new(now_us: u64) -> Standby {
        Standby {
            seen: None,
            asking: None,
            bid: None,
            doubtful: None,
            next_ask_us: now_us,
        }
    }

    pub(super) fn step(
        &mut self,
        now_us: u64,
        event: Event,
        desk: &mut StepContext,
    ) -> Option<Won> {
        match event {
            Event::Store(Report::Changed(Key::LeaderRecord, record)) => {
                return self.see(now_us, record);
            }
            Event::Store(Report::Answer(ticket, answer)) => {
                return self.answered(now_us, ticket, answer);
            }
            Event::StoreRefused(ticket) => {
                return self.answered(now_us, ticket, Answer::Unavailable);
            }
            Event::Tick => self.tick(now_us, desk),
            Event::Store(Report::Changed(..)) | Event::Message(_) => {}
        }
        None
    }

    fn answered(&mut self, now_us: u64, ticket: u64, answer: Answer) -> Option<Won> {
        if self.asking == Some(ticket) {
            self.asking = None;
            return match answer {
                Answer::Value(record) => self.see(now_us, record),
                _ => None,
            };
        }
        let bid = self.bid.take_if(|bid| bid.ticket == ticket)?;
        match answer {
            Answer::Swapped(revision) => return Some((bid.office, revision, bid.sent_us)),
            Answer::Conflict(record) => return self.see(now_us, record),
            Answer::Unknown => {
                self.doubtful = Some(bid);
                self.next_ask_us = now_us;
            }
            Answer::Unavailable | Answer::Value(_) => {}
        }
        None
    }

    /// The record, perhaps with the bid whose outcome was unknown.
    fn see(&mut self, now_us: u64, record: Record) -> Option<Won> {
        let known = self.seen.as_ref().map(|(seen, _)| seen.revision);
        if known.is_some_and(|known| known >= record.revision) {
            return None;
        }
        let won = self
            .doubtful
            .filter(|bid| record.revision > bid.expected && bid.office.encode() == record.value);
        let revision = record.revision;
        self.seen = Some((record, now_us));
        won.map(|bid| (bid.office, revision, bid.sent_us))
    }

    fn tick(&mut self, now_us: u64, desk: &mut StepContext) {
        if self.bid.is_some() {
            return;
        }
        if let Some((record, since_us)) = &self.seen {
            let last = LeaderRecord::decode(&record.value).ok();
            let out = last.and_then(|office| office.leases);
            let out = out.filter(|_| !planted::has(Mistake::OwnLeasesAssumed));
            // The holder takes the drift off; a whole lease on this clock is enough: the holder's,
            // which may be longer than one's own.
            let own_us = desk.rules.manager_lease_us;
            let wait_us = out.map_or(own_us, |out| out.manager_lease_us.max(own_us));
            let is_vacant = record.revision == 0;
            let still = now_us.saturating_sub(*since_us) >= wait_us;
            if is_vacant || still || planted::has(Mistake::OfficeSeized) {
                let expected = record.revision;
                let lease_us = desk.rules.lease_us;
                let office = LeaderRecord {
                    holder: desk.id,
                    epoch: last.map_or(0, |office| office.epoch) + 1,
                    beat: 0,
                    leases: Some(Leases {
                        // The successor must wait for these too, if this time in office is short.
                        lease_us: out.map_or(lease_us, |out| out.lease_us.max(lease_us)),
                        manager_lease_us: own_us,
                    }),
                };
                // A bid is made once per observation: should it fail, the record is seen anew.
                self.seen = None;
                self.next_ask_us = now_us + desk.rules.manager_lease_us / 2;
                let ticket = desk.ask(Request::Swap {
                    key: Key::LeaderRecord,
                    expected,
                    value: office.encode(),
                });
                self.bid = Some(LeaseRenewal {
                    ticket,
                    office,
                    expected,
                    sent_us: now_us,
                });
                return;
            }
        }
        if self.asking.is_none() && now_us >= self.next_ask_us {
            self.next_ask_us = now_us + desk.rules.manager_lease_us / 2;
            self.asking = Some(desk.ask(Request::Get(Key::LeaderRecord)));
        }
    }
}

//! The store's answers: renewals of the office, configurations written and read.

use std::sync::Arc;

use super::{Leading, Stored, Writing};
use crate::codec::LeaderRecord;
use crate::config::{Configuration, Standing};
use crate::manager::{LeaseRenewal, Notice, StepContext};
use crate::store::{Answer, Key, Record, Request, Revision, Ticket};

impl Leading {
    pub(super) fn answered(
        &mut self,
        now_us: u64,
        ticket: Ticket,
        answer: Answer,
        desk: &mut StepContext,
    ) -> bool {
        if let Some(beat) = self.beat.take_if(|beat| beat.ticket == ticket) {
            return self.beat_answered(now_us, beat, answer);
        }
        if let Some(writing) = self.writing.take_if(|writing| writing.ticket == ticket) {
            return self.write_answered(now_us, writing, answer, desk);
        }
        if self.reading == Some(ticket) {
            self.reading = None;
            if let Answer::Value(record) = answer {
                return self.read(now_us, record, desk);
            }
            self.next_try_us = now_us + desk.rules.renew_us;
        }
        true
    }

    pub(super) fn beat_answered(
        &mut self,
        now_us: u64,
        beat: LeaseRenewal,
        answer: Answer,
    ) -> bool {
        match answer {
            Answer::Swapped(revision) => self.beat_won(beat, revision),
            Answer::Conflict(record) => {
                // Perhaps an earlier renewal whose outcome was unknown.
                let ours = LeaderRecord::decode(&record.value).is_ok_and(|office| {
                    office.holder == beat.office.holder && office.epoch == beat.office.epoch
                });
                if !ours {
                    return false;
                }
                // When that one was sent is not remembered; the next renewal counts.
                self.revision = record.revision;
                self.next_beat_us = now_us;
            }
            Answer::Unknown | Answer::Unavailable | Answer::Value(_) => self.next_beat_us = now_us,
        }
        true
    }

    pub(super) fn beat_won(&mut self, beat: LeaseRenewal, revision: Revision) {
        self.office = beat.office;
        self.revision = revision;
        self.trusted_until_us = self.trusted_until_us.max(beat.sent_us + self.trusted_us);
    }

    pub(super) fn write_answered(
        &mut self,
        now_us: u64,
        writing: Writing,
        answer: Answer,
        desk: &mut StepContext,
    ) -> bool {
        match answer {
            Answer::Swapped(revision) => {
                self.written(now_us, writing, revision, desk);
                true
            }
            Answer::Conflict(record) if record.value == writing.bytes => {
                self.written(now_us, writing, record.revision, desk);
                true
            }
            Answer::Conflict(record) => self.read(now_us, record, desk),
            Answer::Unknown => {
                self.doubtful = Some(writing);
                self.reading = Some(desk.ask(Request::Get(Key::Configuration)));
                true
            }
            Answer::Unavailable | Answer::Value(_) => {
                self.next_try_us = now_us + desk.rules.renew_us;
                true
            }
        }
    }

    /// The record as it is in the store.
    pub(super) fn read(&mut self, now_us: u64, record: Record, desk: &mut StepContext) -> bool {
        if let Some(writing) = self.doubtful.take()
            && record.value == writing.bytes
        {
            self.written(now_us, writing, record.revision, desk);
            return true;
        }
        if record.revision == 0 {
            self.blank = true;
            return true;
        }
        let config = match Configuration::decode(&record.value) {
            Ok(config) if config.cluster == desk.founding.cluster => Arc::new(config),
            _ => {
                self.unreadable = true;
                desk.tell(Notice::Unreadable(record.revision));
                return true;
            }
        };
        if config.epoch > self.office.epoch {
            return false;
        }
        let newer = |stored: &Stored| stored.revision < record.revision;
        if self.stored.as_ref().is_none_or(newer) {
            // Another manager's last words, or our own, of which nothing was heard for long: whom
            // it drops may hold leases.
            self.fence(&config);
            self.roll.admit(now_us, &config);
            self.roll.nothing_sent();
            self.written_us = now_us;
            self.stored = Some(Stored {
                revision: record.revision,
                config,
            });
        }
        true
    }

    pub(super) fn written(
        &mut self,
        now_us: u64,
        writing: Writing,
        revision: Revision,
        desk: &mut StepContext,
    ) {
        let config = writing.config;
        self.fence(&config);
        self.commands
            .drain(..writing.commands.min(self.commands.len()));
        for report in &writing.copied {
            self.copied.remove(report);
        }
        self.hellos.retain(|id, hello| {
            config.member(*id).is_none_or(|member| {
                member.session < hello.session || member.standing == Standing::Down
            })
        });
        self.roll.admit(now_us, &config);
        self.roll.nothing_sent();
        self.written_us = now_us;
        self.blank = false;
        self.settled_in = true;
        desk.tell(Notice::Written(config.clone()));
        self.stored = Some(Stored { revision, config });
    }

    /// Moves the fence behind the leases of all processes that are members no more.
    pub(super) fn fence(&mut self, next: &Configuration) {
        let Some(stored) = &self.stored else {
            return;
        };
        for old in stored.config.up() {
            let stays = next
                .member(old.id)
                .is_some_and(|new| new.standing != Standing::Down && new.session == old.session);
            if !stays {
                self.fence_us = self.fence_us.max(self.roll.expires_us(old.id));
            }
        }
    }
}

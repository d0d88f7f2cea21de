//! A committed entry that waits to be applied, and who waits for its commands.

use cyclone_consensus::Committed;
use cyclone_wire::reply::Reply;

use crate::requests::{Origin, Outcome};

/// A committed entry with what is needed to answer its commands.
pub(crate) struct ToApply {
    pub(crate) entry: Committed,
    pub(crate) origins: Vec<Origin>,
    pub(super) since_us: u64,
    /// Of a gang that has no effect: the entry is passed as if it were empty.
    pub(super) skip: bool,
    /// Commands that are answered; `origins` begins behind them.
    pub(super) answered: usize,
}

impl ToApply {
    /// An entry that no client here waits for.
    pub(super) fn replayed(entry: Committed) -> ToApply {
        ToApply {
            entry,
            origins: Vec::new(),
            since_us: 0,
            skip: false,
            answered: 0,
        }
    }

    /// The entry's commands from this one on have these replies.
    pub(super) fn answer(
        &mut self,
        from: usize,
        replies: Vec<Reply>,
        answers: &mut Vec<(Origin, Outcome)>,
    ) {
        let fresh = replies
            .len()
            .saturating_sub(self.answered.saturating_sub(from));
        let unknown = from.saturating_sub(self.answered);
        let count = (unknown + fresh).min(self.origins.len());
        if self.skip || count == 0 {
            return;
        }
        // A checkpoint held what those before did, and not what they were answered.
        let outcomes = std::iter::repeat_n(Outcome::Unknown, unknown);
        let known = replies.len() - fresh;
        let outcomes = outcomes.chain(replies.into_iter().skip(known).map(Outcome::Done));
        answers.extend(self.origins.drain(..count).zip(outcomes));
        self.answered += count;
    }

    /// The entry is applied to its end: no client waits for it any more.
    pub(super) fn end(&mut self, answers: &mut Vec<(Origin, Outcome)>) {
        let outcome = if self.skip {
            Outcome::Lost
        } else {
            Outcome::Unknown
        };
        let left = self.origins.drain(..);
        answers.extend(left.map(|origin| (origin, outcome.clone())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(count: u64) -> ToApply {
        ToApply {
            origins: (0..count).map(Origin::Local).collect(),
            ..ToApply::replayed(Committed {
                index: 5,
                term: 1,
                kind: cyclone_consensus::KIND_COMMANDS,
                len: 0,
            })
        }
    }

    fn numbers(from: i64, to: i64) -> Vec<Reply> {
        (from..to).map(Reply::Int).collect()
    }

    fn told(answers: Vec<(Origin, Outcome)>) -> Vec<(u64, Outcome)> {
        let told = answers.into_iter().map(|(origin, outcome)| match origin {
            Origin::Local(ticket) => (ticket, outcome),
            other => panic!("{other:?}"),
        });
        told.collect()
    }

    fn done(ticket: u64) -> (u64, Outcome) {
        (ticket, Outcome::Done(Reply::Int(ticket as i64)))
    }

    /// An entry is applied in parts: each command gets the reply to itself.
    #[test]
    fn replies_of_a_part_go_to_its_commands() {
        let (mut entry, mut answers) = (waiting(5), Vec::new());
        entry.answer(0, numbers(0, 2), &mut answers);
        entry.answer(2, numbers(2, 3), &mut answers);
        entry.answer(3, numbers(3, 5), &mut answers);
        entry.end(&mut answers);
        assert_eq!(told(answers), (0..5).map(done).collect::<Vec<_>>());
    }

    /// An installed checkpoint holds a part whose replies are not known here, or less than was
    /// answered.
    #[test]
    fn commands_that_a_checkpoint_holds_are_answered_unknown_and_none_twice() {
        let (mut entry, mut answers) = (waiting(4), Vec::new());
        entry.answer(2, numbers(2, 3), &mut answers);
        entry.answer(1, numbers(1, 4), &mut answers);
        entry.end(&mut answers);
        let unknown = [(0, Outcome::Unknown), (1, Outcome::Unknown)];
        let wanted: Vec<_> = unknown.into_iter().chain([done(2), done(3)]).collect();
        assert_eq!(told(answers), wanted);
        let (mut entry, mut answers) = (waiting(2), Vec::new());
        entry.end(&mut answers);
        assert_eq!(
            told(answers),
            [(0, Outcome::Unknown), (1, Outcome::Unknown)]
        );
    }
}

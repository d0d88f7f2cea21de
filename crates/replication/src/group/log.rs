//! A client's redo log in group memory: append, execute and advance (HyperLoop §5).
//!
//! Positions count the log's bytes since it was formatted. `head ≤ executed ≤ tail ≤ head + log
//! bytes`: what lies before the head is executed and durable at every member, what lies before
//! `executed` has been copied into the data area. The head is a word of the client's slot; the tail
//! is wherever whole records end.

use std::collections::VecDeque;

use super::io::{Io, MAX_QUEUED};
use super::layout::{Layout, SLOT_HEAD};
use super::operation::{Answer, GroupError, GroupMemory, GroupOp};
use super::record::{LogName, Move, Update, encode, encode_pad, padded_len};

/// The writing side of a log.
#[derive(Debug)]
pub struct RedoLog {
    layout: Layout,
    client: u32,
    name: LogName,
    head: u64,
    executed: u64,
    tail: u64,
    /// Records between `executed` and `tail`: the position behind each, and its copies.
    waiting: VecDeque<(u64, Vec<Move>)>,
}

impl RedoLog {
    /// An empty log whose head is at `head`.
    pub fn empty(layout: Layout, client: u32, name: LogName, head: u64) -> RedoLog {
        RedoLog {
            layout,
            client,
            name,
            head,
            executed: head,
            tail: head,
            waiting: VecDeque::new(),
        }
    }

    /// Records appended and not executed.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the head has passed everything.
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The largest record, padding included: with the pad before it, twice as much may be needed.
    pub fn max_record(&self) -> u64 {
        self.layout.spec.log_bytes / 2
    }

    /// Whether a record of these updates finds room now; refuses updates that never will, or leave
    /// the data area.
    pub fn has_room(&self, updates: &[Update]) -> Result<bool, GroupError> {
        let len = padded_len(updates)?;
        if len > self.max_record() {
            return Err(GroupError::RecordTooLarge {
                len,
                max: self.max_record(),
            });
        }
        for update in updates {
            self.layout
                .data_range(update.offset, update.bytes.len() as u64)?;
        }
        Ok(self.pad_before(len) + len <= self.free())
    }

    fn free(&self) -> u64 {
        self.layout.spec.log_bytes - (self.tail - self.head)
    }

    /// Bytes before the log's end that a record of `len` bytes has to skip.
    fn pad_before(&self, len: u64) -> u64 {
        let rest = self.layout.spec.log_bytes - self.tail % self.layout.spec.log_bytes;
        if rest < len { rest } else { 0 }
    }

    /// Puts a record behind the tail: what to post, in this order. A full log is an error, and
    /// nothing is done.
    pub fn stage(
        &mut self,
        updates: &[Update],
        max_transfer: usize,
    ) -> Result<Vec<GroupOp>, GroupError> {
        let len = padded_len(updates)?;
        if !self.has_room(updates)? {
            return Err(GroupError::LogFull {
                needed: self.pad_before(len) + len,
                free: self.free(),
            });
        }
        let base = self.layout.log_at(self.client);
        let log_bytes = self.layout.spec.log_bytes;
        let mut operations = Vec::new();
        let pad = self.pad_before(len);
        if pad > 0 {
            operations.push(GroupOp::Write {
                offset: base + self.tail % log_bytes,
                bytes: encode_pad(self.name, self.tail, pad),
            });
            self.tail += pad;
        }
        let at = self.tail % log_bytes;
        let (bytes, moves) = encode(self.name, self.tail, at, updates);
        let step = max_transfer.max(1);
        for (n, part) in bytes.chunks(step).enumerate() {
            operations.push(GroupOp::Write {
                offset: base + at + (n * step) as u64,
                bytes: part.to_vec(),
            });
        }
        self.tail += len;
        self.waiting.push_back((self.tail, moves));
        Ok(operations)
    }

    /// The copies that execute everything appended; they count as done once posted, because
    /// whatever moves the head is posted behind them.
    pub fn execute(&mut self) -> Vec<GroupOp> {
        let mut operations = Vec::new();
        for (end, moves) in self.waiting.drain(..) {
            let copies = moves
                .iter()
                .map(|copy| copy_operation(&self.layout, self.client, copy));
            operations.extend(copies);
            self.executed = end;
        }
        operations
    }

    /// What makes the executed part durable and then moves the head behind it.
    /// [`RedoLog::advanced`] follows once this has completed at every member; only then is the room
    /// free.
    //= hyperloop §5: ExecuteAndAdvance
    pub fn advance(&self) -> Vec<GroupOp> {
        vec![
            GroupOp::Flush,
            head_operation(&self.layout, self.client, self.executed),
            GroupOp::Flush,
        ]
    }

    /// The operations of [`RedoLog::advance`] have completed.
    pub fn advanced(&mut self) {
        self.head = self.executed;
    }

    /// Appends a record: gWRITE, then gFLUSH if `durable`. Complete at every member when this
    /// returns.
    //= hyperloop §5: Append
    pub async fn append<M: GroupMemory>(
        &mut self,
        io: &Io<M>,
        updates: &[Update],
        durable: bool,
    ) -> Result<(), GroupError> {
        let mut operations = self.stage(updates, io.max_transfer())?;
        if durable {
            operations.push(GroupOp::Flush);
        }
        run_all(io, operations).await.map(drop)
    }

    /// Executes everything appended and advances the head. Durable at every member when this
    /// returns.
    pub async fn execute_and_advance<M: GroupMemory>(
        &mut self,
        io: &Io<M>,
    ) -> Result<(), GroupError> {
        let mut operations = self.execute();
        operations.extend(self.advance());
        run_all(io, operations).await?;
        self.advanced();
        Ok(())
    }
}

/// One copy from a log into the data area.
pub(super) fn copy_operation(layout: &Layout, client: u32, copy: &Move) -> GroupOp {
    GroupOp::Copy {
        from: layout.log_at(client) + copy.from,
        to: layout.data_at() + copy.to,
        len: copy.len,
    }
}

/// Sets a log's head.
pub(super) fn head_operation(layout: &Layout, client: u32, head: u64) -> GroupOp {
    GroupOp::Write {
        offset: layout.slot_at(client) + SLOT_HEAD,
        bytes: head.to_le_bytes().to_vec(),
    }
}

/// Runs operations in order, in pieces that the queue takes.
pub(super) async fn run_all<M: GroupMemory>(
    io: &Io<M>,
    operations: Vec<GroupOp>,
) -> Result<Vec<Answer>, GroupError> {
    const PIECE: usize = MAX_QUEUED / 4;
    if operations.len() <= PIECE {
        return io.post(operations).await;
    }
    let mut answers = Vec::with_capacity(operations.len());
    let mut rest = operations.into_iter();
    loop {
        let piece: Vec<GroupOp> = rest.by_ref().take(PIECE).collect();
        if piece.is_empty() {
            return Ok(answers);
        }
        answers.extend(io.post(piece).await?);
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::LayoutSpec;
    use super::super::record::decode;
    use super::*;

    const NAME: LogName = LogName { seed: 99, epoch: 1 };

    fn log(log_bytes: u64) -> RedoLog {
        let spec = LayoutSpec {
            group: 1,
            locks: 1,
            clients: 2,
            log_bytes,
        };
        RedoLog::empty(Layout::new(spec, 16384).expect("layout"), 1, NAME, 0)
    }

    fn update(len: usize) -> [Update; 1] {
        [Update {
            offset: 0,
            bytes: vec![len as u8; len],
        }]
    }

    /// Applies what a log posts to its own bytes.
    fn apply(log: &RedoLog, ring: &mut [u8], operations: &[GroupOp]) {
        for operation in operations {
            if let GroupOp::Write { offset, bytes } = operation {
                let at = (offset - log.layout.log_at(1)) as usize;
                ring[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }

    #[test]
    fn a_full_log_says_so_and_takes_records_again_after_the_head_moved() {
        let mut log = log(512);
        let mut ring = vec![0; 512];
        let mut ends = Vec::new();
        loop {
            match log.stage(&update(100), 64) {
                Ok(operations) => apply(&log, &mut ring, &operations),
                Err(GroupError::LogFull { needed, free }) => {
                    assert!(needed > free);
                    break;
                }
                Err(other) => panic!("{other}"),
            }
            ends.push(log.tail);
        }
        let mut position = 0;
        for end in ends {
            let found = decode(NAME, &ring, position).expect("whole");
            assert_eq!(found.end, end);
            position = end;
        }
        let tail = log.tail;
        assert!(!log.execute().is_empty());
        assert!(
            log.stage(&update(100), 64).is_err(),
            "executed is not advanced"
        );
        log.advanced();
        assert!(log.is_empty());
        // The next record does not fit before the end: a pad leads to it.
        let operations = log.stage(&update(150), 1024).expect("room");
        apply(&log, &mut ring, &operations);
        let mut position = tail;
        if !tail.is_multiple_of(512) && 512 - tail % 512 < 256 {
            position = decode(NAME, &ring, tail).expect("pad").end;
        }
        assert_eq!(decode(NAME, &ring, position).expect("whole").end, log.tail);
    }

    #[test]
    fn a_record_that_never_fits_is_distinguished_from_a_full_log() {
        let mut log = log(512);
        assert!(matches!(
            log.stage(&update(300), 64),
            Err(GroupError::RecordTooLarge { max: 256, .. })
        ));
        let far = [Update {
            offset: 1 << 40,
            bytes: vec![1],
        }];
        assert!(matches!(
            log.stage(&far, 64),
            Err(GroupError::OutsideData { .. })
        ));
        assert!(log.is_empty());
    }

    #[test]
    fn the_largest_record_finds_room_wherever_an_empty_log_stands() {
        for position in (0..1024).step_by(64) {
            let mut log = log(512);
            (log.head, log.executed, log.tail) = (position, position, position);
            assert!(
                log.has_room(&update(256 - 48)).expect("possible"),
                "{position}"
            );
        }
    }
}

//! Records in flight, and how many parts of each are missing: one per backup, or one per block and
//! backup. Pure.

/// Numbers of records are used again, once the last part of a record has been counted: each part is
/// counted once.
#[derive(Default)]
pub(crate) struct Records {
    all: Vec<Record>,
    free: Vec<u32>,
}

struct Record {
    context: u64,
    left: usize,
    failed: bool,
}

impl Records {
    /// How many are in flight. Senders bound it.
    pub fn len(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// Takes note of a record of so many parts, one at least; answers its number.
    pub fn begin(&mut self, context: u64, left: usize) -> u32 {
        let record = Record {
            context,
            left,
            failed: false,
        };
        if let Some(number) = self.free.pop() {
            self.all[number as usize] = record;
            return number;
        }
        self.all.push(record);
        self.all.len() as u32 - 1
    }

    /// A part is durable. Answers the context of a record whose parts all are.
    pub fn done(&mut self, number: u32) -> Option<u64> {
        let record = &mut self.all[number as usize];
        record.left -= 1;
        let (last, failed) = (record.left == 0, record.failed);
        let context = record.context;
        if last {
            self.free.push(number);
        }
        (last && !failed).then_some(context)
    }

    /// A part never will be durable. Answers the context the first time that this happens to a
    /// record.
    pub fn failed(&mut self, number: u32) -> Option<u64> {
        let record = &mut self.all[number as usize];
        let first = !std::mem::replace(&mut record.failed, true);
        let context = record.context;
        self.done(number);
        first.then_some(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_durable_with_its_last_part() {
        let mut records = Records::default();
        let (a, b) = (records.begin(10, 2), records.begin(11, 1));
        assert_eq!(records.done(a), None);
        assert_eq!(records.done(b), Some(11));
        assert_eq!(records.done(a), Some(10));
        assert_eq!(records.len(), 0);
    }

    /// A failed record's number is not reused while a backup may still answer for it.
    #[test]
    fn a_record_fails_once_and_keeps_its_number_until_all_have_answered() {
        let mut records = Records::default();
        let a = records.begin(10, 3);
        assert_eq!(records.failed(a), Some(10));
        assert_eq!(records.failed(a), None);
        assert_ne!(records.begin(11, 1), a);
        assert_eq!(records.done(a), None);
        assert_eq!(records.begin(12, 1), a);
    }
}

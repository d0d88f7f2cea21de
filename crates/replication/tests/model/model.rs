//! What was sent, what was promised, and what a backup's memory is held to.

use std::collections::{HashMap, HashSet};

use cyclone_pmem::SharedArea;
use cyclone_replication::frame::{RecordName, Shape, scan_blocks};
use cyclone_replication::hyperloop;
use cyclone_replication::{
    Assembler, BackupMemory, Protocol, ScannedRecord, SegmentState, scan, scan_segment,
};

/// Payload bytes of a full block in the model's segments of 4 KiB.
const BLOCK_PAYLOAD: usize = 4096 - 32;

/// The same behind the mark of a chain's segment.
const CHAIN_BLOCK_PAYLOAD: usize = BLOCK_PAYLOAD - 64;

/// Bytes of one segment in the model.
pub const SEGMENT_BYTES: u64 = 4096;

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A record's bytes follow from its number; every block of it begins with the number.
pub fn content(id: u64, len: usize) -> Vec<u8> {
    assert!(len >= 8);
    let mut bytes = Vec::with_capacity(len + 8);
    let mut word = 0u64;
    while bytes.len() < len {
        let at = bytes.len();
        let value = if at % BLOCK_PAYLOAD == 0 || at % CHAIN_BLOCK_PAYLOAD == 0 {
            id
        } else {
            mix(id ^ word << 40)
        };
        bytes.extend_from_slice(&value.to_le_bytes());
        word += 1;
    }
    bytes.truncate(len);
    bytes
}

pub struct Record {
    pub len: usize,
    pub server: u32,
    pub worker: u32,
    pub backups: Vec<u32>,
    pub durable: bool,
    /// Each time that it was given to a sender.
    pub attempts: Vec<Attempt>,
}

pub struct Attempt {
    pub term: u32,
    /// The sender's life.
    pub life: usize,
    /// How often that life had opened its log, by backup.
    pub opens: Vec<usize>,
}

/// What one backup's memory has given away.
#[derive(Default)]
pub struct Digest {
    assembler: Assembler,
    /// Records that digestion delivered whole.
    delivered: HashSet<u64>,
    /// Under which names. Their segments were released: they must not come back.
    names: HashSet<(u64, RecordName)>,
    /// Records with a block in a released segment.
    touched: HashSet<u64>,
    /// Cut records that were digested in part when the backup died, and the digestion's memory with
    /// it.
    excused: HashSet<u64>,
    /// Per fenced (server, term): what was there when the fence was up.
    fences: Vec<(u32, u32, HashSet<u64>)>,
}

pub struct Model {
    pub protocol: Protocol,
    /// Whether slow writes are made again, under the same name.
    pub first_words: bool,
    pub records: Vec<Record>,
    pub digests: Vec<Digest>,
    /// How often each life of a sender has opened its log, by backup.
    pub opens: Vec<Vec<usize>>,
}

/// Where a record was found, and under which name.
type Copies = HashMap<u64, Vec<(u32, RecordName)>>;

fn id_of(bytes: &[u8]) -> u64 {
    let word = bytes.first_chunk::<8>().expect("a record of 8 bytes");
    u64::from_le_bytes(*word)
}

impl Model {
    fn check_found(&self, backup: u32, found: &ScannedRecord) -> u64 {
        let id = id_of(&found.bytes);
        let record = self.records.get(id as usize);
        let record = record.unwrap_or_else(|| panic!("a record that was never sent: {found:?}"));
        assert!(
            found.bytes == content(id, record.len),
            "record {id} is not what was sent"
        );
        assert_eq!(
            (found.sender.server, found.sender.worker),
            (record.server, record.worker),
            "record {id}'s sender"
        );
        assert!(
            record.attempts.iter().any(|it| it.term == found.term),
            "record {id} was not sent in term {}",
            found.term
        );
        assert!(
            record.backups.contains(&backup),
            "record {id} was not meant for backup {backup}"
        );
        for (server, term, before) in &self.digests[backup as usize].fences {
            if found.sender.server == *server && found.term < *term {
                assert!(
                    before.contains(&id),
                    "record {id} of server {server}, term {}, came after the fence of term {term}",
                    found.term
                );
            }
        }
        id
    }

    /// Everything a scan finds, each checked, by number.
    fn scanned(&self, backup: u32, area: &SharedArea) -> Copies {
        let memory = BackupMemory::view(area.clone()).expect("the table");
        let mut copies = Copies::new();
        scan(&memory, |found| {
            let copy = (found.segment, found.name);
            let id = self.check_found(backup, &found);
            copies.entry(id).or_default().push(copy);
        })
        .expect("scan");
        copies
    }

    /// What digestion would find if it went on through everything there is.
    fn digested_on(&self, backup: u32, area: &SharedArea) -> HashSet<u64> {
        let memory = BackupMemory::view(area.clone()).expect("the table");
        let mut assembler = self.digests[backup as usize].assembler.clone();
        let mut found = HashSet::new();
        for segment in
            memory.in_order(|entry| entry.state != SegmentState::Free && entry.owner.is_remote())
        {
            scan_segment(&memory, segment, &mut assembler, |record| {
                found.insert(self.check_found(backup, &record));
            })
            .expect("scan a segment");
        }
        found
    }

    /// The same record twice, but for a reason.
    fn check_copies(&self, backup: u32, id: u64, copies: &[(u32, RecordName)]) {
        let attempts = &self.records[id as usize].attempts;
        let names: HashSet<RecordName> = copies.iter().map(|(_, name)| *name).collect();
        let digested = &self.digests[backup as usize].names;
        for name in &names {
            assert!(
                self.first_words || !digested.contains(&(id, *name)),
                "record {id} was digested, its segment released, and it is there again"
            );
        }
        if self.protocol != Protocol::Tailwind {
            // One name per attempt, and each of them once: but for slow writes, which are made
            // again.
            assert!(
                names.len() <= attempts.len() && (copies.len() == names.len() || self.first_words),
                "record {id} is there {} times and was sent {} times",
                copies.len(),
                attempts.len()
            );
            return;
        }
        // Each time that a log is opened again, the lost buffer is written again, at a backup that
        // may not have lost it: once more per opening since, and never twice in one buffer.
        let opens = &self.opens;
        let again = |it: &Attempt| opens[it.life][backup as usize] - it.opens[backup as usize];
        let most: usize = attempts.iter().map(|it| 1 + again(it)).sum();
        assert!(
            copies.len() <= most,
            "record {id} is there {} times; {most} would be explained",
            copies.len()
        );
        for (segment, _) in copies {
            let here = copies.iter().filter(|(other, _)| other == segment).count();
            assert!(
                here <= attempts.len(),
                "record {id} is {here} times in segment {segment}"
            );
        }
    }

    /// Holds a backup's memory to what was promised.
    pub fn check(&self, backup: u32, area: &SharedArea) {
        let copies = self.scanned(backup, area);
        for (id, copies) in &copies {
            self.check_copies(backup, *id, copies);
        }
        let rest = self.digested_on(backup, area);
        let digest = &self.digests[backup as usize];
        for (id, record) in (0..).zip(&self.records) {
            if !record.durable || !record.backups.contains(&backup) {
                continue;
            }
            let digested = digest.delivered.contains(&id) || digest.excused.contains(&id);
            assert!(
                digested || copies.contains_key(&id) || rest.contains(&id),
                "record {id} of {} bytes was durable on backup {backup}, and is not there",
                record.len
            );
        }
    }

    /// Digests a used segment, which may be released then.
    pub fn digest(&mut self, backup: u32, area: &SharedArea, segment: u32) {
        let memory = BackupMemory::view(area.clone()).expect("the table");
        let entry = *memory.entry(segment).expect("in the table");
        assert_eq!(entry.state, SegmentState::Used);
        let mut found = Vec::new();
        let place = backup as usize;
        let mut assembler = std::mem::take(&mut self.digests[place].assembler);
        scan_segment(&memory, segment, &mut assembler, |record| {
            found.push(record)
        })
        .expect("scan a segment");
        for record in &found {
            let id = self.check_found(backup, record);
            self.digests[place].delivered.insert(id);
            self.digests[place].names.insert((id, record.name));
        }
        self.digests[place].assembler = assembler;
        if self.protocol == Protocol::Hyperloop {
            let touched = &mut self.digests[place].touched;
            return hyperloop::scan_blocks_of(&memory, segment, |_, payload| {
                // A cut record's last block may be shorter than a number.
                if payload.len() >= 8 {
                    touched.insert(id_of(payload));
                }
            })
            .expect("scan a segment");
        }
        let bytes = area.read_vec(memory.segment_offset(segment), memory.segment_bytes());
        let shape = match self.protocol {
            Protocol::Share | Protocol::Faa | Protocol::Rowan => Shape::WithHoles,
            _ => Shape::Contiguous,
        };
        scan_blocks(shape, memory.seed_of(&entry), &bytes, |_, payload| {
            self.digests[place].touched.insert(id_of(payload));
        });
    }

    /// A fence is up at a backup: nothing of that server and lower terms may come from now on.
    pub fn fenced(&mut self, backup: u32, area: &SharedArea, server: u32, term: u32) {
        let copies = self.scanned(backup, area);
        let digest = &mut self.digests[backup as usize];
        let mut before: HashSet<u64> = copies.into_keys().collect();
        before.extend(&digest.delivered);
        // A cut record's first blocks may be digested while its last are not.
        before.extend(&digest.touched);
        digest.fences.push((server, term, before));
    }

    /// A crash forgets the unfinished sets; what was digested stays.
    pub fn restarted(&mut self, backup: u32) {
        let digest = &mut self.digests[backup as usize];
        digest.assembler = Assembler::default();
        let cut = |id: &&u64| !digest.delivered.contains(id);
        digest.excused.extend(digest.touched.iter().filter(cut));
    }
}

//! Every scanner over damaged, recycled and forged memories: what it finds was written to this life
//! of the memory, whatever else is there; and it never leaves the segment.

use cyclone_pmem::{Region, SharedArea};
use cyclone_replication::frame::{Cut, Origin, RecordName, encode_block};
use cyclone_replication::tailwind::chain::{Chain, OVERHEAD_BYTES};
use cyclone_replication::tailwind::{Archive, scan_buffer};
use cyclone_replication::{
    BackupMemory, Content, FormatOptions, Owner, Protocol, SegmentState, SenderId, scan,
};
use proptest::prelude::*;

const ME: SenderId = SenderId {
    server: 1,
    worker: 2,
};
const TERM: u32 = 3;
const SEGMENT: u64 = 8192;
const BYTES: u64 = 64 << 10;
/// Rowan's tag is its queue's number.
const QUEUE: u64 = 41;
/// Payload bytes of the largest block: longer records are cut.
const PIECE: usize = 480;

const BLOCKS: [Protocol; 6] = [
    Protocol::Rpc,
    Protocol::Rwrite,
    Protocol::Batch,
    Protocol::Share,
    Protocol::Faa,
    Protocol::Rowan,
];

fn area() -> SharedArea {
    let region = Region::anonymous(BYTES).expect("region");
    region.take(0, BYTES).expect("area").share()
}

fn memory(protocol: Protocol) -> BackupMemory {
    let options = FormatOptions {
        protocol,
        segment_bytes: SEGMENT,
        secret: 0x1234_5678_9abc_def0,
    };
    BackupMemory::format(area(), &options).expect("format")
}

fn owner(protocol: Protocol) -> Owner {
    match protocol {
        Protocol::Rwrite | Protocol::Batch | Protocol::Tailwind => Owner::Sender(ME),
        Protocol::Share => Owner::Server(ME.server),
        _ => Owner::BackupLog,
    }
}

fn allocate(memory: &mut BackupMemory) -> (u32, u64) {
    let protocol = memory.protocol();
    let content = match protocol {
        Protocol::Rowan => Content::Zeroed,
        _ => Content::Stale,
    };
    let segment = memory
        .allocate(owner(protocol), TERM, QUEUE, content)
        .expect("segment");
    let entry = *memory.entry(segment).expect("entry");
    (segment, memory.seed_of(&entry))
}

fn found(memory: &BackupMemory) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    scan(memory, |record| {
        assert!(record.offset <= SEGMENT, "{record:?}");
        assert!(record.segment < memory.segments(), "{record:?}");
        found.push(record.bytes);
    })
    .expect("scan");
    found
}

/// A record's content; some imitate blocks and sealed objects.
#[derive(Clone, Debug)]
enum Fill {
    Byte(u8),
    Words(u64),
    /// Blocks one behind the other, as another seed would have them.
    Blocks(u64),
    /// A chain from its start, likewise.
    Chain(u64),
}

#[derive(Clone, Debug)]
struct Spec {
    len: usize,
    fill: Fill,
}

impl Spec {
    /// The content; `seed` is that of the segment, which its author does not know.
    fn record(&self, n: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![n as u8];
        while bytes.len() < self.len {
            match self.fill {
                Fill::Byte(byte) => bytes.push(byte),
                Fill::Words(word) => {
                    let word = word.wrapping_mul(bytes.len() as u64 | 1).rotate_left(17);
                    bytes.extend(word.to_le_bytes());
                }
                Fill::Blocks(other) => {
                    // On a multiple of 64 behind the block's header of 32 bytes.
                    bytes.resize((bytes.len() + 32).next_multiple_of(64) - 32, 0);
                    block(seed ^ other, 900, (1, 0), b"forged", &mut bytes);
                }
                Fill::Chain(other) => {
                    let mut chain = Chain::new(seed ^ other);
                    bytes.extend(chain.seal(b"forged").expect("seal"));
                    bytes.extend(chain.seal(b"forged too").expect("seal"));
                }
            }
        }
        bytes.truncate(self.len);
        bytes
    }
}

fn spec() -> impl Strategy<Value = Spec> {
    let fill = prop_oneof![
        any::<u8>().prop_map(Fill::Byte),
        any::<u64>().prop_map(Fill::Words),
        (1u64..).prop_map(Fill::Blocks),
        (1u64..).prop_map(Fill::Chain),
    ];
    (0usize..1200, fill).prop_map(|(len, fill)| Spec { len, fill })
}

fn specs() -> impl Strategy<Value = Vec<Spec>> {
    prop::collection::vec(spec(), 0..10)
}

fn block(seed: u64, n: u64, cut: (u16, u16), part: &[u8], into: &mut Vec<u8>) {
    let origin = Origin {
        sender: ME,
        term: TERM,
        name: RecordName::new(1, n),
    };
    encode_block(seed, &origin, cut, part, into);
}

/// A log of these records, as far as a segment has room, and the records in it.
fn log(protocol: Protocol, seed: u64, generation: u64, specs: &[Spec]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let mut bytes = Vec::new();
    let mut records = Vec::new();
    let mut chain = Chain::new(seed);
    let cut = Cut::new(PIECE + 32).expect("a cut");
    for (n, spec) in specs.iter().enumerate() {
        let record = spec.record(n, seed);
        let mut more = Vec::new();
        if protocol == Protocol::Tailwind {
            if bytes.len() + record.len() + OVERHEAD_BYTES > SEGMENT as usize {
                break;
            }
            more = chain.seal(&record).expect("seal");
        } else {
            let count = cut.count(record.len()) as u16;
            let name = generation * 100 + n as u64;
            for (part, number) in cut.parts(&record).zip(0u16..) {
                block(seed, name, (count, number), part, &mut more);
            }
            if bytes.len() + more.len() > SEGMENT as usize {
                break;
            }
        }
        bytes.extend(more);
        records.push(record);
    }
    (bytes, records)
}

fn write(memory: &BackupMemory, segment: u32, bytes: &[u8]) {
    memory.area().write(memory.segment_offset(segment), bytes);
}

/// What is done to bytes.
#[derive(Clone, Debug)]
enum Damage {
    Flip(prop::sample::Index, u8),
    Line(prop::sample::Index, u8),
    /// Words as a power failure leaves them.
    Zero(prop::sample::Index, usize),
    /// A block under another seed, at any line.
    Forged(prop::sample::Index, u64),
    Copied(prop::sample::Index, prop::sample::Index, usize),
    Random(prop::sample::Index, Vec<u8>),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        (index(), 1u8..).prop_map(|(at, flip)| Damage::Flip(at, flip)),
        (index(), any::<u8>()).prop_map(|(at, fill)| Damage::Line(at, fill)),
        (index(), 1usize..40).prop_map(|(at, words)| Damage::Zero(at, words)),
        (index(), 1u64..).prop_map(|(at, other)| Damage::Forged(at, other)),
        (index(), index(), 1usize..9).prop_map(|(from, to, lines)| Damage::Copied(from, to, lines)),
        (index(), prop::collection::vec(any::<u8>(), 1..80))
            .prop_map(|(at, bytes)| Damage::Random(at, bytes)),
    ]
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    prop::collection::vec(damage(), 0..12)
}

fn apply(bytes: &mut [u8], seed: u64, damages: &[Damage]) {
    let lines = bytes.len() / 64;
    for damage in damages {
        match damage {
            Damage::Flip(at, flip) => bytes[at.index(lines * 64)] ^= flip,
            Damage::Line(at, fill) => {
                let at = at.index(lines) * 64;
                bytes[at..at + 64].fill(*fill);
            }
            Damage::Zero(at, words) => {
                let at = at.index(lines * 8) * 8;
                let end = (at + words * 8).min(bytes.len());
                bytes[at..end].fill(0);
            }
            Damage::Forged(at, other) => {
                let at = at.index(lines) * 64;
                let mut forged = Vec::new();
                block(seed ^ other, 9, (1, 0), b"forged", &mut forged);
                bytes[at..at + 64].copy_from_slice(&forged[..64]);
            }
            Damage::Copied(from, to, count) => {
                let (from, to) = (from.index(lines), to.index(lines));
                let count = (*count).min(lines - from.max(to));
                bytes.copy_within(from * 64..(from + count) * 64, to * 64);
            }
            Damage::Random(at, random) => {
                let at = at.index(bytes.len());
                let end = (at + random.len()).min(bytes.len());
                bytes[at..end].copy_from_slice(&random[..end - at]);
            }
        }
    }
}

/// Whether all of `some` are in `all`, in its order.
fn is_in_order(some: &[Vec<u8>], all: &[Vec<u8>]) -> bool {
    let mut rest = all.iter();
    some.iter().all(|record| rest.any(|other| other == record))
}

/// As many cases as usual, or more.
fn cases() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig {
        cases: usual.cases + usual.cases / 6,
        failure_persistence: None,
        ..usual
    }
}

proptest! {
    #![proptest_config(cases())]

    /// Logs with holes: what is found was appended. Contiguous ones: and in order.
    #[test]
    fn blocks_that_are_found_were_written(
        which in 0..BLOCKS.len(),
        specs in specs(),
        damages in damages(),
    ) {
        let mut memory = memory(BLOCKS[which]);
        let (segment, seed) = allocate(&mut memory);
        let (mut bytes, records) = log(BLOCKS[which], seed, 0, &specs);
        bytes.resize(SEGMENT as usize, 0);
        write(&memory, segment, &bytes);
        prop_assert_eq!(&found(&memory), &records);
        apply(&mut bytes, seed, &damages);
        write(&memory, segment, &bytes);
        let there = found(&memory);
        for record in &there {
            prop_assert!(records.contains(record), "{:x?}", record);
        }
        let with_holes = matches!(BLOCKS[which], Protocol::Share | Protocol::Faa | Protocol::Rowan);
        prop_assert!(with_holes || is_in_order(&there, &records));
    }

    #[test]
    fn tailwind_finds_a_prefix_of_what_was_written(specs in specs(), damages in damages()) {
        let mut memory = memory(Protocol::Tailwind);
        let (segment, seed) = allocate(&mut memory);
        let (mut bytes, records) = log(Protocol::Tailwind, seed, 0, &specs);
        bytes.resize(SEGMENT as usize, 0);
        write(&memory, segment, &bytes);
        prop_assert_eq!(&found(&memory), &records);
        apply(&mut bytes, seed, &damages);
        write(&memory, segment, &bytes);
        let there = found(&memory);
        prop_assert!(records.starts_with(&there));
    }

    /// A segment is used again and again, without being zeroed where the protocol does not; the
    /// last life's log is cut off anywhere, and old lives' bytes show behind and between. Nothing
    /// of them is found.
    #[test]
    fn bytes_of_earlier_lives_are_nothing(
        which in 0..=BLOCKS.len(),
        lives in prop::collection::vec(specs(), 1..4),
        kept in prop::collection::vec(any::<bool>(), SEGMENT as usize / 64),
    ) {
        let protocol = *BLOCKS.get(which).unwrap_or(&Protocol::Tailwind);
        let mut memory = memory(protocol);
        let mut last = None;
        for (life, specs) in lives.iter().enumerate() {
            if let Some((segment, _)) = last.take() {
                memory.transition(segment, SegmentState::Used).expect("used");
                memory.transition(segment, SegmentState::Free).expect("free");
                // The search for a free one goes round: until it is this segment's turn.
                while memory.segments() > 1 {
                    let (other, _) = allocate(&mut memory);
                    if other == segment {
                        memory.transition(other, SegmentState::Used).expect("used");
                        memory.transition(other, SegmentState::Free).expect("free");
                        break;
                    }
                    memory.transition(other, SegmentState::Used).expect("used");
                    memory.transition(other, SegmentState::Free).expect("free");
                }
            }
            let (segment, seed) = allocate(&mut memory);
            let (bytes, records) = log(protocol, seed, life as u64, specs);
            if life + 1 < lives.len() {
                write(&memory, segment, &bytes);
            } else {
                for (line, bytes) in bytes.chunks(64).enumerate().filter(|(line, _)| kept[*line]) {
                    let at = memory.segment_offset(segment) + line as u64 * 64;
                    memory.area().write(at, bytes);
                }
            }
            last = Some((segment, records));
        }
        let (_, records) = last.expect("one life at least");
        for record in found(&memory) {
            prop_assert!(records.contains(&record), "{:x?}", record);
        }
    }

    /// Damage anywhere in a memory, its table included: it is refused, or what is found was
    /// written.
    #[test]
    fn a_damaged_memory_is_refused_or_tells_the_truth(
        which in 0..=BLOCKS.len(),
        logs in prop::collection::vec(specs(), 1..4),
        everywhere in damages(),
        table in prop::collection::vec((0u64..4096, any::<u8>()), 0..6),
    ) {
        let protocol = *BLOCKS.get(which).unwrap_or(&Protocol::Tailwind);
        let mut memory = memory(protocol);
        let mut written = Vec::new();
        for (n, specs) in logs.iter().enumerate() {
            let (segment, seed) = allocate(&mut memory);
            let (bytes, records) = log(protocol, seed, n as u64, specs);
            write(&memory, segment, &bytes);
            written.extend(records);
        }
        let mut image = memory.area().read_vec(0, BYTES);
        apply(&mut image, 5, &everywhere);
        for (at, value) in table {
            image[at as usize] = value;
        }
        let damaged = area();
        damaged.write(0, &image);
        for open in [BackupMemory::view, BackupMemory::open] {
            let Ok(memory) = open(damaged.clone()) else {
                continue;
            };
            for record in found(&memory) {
                prop_assert!(written.contains(&record), "{:x?}", record);
            }
        }
    }

    /// Random bytes where a whole memory should be, with a real header or without.
    #[test]
    fn random_memories_hold_nothing(seed: u64, header: bool, which in 0..=BLOCKS.len()) {
        let protocol = *BLOCKS.get(which).unwrap_or(&Protocol::Tailwind);
        let mut memory = memory(protocol);
        let (segment, _) = allocate(&mut memory);
        let mut word = seed | 1;
        let mut random = vec![0; SEGMENT as usize];
        for bytes in random.chunks_mut(8) {
            word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ seed;
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        if header {
            write(&memory, segment, &random);
            prop_assert_eq!(found(&memory), Vec::<Vec<u8>>::new());
        } else {
            let area = area();
            area.write(0, &random);
            prop_assert!(BackupMemory::view(area).is_err());
        }
    }

    /// Archived buffers: a damaged file is refused; its records are those of the buffer otherwise.
    #[test]
    fn a_damaged_archive_is_refused(
        specs in specs(),
        damages in prop::collection::vec(damage(), 1..6),
        cut in any::<prop::sample::Index>(),
        how in 0..3,
    ) {
        let directory = tempfile::tempdir().expect("directory");
        let mut archive = Archive::open(directory.path(), 4).expect("open");
        let (content, records) = log(Protocol::Tailwind, 77, 0, &specs);
        archive.store(5, 77, ME, &content).expect("store");
        let path = std::fs::read_dir(directory.path()).expect("list").next();
        let path = path.expect("one").expect("file").path();
        let original = std::fs::read(&path).expect("read");
        let mut bytes = original.clone();
        match how {
            0 => bytes.truncate(cut.index(bytes.len())),
            1 => bytes.extend_from_slice(&original[..=cut.index(original.len())]),
            _ => apply(&mut bytes, 77, &damages),
        }
        std::fs::write(&path, &bytes).expect("write");
        std::fs::write(directory.path().join("zz-0-0.buffer"), &bytes).expect("a stray file");
        std::fs::write(directory.path().join("0000000000000009-0-0.buffer"), &bytes).expect("another");
        let archive = Archive::open(directory.path(), 4).expect("open");
        prop_assert!(archive.read(9).is_err(), "its name is another's");
        match archive.read(5) {
            Ok(buffer) => {
                prop_assert_eq!(&bytes, &original);
                let scan = scan_buffer(buffer.seed, &buffer.content);
                let there: Vec<&[u8]> = scan.records.iter().map(|at| &buffer.content[at.clone()]).collect();
                prop_assert_eq!(there, records.iter().map(Vec::as_slice).collect::<Vec<_>>());
            }
            Err(_) => prop_assert!(bytes != original),
        }
    }
}

/// A payload that holds perfect blocks and objects, even under the right seed, is a payload: whole
/// records are never looked into.
#[test]
fn the_inside_of_a_whole_record_is_not_scanned() {
    for protocol in BLOCKS.into_iter().chain([Protocol::Tailwind]) {
        let mut memory = memory(protocol);
        let (segment, seed) = allocate(&mut memory);
        let mut inside = vec![0; 32];
        for n in 0..4 {
            block(seed, n, (1, 0), b"forged", &mut inside);
        }
        inside.extend(Chain::new(seed).seal(b"forged").expect("seal"));
        let mut bytes = Vec::new();
        if protocol == Protocol::Tailwind {
            bytes.extend(Chain::new(seed).seal(&inside).expect("seal"));
        } else {
            block(seed, 1, (1, 0), &inside, &mut bytes);
        }
        write(&memory, segment, &bytes);
        assert_eq!(found(&memory), [inside], "{protocol}");
    }
}

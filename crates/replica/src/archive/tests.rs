//! Archives written, read back, damaged, and replayed to every moment.

mod ends;
mod moments;
mod opening;

use std::fs;
use std::path::Path;
use std::time::Instant;

use cyclone_wire::batch;
use cyclone_wire::gang::{Head, Kind, Nonce};
use cyclone_wire::ring::crc32c_of;

use super::writer::Part;
use super::*;

const CLUSTER: u128 = 77 << 70;

/// A small generator: the same seed, the same numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(99);
        (self.0 >> 33) % bound
    }
}

#[derive(Clone)]
struct Entry {
    term: u64,
    payload: Vec<u8>,
    stamp_ms: u64,
    /// Place in the order in which everything was proposed.
    number: usize,
}

/// Logs as a leader with one clock would have written them. With `gangs`, some operations concern
/// several logs.
fn history(random: &mut Random, logs: u16, count: usize, gangs: bool) -> Vec<Vec<Entry>> {
    let mut all: Vec<Vec<Entry>> = vec![Vec::new(); usize::from(logs)];
    let mut stamp_ms = 1_000;
    let mut term = 3;
    for number in 0..count {
        stamp_ms += random.below(3);
        if random.below(40) == 0 {
            // A new leader begins its term in every log.
            term += 1;
            for log in &mut all {
                log.push(Entry {
                    term,
                    payload: Vec::new(),
                    stamp_ms: 0,
                    number,
                });
            }
        }
        let mut writer = batch::Writer::new();
        writer.push(|out| out.resize(out.len() + random.below(300) as usize, 7));
        let commands = writer.finish(stamp_ms);
        let members: Vec<u16> = match gangs && random.below(3) == 0 {
            true => (0..logs).filter(|_| random.below(2) == 0).collect(),
            false => Vec::new(),
        };
        if members.len() < 2 {
            all[random.below(u64::from(logs)) as usize].push(Entry {
                term,
                payload: commands,
                stamp_ms,
                number,
            });
            continue;
        }
        let mut head = Vec::new();
        Head {
            kind: Kind::Part,
            nonce: Nonce {
                replica: 1,
                boot: 1,
                counter: number as u64,
            },
            view: members.iter().map(|log| (*log, term)).collect(),
        }
        .encode(&mut head);
        for (place, log) in members.iter().enumerate() {
            let mut payload = head.clone();
            if place == 0 {
                payload.extend_from_slice(&commands);
            }
            all[usize::from(*log)].push(Entry {
                term,
                payload,
                stamp_ms: if place == 0 { stamp_ms } else { 0 },
                number,
            });
        }
    }
    all
}

fn settings(directory: &Path, segment_bytes: u64) -> ArchiveConfig {
    ArchiveConfig {
        directory: directory.to_owned(),
        seal_after: Duration::from_secs(3600),
        segment_bytes,
    }
}

/// Entries `from` to `to` of a log, as the loop hands them over.
fn part(log: u16, entries: &[Entry], from: u64, to: u64, gap_from: u64) -> Part {
    let mut bytes = Vec::new();
    for index in from..=to {
        let entry = &entries[index as usize - 1];
        let head = EntryHead {
            length: entry.payload.len() as u32,
            index,
            term: entry.term,
            kind: 0,
        };
        put_entry(&mut bytes, &head);
        bytes.extend_from_slice(&entry.payload);
    }
    let term = |index: u64| match index {
        0 => 0,
        index => entries[index as usize - 1].term,
    };
    let payload_crcs = (from..=to)
        .map(|index| crc32c_of(&entries[index as usize - 1].payload))
        .collect();
    Part {
        log,
        epoch: 1,
        first: from,
        prev_term: term(from - 1),
        gap_from,
        bytes,
        payload_crcs,
    }
}

#[track_caller]
fn until(is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A writer whose directory is open and its own.
fn open(settings: &ArchiveConfig, replica: u64, logs: u16) -> ArchiveWriter {
    let writer = ArchiveWriter::open_at(settings, CLUSTER, replica, logs).expect("a thread");
    assert!(writer.wait_open());
    writer.begin();
    writer
}

fn archive(directory: &Path, replica: u64, all: &[Vec<Entry>], segment_bytes: u64) {
    let logs = all.len() as u16;
    let settings = settings(directory, segment_bytes);
    let mut writer = open(&settings, replica, logs);
    for (log, entries) in (0..logs).zip(all) {
        let mut next = 1;
        while next <= entries.len() as u64 {
            let to = (next + 4).min(entries.len() as u64);
            writer.write(part(log, entries, next, to, 0));
            next = to + 1;
        }
    }
    writer.close();
}

fn archive_dir(directories: &[&Path]) -> ArchiveDir {
    let directories: Vec<_> = directories.iter().map(|path| path.to_path_buf()).collect();
    ArchiveDir::open(&directories, CLUSTER).expect("shelf")
}

/// One node's archive of everything, to be read.
fn archived(directory: &Path, all: &[Vec<Entry>]) -> ArchiveDir {
    archive(directory, 1, all, 8192);
    archive_dir(&[directory])
}

fn read_all(archive_dir: &ArchiveDir, log: u16) -> Result<Vec<Archived>, ArchiveError> {
    let mut reader = archive_dir.read(log, 0, 0);
    let mut read = Vec::new();
    while let Some(entry) = reader.next_entry()? {
        read.push(entry);
    }
    Ok(read)
}

fn same(read: &[Archived], entries: &[Entry]) -> bool {
    let alike = |(place, (read, entry)): (usize, (&Archived, &Entry))| {
        read.index == place as u64 + 1 && read.term == entry.term && read.payload == entry.payload
    };
    read.len() == entries.len() && read.iter().zip(entries).enumerate().all(alike)
}

fn files_of(directory: &Path, log: u16) -> Vec<std::path::PathBuf> {
    let named = files::list(directory).expect("listed");
    let of = named.into_iter().filter(|named| named.log == log);
    of.map(|named| named.path).collect()
}

#[test]
fn what_is_archived_is_read_back_and_goes_on_after_a_restart() {
    let directory = tempfile::tempdir().expect("directory");
    let all = history(&mut Random(1), 2, 300, false);
    let half: Vec<Vec<Entry>> = all
        .iter()
        .map(|log| log[..log.len() / 2].to_vec())
        .collect();
    archive(directory.path(), 1, &half, 4096);
    // A draft that a crash left is not believed.
    let draft = directory.path().join(files::draft(CLUSTER, 0, 1));
    fs::write(&draft, "half a file").expect("written");
    let settings = settings(directory.path(), 4096);
    let mut writer = open(&settings, 1, 2);
    until(|| !draft.exists());
    for (log, entries) in (0_u16..).zip(&all) {
        let (last, term) = writer.end_of(log);
        assert_eq!(last, half[usize::from(log)].len() as u64);
        assert_eq!(term, entries[last as usize - 1].term);
        writer.write(part(log, entries, last + 1, entries.len() as u64, 0));
    }
    writer.close();
    assert_eq!(writer.queued(), 0);
    let archive_dir = archive_dir(&[directory.path()]);
    assert!(archive_dir.len() > 6, "{} files", archive_dir.len());
    for (log, entries) in (0_u16..).zip(&all) {
        let read = read_all(&archive_dir, log).expect("read");
        assert!(same(&read, entries), "log {log}");
        let mut clock = 0;
        for (read, entry) in read.iter().zip(entries) {
            clock = clock.max(entry.stamp_ms);
            assert_eq!(read.clock_ms, clock);
        }
    }
    let other = ArchiveDir::open(&[directory.path().to_owned()], CLUSTER + 1).expect("shelf");
    assert!(other.is_empty());
}

/// A node is started whose archive's newest file, of another term than the one before, does not
/// read back: it is no file of another history, and its entries are archived again, from the log.
#[test]
fn a_damaged_newest_file_is_archived_again() {
    let directory = tempfile::tempdir().expect("directory");
    let mut all = history(&mut Random(9), 1, 20, false);
    all[0][10..].iter_mut().for_each(|entry| entry.term += 1);
    let settings = settings(directory.path(), 1);
    let open = || open(&settings, 1, 1);
    let mut writer = open();
    assert!(!writer.had_files(0));
    writer.write(part(0, &all[0], 1, 10, 0));
    writer.write(part(0, &all[0], 11, 20, 0));
    writer.close();
    let newest = files_of(directory.path(), 0).pop().expect("two files");
    let sound = fs::read(&newest).expect("read");
    fs::write(&newest, &sound[..sound.len() - 100]).expect("written");
    let mut writer = open();
    assert_eq!(writer.end_of(0), (10, all[0][9].term));
    writer.write(part(0, &all[0], 11, 20, 0));
    writer.close();
    let archive_dir = archive_dir(&[directory.path()]);
    assert!(same(&read_all(&archive_dir, 0).expect("read"), &all[0]));
    // Nor is an archive new whose only file does not read back: what the log has trimmed since is a
    // gap.
    for file in files_of(directory.path(), 0) {
        fs::write(file, b"damaged").expect("written");
    }
    let writer = open();
    assert_eq!((writer.end_of(0), writer.had_files(0)), ((0, 0), true));
}

#[test]
fn damage_is_reported_with_file_and_range_unless_another_node_has_it() {
    let (ours, theirs) = (
        tempfile::tempdir().expect("dir"),
        tempfile::tempdir().expect("dir"),
    );
    let all = history(&mut Random(2), 1, 120, false);
    archive(ours.path(), 1, &all, 4096);
    archive(theirs.path(), 2, &all, 3000);
    let alone = [ours.path()];
    let both = [ours.path(), theirs.path()];
    let files = files_of(ours.path(), 0);
    assert!(files.len() > 3);
    let victim = &files[1];
    let name = victim
        .file_name()
        .expect("name")
        .to_str()
        .expect("text")
        .to_owned();
    let sound = fs::read(victim).expect("read");
    let healed = |what: &str| {
        let archive_dir = archive_dir(&both);
        assert!(
            same(&read_all(&archive_dir, 0).expect(what), &all[0]),
            "{what}"
        );
    };
    for at in (0..sound.len()).step_by(7) {
        let mut bad = sound.clone();
        bad[at] ^= 4;
        fs::write(victim, &bad).expect("written");
        match read_all(&archive_dir(&alone), 0) {
            Err(error) => assert!(error.to_string().contains(&name), "byte {at}: {error}"),
            // A damaged end takes nothing away: each entry has its own checksum, and the next file
            // goes on.
            Ok(read) => {
                assert!(at >= sound.len() - 64, "byte {at} was not missed");
                assert!(same(&read, &all[0]), "byte {at}");
            }
        }
    }
    healed("a flip");
    fs::write(victim, &sound[..sound.len() - 100]).expect("written");
    let error = read_all(&archive_dir(&alone), 0).expect_err("cut off");
    assert!(error.to_string().contains("cut off"), "{error}");
    healed("a cut");
    fs::remove_file(victim).expect("removed");
    let error = read_all(&archive_dir(&alone), 0).expect_err("missing");
    let ArchiveError::Gap {
        from, to, noted, ..
    } = error
    else {
        panic!("{error}");
    };
    let mut words = name.split('.').skip(2);
    let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
    assert_eq!((Some(from), Some(to)), (number(), number()));
    assert!(!noted, "no reader knew of it");
    healed("a missing file");
    // The same entries with other terms are another history.
    let error = archive_dir(&alone).read(0, 1, 99).next_entry();
    assert!(
        matches!(error, Err(ArchiveError::OtherHistory { .. })),
        "{error:?}"
    );
}

#[test]
fn a_gap_that_the_node_knew_of_is_reported_as_such() {
    let directory = tempfile::tempdir().expect("directory");
    let all = history(&mut Random(3), 1, 60, false);
    let settings = settings(directory.path(), 1 << 20);
    let mut writer = open(&settings, 1, 1);
    writer.write(part(0, &all[0], 1, 20, 0));
    writer.write(part(0, &all[0], 31, 60, 21));
    writer.close();
    let archive_dir = archive_dir(&[directory.path()]);
    let error = read_all(&archive_dir, 0).expect_err("a gap");
    assert!(
        error.to_string().contains("entries 21 to 30 of log 0"),
        "{error}"
    );
    assert!(error.to_string().contains("had left the log"), "{error}");
    // What does not need it is read.
    let term = all[0][29].term;
    let after = archive_dir
        .read(0, 30, term)
        .next_entry()
        .expect("read")
        .expect("there");
    assert_eq!(after.index, 31);
}

#[test]
fn a_failing_disk_is_reported_and_entries_handed_out_are_discarded() {
    let directory = tempfile::tempdir().expect("directory");
    let place = directory.path().join("archive");
    let all = history(&mut Random(4), 1, 60, false);
    let writer = open(&settings(&place, 1), 1, 1);
    writer.write(part(0, &all[0], 1, 5, 0));
    until(|| writer.state(0).sealed == 5);
    fs::rename(&place, directory.path().join("away")).expect("renamed");
    writer.write(part(0, &all[0], 6, 10, 0));
    writer.write(part(0, &all[0], 11, 15, 0));
    until(|| writer.failed_epoch(0) == 1 && writer.queued() == 0);
    fs::rename(directory.path().join("away"), &place).expect("renamed");
    // Handed out before the failure was seen: void, or there would be a gap.
    writer.write(part(0, &all[0], 16, 20, 0));
    until(|| writer.queued() == 0);
    assert_eq!(writer.state(0).sealed, 5);
    assert!(writer.state(0).failing.is_some());
    let again = Part {
        epoch: 2,
        ..part(0, &all[0], 6, 20, 0)
    };
    writer.write(again);
    until(|| writer.state(0).sealed == 20);
    assert_eq!(writer.state(0).failing, None);
    drop(writer);
    let archive_dir = archive_dir(&[&place]);
    assert!(same(
        &read_all(&archive_dir, 0).expect("read"),
        &all[0][..20]
    ));
}

#[test]
fn what_has_changed_in_memory_is_not_archived() {
    let directory = tempfile::tempdir().expect("directory");
    let all = history(&mut Random(5), 1, 20, false);
    let writer = open(&settings(directory.path(), 1), 1, 1);
    writer.write(part(0, &all[0], 1, 5, 0));
    until(|| writer.state(0).sealed == 5);
    let mut damaged = part(0, &all[0], 6, 10, 0);
    *damaged.bytes.last_mut().expect("bytes") ^= 4;
    writer.write(damaged);
    until(|| writer.failed_epoch(0) == 1 && writer.queued() == 0);
    let failing = writer.state(0).failing.expect("told");
    assert!(
        failing.contains("entry 10 of log 0 has changed"),
        "{failing}"
    );
    assert_eq!((writer.state(0).damaged, writer.state(0).sealed), (10, 9));
    // It is left out, and named.
    let behind = Part {
        epoch: 2,
        ..part(0, &all[0], 11, 20, 10)
    };
    writer.write(behind);
    until(|| writer.state(0).sealed == 20);
    drop(writer);
    // Another node's archive has it.
    let other = tempfile::tempdir().expect("directory");
    let writer = open(&settings(other.path(), 1), 1, 2);
    writer.write(part(0, &all[0], 8, 12, 0));
    drop(writer);
    let one = archive_dir(&[directory.path()]);
    let error = read_all(&one, 0).expect_err("a gap").to_string();
    assert!(error.contains("entries 10 to 10 of log 0"), "{error}");
    let both = archive_dir(&[directory.path(), other.path()]);
    assert!(same(&read_all(&both, 0).expect("read"), &all[0][..20]));
}

/// For every moment: exactly what was proposed until then is applied, in all logs; so operations
/// over several logs are whole.
#[test]
fn every_moment_is_a_prefix_of_what_was_proposed() {
    for seed in 0..6 {
        let directory = tempfile::tempdir().expect("directory");
        let all = history(&mut Random(100 + seed), 4, 250, true);
        let archive_dir = archived(directory.path(), &all);
        let from = [(0, 0); 4];
        let latest = all.iter().flatten().map(|entry| entry.stamp_ms).max();
        let latest = latest.expect("entries");
        let reach = |until| replay(&archive_dir, &from, until, None).expect("replayed");
        for until in (990..=latest + 2).step_by(3) {
            let reached = reach(Until::Time(until));
            // The first thing proposed later.
            let later = all.iter().flatten().filter(|entry| entry.stamp_ms > until);
            let later = later.map(|entry| entry.number).min().unwrap_or(usize::MAX);
            for (log, (place, entries)) in reached.places.iter().zip(&all).enumerate() {
                let applied = &entries[..place.index as usize];
                let held = &entries[place.index as usize..];
                let story = format!("seed {seed}, until {until}, log {log}");
                // A term's first entries have no stamp; they may be on either side.
                let told = |entry: &&Entry| !entry.payload.is_empty();
                assert!(
                    applied
                        .iter()
                        .filter(told)
                        .all(|entry| entry.number < later),
                    "{story}"
                );
                assert!(
                    held.iter().filter(told).all(|entry| entry.number >= later),
                    "{story}"
                );
            }
        }
        let everything = reach(Until::End);
        for (place, entries) in everything.places.iter().zip(&all) {
            assert_eq!(
                (place.index, place.held),
                (entries.len() as u64, 0),
                "seed {seed}"
            );
            assert!(place.at_end);
        }
    }
}

#[test]
fn every_entry_can_be_asked_for_and_brings_its_gangs() {
    let directory = tempfile::tempdir().expect("directory");
    let all = history(&mut Random(7), 3, 150, true);
    let archive_dir = archived(directory.path(), &all);
    let from = [(0, 0); 3];
    for (log, entries) in (0_u16..).zip(&all) {
        for index in 1..=entries.len() as u64 {
            let reached =
                replay(&archive_dir, &from, Until::Index(log, index), None).expect("reached");
            assert_eq!(reached.places[usize::from(log)].index, index, "log {log}");
            // Each operation over several logs is in all of them or in none.
            let mut seen = std::collections::HashMap::new();
            for (place, entries) in reached.places.iter().zip(&all) {
                for (at, entry) in entries.iter().enumerate() {
                    if let Ok((head, _)) = Head::decode(&entry.payload) {
                        let applied = (at as u64) < place.index;
                        let known = *seen.entry(head.nonce).or_insert(applied);
                        assert_eq!(known, applied, "log {log}, entry {index}");
                    }
                }
            }
        }
    }
    let beyond = replay(&archive_dir, &from, Until::Index(0, 10_000), None).expect_err("beyond");
    assert!(
        beyond.to_string().contains("the archive ends with entry"),
        "{beyond}"
    );
}

#[test]
fn a_snapshot_that_is_later_is_refused() {
    let directory = tempfile::tempdir().expect("directory");
    let all = history(&mut Random(8), 1, 100, false);
    let archive_dir = archived(directory.path(), &all);
    let from = [(50, all[0][49].term)];
    for until in [Until::Index(0, 49), Until::Time(1_001)] {
        let error = replay(&archive_dir, &from, until, None).expect_err("later");
        assert!(error.to_string().contains("earlier snapshot"), "{error}");
    }
    let reached = replay(&archive_dir, &from, Until::Index(0, 50), None).expect("itself");
    assert_eq!((reached.places[0].index, reached.entries), (50, 0));
}

#[test]
fn a_gap_that_grows_while_the_disk_fails_is_one() {
    let mut lane = LogArchive::new(0);
    for there in [100, 300, 300] {
        // The file that was to name it could not be written.
        lane.next = 5;
        lane.lose(0, there);
    }
    assert_eq!((lane.gaps, lane.lost, lane.next), (1, 295, 300));
    lane.lose(0, 310);
    assert_eq!((lane.gaps, lane.lost), (1, 305), "nothing lies between");
    lane.next = 320;
    lane.lose(0, 330);
    assert_eq!((lane.gaps, lane.lost, lane.gap_from), (2, 315, 5));
}

//! Disks that do not answer, and directories with many files.

use std::process::Command;

use super::*;

/// Opening it blocks.
fn make_fifo(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().expect("mkfifo");
    assert!(made.success());
}

/// With thousands of files for every day, a start that opens all of them takes minutes.
#[test]
fn only_the_furthest_file_is_opened() {
    let directory = tempfile::tempdir().expect("directory");
    let all = history(&mut Random(11), 2, 80, false);
    archive(directory.path(), 1, &all, 1);
    for log in 0..2 {
        let files = files_of(directory.path(), log);
        for older in &files[..files.len() - 1] {
            fs::remove_file(older).expect("removed");
            make_fifo(older);
        }
    }
    let writer = open(&settings(directory.path(), 1), 1, 2);
    for (log, entries) in (0..2).zip(&all) {
        let last = entries.last().expect("entries");
        assert_eq!(writer.end_of(log), (entries.len() as u64, last.term));
        assert!(writer.had_files(log));
    }
}

/// The archive's disk hangs for hours, while the log asks for a sealed file five times a second.
#[test]
fn a_disk_that_hangs_is_asked_for_a_sealed_file_once() {
    let directory = tempfile::tempdir().expect("directory");
    let all = history(&mut Random(12), 2, 20, false);
    let writer = open(&settings(directory.path(), 1), 1, 2);
    let draft = directory.path().join(files::draft(CLUSTER, 0, 1));
    // Written only after the drafts that were left have been removed.
    writer.write(part(1, &all[1], 1, 1, 0));
    until(|| writer.state(1).sealed == 1);
    make_fifo(&draft);
    writer.write(part(0, &all[0], 1, 5, 0));
    let asked = |log| (0..1000).filter(|_| writer.seal(log)).count();
    assert_eq!((asked(0), asked(1)), (1, 1));
    // It answers, and the next request is a new one.
    let reader = fs::File::open(&draft).expect("opened");
    until(|| writer.seal(0));
    until(|| writer.seal(1));
    drop(reader);
}

/// A directory that is not there yet is made, but one that was there comes back later: an empty one
/// in its place would pass for an archive that begins.
#[test]
fn a_directory_that_is_gone_is_waited_for() {
    let directory = tempfile::tempdir().expect("directory");
    let (place, away) = (directory.path().join("a"), directory.path().join("b"));
    let all = history(&mut Random(13), 1, 20, false);
    archive(&place, 1, &all, 1);
    fs::rename(&place, &away).expect("renamed");
    fs::write(&place, "no directory").expect("written");
    let writer = ArchiveWriter::open_at(&settings(&place, 1), CLUSTER, 1, 1).expect("a thread");
    assert!(!writer.wait_open());
    assert!(writer.state(0).failing.is_some());
    fs::remove_file(&place).expect("removed");
    until(|| {
        let failing = writer.state(0).failing;
        failing.is_some_and(|what| what.contains("No such file"))
    });
    assert!(!place.exists());
    fs::rename(&away, &place).expect("renamed");
    until(|| writer.is_open());
    assert_eq!(writer.end_of(0).0, all[0].len() as u64);
    assert_eq!(writer.state(0).failing, None);
}

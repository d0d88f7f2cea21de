use super::*;

#[test]
fn fetches_that_are_of_no_use_become_rare() {
    let pauses: Vec<u64> = (0..8)
        .map(|given_up| pause_us(given_up) / 1_000_000)
        .collect();
    assert_eq!(pauses, [2, 2, 4, 8, 16, 32, 60, 60]);
    assert_eq!(pause_us(u32::MAX), LONGEST_PAUSE_US);
}

#[test]
fn only_what_is_named_like_the_nodes_own_is_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().join("snapshots");
    remove_leftovers(&root).expect("nothing is there");
    let own = ["made-3", "fetched-12", "snapshot-77", "made-4.gone-1"];
    let others = ["monday", "made-by-hand", "log-0.flash", "snapshot-"];
    for name in own.iter().chain(&others) {
        fs::create_dir_all(root.join(name).join("deep")).expect("made");
    }
    remove_leftovers(&root).expect("removed");
    let mut left: Vec<_> = fs::read_dir(&root)
        .expect("read")
        .map(|entry| entry.expect("an entry").file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["log-0.flash", "made-by-hand", "monday", "snapshot-"]);
}

#[test]
fn room_is_asked_of_the_file_system() {
    let directory = tempfile::tempdir().expect("a directory");
    assert!(has_room(directory.path(), 1));
    assert!(!has_room(directory.path(), u64::MAX));
    // The error will be reported when it is written to.
    assert!(has_room(&directory.path().join("missing"), u64::MAX));
}

#[test]
fn a_log_goes_on_behind_a_checkpoint_without_a_gap() {
    assert!(goes_on(6, 7) && goes_on(9, 7));
    assert!(!goes_on(5, 7));
    assert!(!goes_on(u64::MAX, 7), "nothing is behind it");
}

/// The list said less than the files held: the entries between were applied already, and the log
/// would have skipped others.
#[test]
fn what_is_installed_is_what_was_offered() {
    let meta = CheckpointMeta {
        applied: vec![(7, 1), (9, 2)],
    };
    check_installed(&[7, 9], &meta).expect("the same");
    for other in [&[7, 8][..], &[7], &[7, 9, 9], &[]] {
        let refused = check_installed(other, &meta);
        assert!(matches!(refused, Err(ApplyError::Fatal(_))), "{other:?}");
    }
}

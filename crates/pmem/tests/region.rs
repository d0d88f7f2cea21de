//! Regions of each kind that this machine has, and every reason why one cannot be used.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cyclone_pmem::{FlushPolicy, Kind, Region, RegionError, RegionOptions, Survives};

const LEN: u64 = 1 << 20;

fn options(path: &Path, len: u64, create: bool) -> RegionOptions {
    RegionOptions {
        path: path.to_path_buf(),
        len,
        create,
        flush: FlushPolicy::Auto,
    }
}

/// Writes in every way, reopens, and finds the bytes.
fn keeps_bytes(path: &Path, len: u64, kinds: &[Kind]) {
    let region = Region::open(&options(path, len, true)).unwrap();
    println!("{}", region.describe());
    assert!(kinds.contains(&region.kind()), "{}", region.describe());
    let survives = match region.kind() {
        Kind::FsDax => Survives::PowerLoss,
        _ => Survives::ProcessCrash,
    };
    assert_eq!((region.survives(), region.len()), (survives, len));
    let mut area = region.take(0, len).unwrap();
    assert!(
        area.bytes(0, len).iter().all(|&byte| byte == 0),
        "new regions are zero"
    );
    area.write(100, b"stored");
    area.write_streaming(1003, &[0xab; 777]);
    area.store_u64(64, 0x0102_0304_0506_0708);
    area.write(len - 3, b"end");
    area.flush(64, 2048);
    area.persist(len - 3, 3);
    drop((area, region));

    let region = Region::open(&options(path, len, false)).unwrap();
    let mut area = region.take(0, len).unwrap();
    assert_eq!(area.bytes(100, 6), b"stored");
    assert_eq!(area.bytes(1003, 777), [0xab; 777]);
    assert_eq!(
        (area.bytes(1002, 1), area.bytes(1780, 1)),
        (&[0][..], &[0][..])
    );
    assert_eq!(area.load_u64(64), 0x0102_0304_0506_0708);
    assert_eq!(area.bytes(len - 3, 3), b"end");
    area.zero(100, 6);
    assert_eq!(area.bytes(99, 8), [0; 8]);
}

#[test]
fn tmpfs_region_keeps_its_bytes() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: no /dev/shm to write to");
        return;
    };
    keeps_bytes(&folder.path().join("region"), LEN, &[Kind::Tmpfs]);
}

#[test]
fn plain_file_region_keeps_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    keeps_bytes(
        &folder.path().join("region"),
        LEN,
        &[Kind::File, Kind::FsDax, Kind::Tmpfs],
    );
}

#[test]
fn hugetlbfs_region_keeps_its_bytes() {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let mount = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let Some(mount) = mount
        .filter(|words| words[2] == "hugetlbfs")
        .map(|words| words[1])
        .next()
    else {
        println!("skipped: hugetlbfs is not mounted");
        return;
    };
    let free = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free = free
        .lines()
        .find_map(|line| line.strip_prefix("HugePages_Free:"))
        .map(str::trim);
    let Ok(folder) = tempfile::tempdir_in(mount) else {
        println!("skipped: cannot write to {mount}");
        return;
    };
    if free == Some("0") {
        println!("skipped: no huge pages are free");
        return;
    }
    keeps_bytes(&folder.path().join("region"), 2 << 20, &[Kind::HugeTlb]);
    let odd = Region::open(&options(&folder.path().join("odd"), 4096, true));
    assert!(
        matches!(odd, Err(RegionError::Unaligned { len: 4096, .. })),
        "{odd:?}"
    );
}

/// A child process stores, flushes, and dies by SIGABRT without unmapping anything; its region has
/// the bytes.
#[test]
fn bytes_survive_the_death_of_their_process() {
    const PATH: &str = "CYCLONE_TEST_REGION";
    if let Some(path) = std::env::var_os(PATH) {
        let region = Region::open(&options(Path::new(&path), LEN, true)).unwrap();
        let mut area = region.take(0, LEN).unwrap();
        area.write(4096, b"last words");
        area.persist(4096, 10);
        std::process::abort();
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "bytes_survive_the_death_of_their_process"])
        .env(PATH, &path)
        .output()
        .unwrap();
    assert!(!child.status.success());
    let region = Region::open(&options(&path, LEN, false)).expect("the lock died with its process");
    assert_eq!(region.take(0, LEN).unwrap().bytes(4096, 10), b"last words");
}

#[test]
fn missing_file_is_an_error_unless_it_may_be_created() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    let error = Region::open(&options(&path, LEN, false)).unwrap_err();
    println!("{error}");
    assert!(matches!(&error, RegionError::Io { action: "open", .. }));
    assert!(
        error.to_string().contains(path.to_str().unwrap()),
        "names the path: {error}"
    );
    assert!(!path.exists());
    let error = Region::open(&options(&folder.path().join("no/such"), LEN, true)).unwrap_err();
    assert!(
        matches!(error, RegionError::Io { action: "open", .. }),
        "{error}"
    );
}

#[test]
fn another_length_is_an_error_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    drop(Region::open(&options(&path, LEN, true)).unwrap());
    for (len, create) in [(LEN * 2, true), (LEN * 2, false), (LEN / 2, true)] {
        let error = Region::open(&options(&path, len, create)).unwrap_err();
        println!("{error}");
        match error {
            RegionError::WrongLength {
                actual, expected, ..
            } => assert_eq!((actual, expected), (LEN, len)),
            other => panic!("{other}"),
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), LEN);
    }
    std::fs::write(folder.path().join("empty"), b"").unwrap();
    let error = Region::open(&options(&folder.path().join("empty"), LEN, false)).unwrap_err();
    assert!(
        matches!(error, RegionError::WrongLength { actual: 0, .. }),
        "{error}"
    );
    Region::open(&options(&folder.path().join("empty"), LEN, true)).unwrap();
}

#[test]
fn region_has_one_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    let region = Region::open(&options(&path, LEN, true)).unwrap();
    let area = region.take(0, 64).unwrap();
    let error = Region::open(&options(&path, LEN, true)).unwrap_err();
    println!("{error}");
    assert!(matches!(&error, RegionError::InUse(at) if *at == path));
    drop(region);
    // An area keeps the mapping, and so the lock.
    let error = Region::open(&options(&path, LEN, false)).unwrap_err();
    assert!(matches!(error, RegionError::InUse(_)), "{error}");
    drop(area);
    Region::open(&options(&path, LEN, false)).unwrap();
}

#[test]
fn the_lock_ends_with_the_region_even_if_the_file_is_open_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    let region = Region::open(&options(&path, LEN, true)).unwrap();
    // As a child has it between fork and exec.
    let is_region = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|target| target == path)
    };
    let mut files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let descriptor = files
        .find(is_region)
        .expect("the region's file")
        .file_name();
    let descriptor = descriptor.to_str().unwrap().parse().unwrap();
    // SAFETY: the region keeps it open meanwhile.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let childs = descriptor.try_clone_to_owned().unwrap();
    drop(region);
    Region::open(&options(&path, LEN, false)).expect("no thread uses it");
    drop(childs);
}

#[test]
fn unwritable_paths_are_refused_by_name() {
    // Writing to a running program's file and creating files in sysfs are refused to root as well.
    let running = std::env::current_exe().unwrap();
    for path in [
        running,
        PathBuf::from("/sys/kernel/region"),
        std::env::temp_dir(),
    ] {
        let error = Region::open(&options(&path, LEN, true)).unwrap_err();
        println!("{error}");
        assert!(
            matches!(error, RegionError::Io { action: "open", .. }),
            "{error}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    drop(Region::open(&options(&path, LEN, true)).unwrap());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
    match Region::open(&options(&path, LEN, false)) {
        Ok(_) => println!("skipped: this user may write to read-only files"),
        Err(error) => assert!(
            matches!(error, RegionError::Io { action: "open", .. }),
            "{error}"
        ),
    }
}

#[test]
fn other_kinds_of_file_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    for path in [pipe, PathBuf::from("/dev/null")] {
        let error = Region::open(&options(&path, LEN, true)).unwrap_err();
        println!("{error}");
        assert!(
            matches!(&error, RegionError::NotMappable(at) if *at == path),
            "{error}"
        );
        assert!(path.exists());
    }
}

#[test]
fn lengths_that_cannot_be_mapped_leave_no_file_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("region");
    for len in [0, 1, 4095, LEN + 64] {
        let error = Region::open(&options(&path, len, true)).unwrap_err();
        assert!(
            matches!(error, RegionError::Unaligned { unit: 4096, .. }),
            "{error}"
        );
        assert!(!path.exists());
    }
    for len in [0, 63, 100] {
        let error = Region::anonymous(len).unwrap_err();
        assert!(
            matches!(error, RegionError::Unaligned { unit: 64, .. }),
            "{error}"
        );
    }
}

#[test]
fn no_space_is_an_error_and_leaves_no_file_behind() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: no /dev/shm to write to");
        return;
    };
    let sizes = Command::new("df")
        .args(["--output=size", "-B4096", "/dev/shm"])
        .output()
        .unwrap();
    let sizes = String::from_utf8(sizes.stdout).unwrap();
    let pages: u64 = sizes
        .lines()
        .nth(1)
        .and_then(|line| line.trim().parse().ok())
        .unwrap_or(0);
    if pages == 0 {
        println!("skipped: /dev/shm has no limit");
        return;
    }
    let path = folder.path().join("region");
    let error = Region::open(&options(&path, (pages + 1) * 4096, true)).unwrap_err();
    println!("{error}");
    assert!(matches!(
        &error,
        RegionError::Io {
            action: "reserve space for",
            ..
        }
    ));
    assert!(!path.exists());
    // A file that was there stays, as empty as before.
    std::fs::write(&path, b"").unwrap();
    Region::open(&options(&path, (pages + 1) * 4096, true)).unwrap_err();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn every_flush_policy_works_or_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (flush, name) in [
        (FlushPolicy::Auto, "cl"),
        (FlushPolicy::Eadr, "no flush"),
        (FlushPolicy::Clwb, "clwb"),
        (FlushPolicy::ClflushOpt, "clflushopt"),
        (FlushPolicy::Clflush, "clflush"),
    ] {
        let path = folder.path().join(format!("{flush:?}"));
        let opened = Region::open(&RegionOptions {
            flush,
            ..options(&path, LEN, true)
        });
        let region = match opened {
            Ok(region) => region,
            Err(RegionError::NoSuchFlush(refused)) => {
                println!("skipped {refused:?}: not on this CPU");
                assert!(refused == flush && !path.exists());
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        println!("{}", region.describe());
        assert!(region.describe().contains(name));
        let mut area = region.take(0, LEN).unwrap();
        area.write(60, b"across two lines");
        area.persist(60, 16);
        assert_eq!(area.bytes(60, 16), b"across two lines");
    }
}

#[test]
fn memory_survives_nothing_and_says_so() {
    let region = Region::anonymous(LEN).unwrap();
    assert_eq!(
        (region.kind(), region.survives()),
        (Kind::Anonymous, Survives::Nothing)
    );
    assert!(
        region.describe().ends_with("survives nothing"),
        "{}",
        region.describe()
    );
    assert_eq!(Survives::PowerLoss.to_string(), "power-loss");
    assert_eq!(Survives::ProcessCrash.to_string(), "process-crash");
}

#[test]
fn each_byte_is_handed_out_once() {
    let region = Region::anonymous(4096).unwrap();
    let first = region.take(0, 1024).unwrap();
    let middle = region.take(2048, 1000).unwrap();
    for (offset, len) in [
        (0, 1),
        (1023 & !63, 64),
        (2048, 64),
        (3008, 64),
        (0, 4096),
        (1984, 65),
    ] {
        let error = region.take(offset, len).unwrap_err();
        assert!(
            matches!(error, RegionError::Taken { .. }),
            "{offset}+{len}: {error}"
        );
    }
    for (offset, len) in [(4096, 1), (4032, 65), (32, 8), (64, u64::MAX)] {
        let error = region.take(offset, len).unwrap_err();
        assert!(
            matches!(error, RegionError::OutOfBounds { .. }),
            "{offset}+{len}: {error}"
        );
    }
    let rest = region.take(1024, 1024).unwrap();
    region.give_back(middle);
    region.take(2048, 2048).unwrap();
    // A part is not what was handed out, nor is another region's area of the same range.
    let (part, _other) = first.split_at(64);
    region.give_back(part);
    assert!(region.take(0, 64).is_err());
    Region::anonymous(4096).unwrap().give_back(rest);
    assert!(region.take(1024, 64).is_err());
}

#[test]
fn divided_areas_are_disjoint() {
    let region = Region::anonymous(4096).unwrap();
    let (mut low, mut high) = region.take(1024, 2048).unwrap().split_at(512);
    assert_eq!((low.len(), high.len()), (512, 1536));
    low.write(0, &[1; 512]);
    high.write(0, &[2; 1536]);
    assert!(low.bytes(0, 512).iter().all(|&byte| byte == 1));
    assert!(high.bytes(0, 1536).iter().all(|&byte| byte == 2));
}

#[test]
fn ranges_outside_an_area_panic() {
    let fails = |run: &mut dyn FnMut()| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
    };
    let region = Region::anonymous(4096).unwrap();
    let mut area = region.take(0, 1024).unwrap();
    assert!(fails(&mut || area.write(1020, &[0; 5])));
    assert!(fails(&mut || area.write_streaming(1025, &[])));
    assert!(fails(&mut || area.zero(u64::MAX, 2)));
    assert!(fails(&mut || area.flush(0, 1025)));
    assert!(fails(&mut || area.store_u64(1020, 1)));
    assert!(fails(&mut || area.store_u64(4, 1)), "not aligned");
    assert!(fails(&mut || drop(area.bytes(1024, 1).to_vec())));
    let mut area = Some(area);
    assert!(
        fails(&mut || drop(area.take().unwrap().split_at(32))),
        "not a line"
    );
}

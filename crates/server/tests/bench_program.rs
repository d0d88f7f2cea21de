//! `cyclone bench` becomes the program `cyclone-bench` that is installed beside it.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use cyclone::program::{CYCLONE, CYCLONE_BENCH};

/// A directory in which `cyclone` is installed, without `cyclone-bench`.
fn installed() -> (tempfile::TempDir, PathBuf) {
    // On the file system of the program, which is not copied.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("directory");
    let program = directory.path().join(CYCLONE);
    fs::hard_link(env!("CARGO_BIN_EXE_cyclone"), &program).expect("linked");
    (directory, program)
}

#[test]
fn arguments_environment_and_exit_status_are_passed_on() {
    let (directory, program) = installed();
    // A shell in its place says what it was given.
    let bench = directory.path().join(CYCLONE_BENCH);
    std::os::unix::fs::symlink("/bin/sh", &bench).expect("linked");
    let script = r#"printf '%s,' "$MARK" "$@"; exit 7"#;
    let output = Command::new(&program)
        .args(["bench", "-c", script, "sh", "--help", "two words", ""])
        .env("MARK", "marked")
        .output()
        .expect("run");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"marked,--help,two words,,");
    assert!(output.stderr.is_empty());
}

#[test]
fn program_on_the_path_is_used_when_none_is_beside() {
    let (_directory, program) = installed();
    let path = tempfile::tempdir().expect("directory");
    let bench = path.path().join(CYCLONE_BENCH);
    std::os::unix::fs::symlink("/bin/sh", &bench).expect("linked");
    let mut command = Command::new(&program);
    let status = command
        .args(["bench", "-c", "exit 9"])
        .env("PATH", path.path())
        .status();
    assert_eq!(status.expect("run").code(), Some(9));
}

#[test]
fn missing_program_is_named_with_its_path() {
    let (directory, program) = installed();
    for arguments in [&["bench"][..], &["bench", "--help"]] {
        let output = Command::new(&program)
            .args(arguments)
            .env("PATH", "/nowhere")
            .stdin(Stdio::null())
            .output()
            .expect("run");
        assert_eq!(output.status.code(), Some(1));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let path = directory.path().join(CYCLONE_BENCH);
        assert!(told.contains(path.to_str().expect("a text")), "{told}");
    }
    let help = Command::new(&program).arg("--help").output().expect("run");
    assert!(String::from_utf8_lossy(&help.stdout).contains("  bench "));
}

//! Clusters of real processes whose configurations are edited before they start, and the program
//! run beside them.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod guards;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use cyclone::cluster::{LocalCluster, Options};

pub const BINARY: &str = env!("CARGO_BIN_EXE_cyclone");

/// Ports of this process and test, below the ephemeral ones: test programs may run side by side.
pub fn first_port(base: u16, test: u16) -> u16 {
    base + (std::process::id() % 60) as u16 * 64 + test * 10
}

pub fn cluster(directory: &Path, options: Options) -> LocalCluster {
    let options = Options {
        executable: Some(PathBuf::from(BINARY)),
        ..options
    };
    LocalCluster::create(directory, &options).expect("cluster")
}

/// Puts a line into a section of every node's configuration.
pub fn configure(cluster: &LocalCluster, section: &str, line: &str) {
    for node in &cluster.nodes {
        configure_one(&node.config, section, line);
    }
}

pub fn configure_one(path: &Path, section: &str, line: &str) {
    let text = fs::read_to_string(path).expect("configuration");
    let heading = format!("[{section}]\n");
    let text = match text.contains(&heading) {
        true => text.replacen(&heading, &format!("{heading}{line}\n"), 1),
        false => format!("{text}\n{heading}{line}\n"),
    };
    fs::write(path, text).expect("written");
}

/// A copy of the first node's configuration with something else in one place.
pub fn edited(cluster: &LocalCluster, from: &str, to: &str) -> PathBuf {
    let text = fs::read_to_string(&cluster.nodes[0].config).expect("configuration");
    assert!(text.contains(from), "{from:?} is not in {text}");
    let path = cluster.directory.join("edited.toml");
    fs::write(&path, text.replacen(from, to, 1)).expect("written");
    path
}

/// Runs the program; answers how it ended.
pub fn cyclone(arguments: &[&str]) -> Output {
    Command::new(BINARY)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("run")
}

/// What it said on standard output; it must succeed.
#[track_caller]
pub fn said(arguments: &[&str]) -> String {
    let output = cyclone(arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What it said on standard error; it must fail, and without a panic.
#[track_caller]
pub fn refused(arguments: &[&str], words: &[&str]) {
    let output = cyclone(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments:?} should have failed");
    assert!(!error.contains("panicked"), "{error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is missing in: {error}");
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path of letters")
}

/// Sees a command through: on a machine that others use as well a leader may be busy briefly, and
/// says that nothing was done.
#[track_caller]
pub fn ask<T: redis::FromRedisValue>(
    connection: &mut redis::Connection,
    command: &redis::Cmd,
) -> T {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        match command.query(connection) {
            Ok(answer) => return answer,
            Err(error) => {
                assert_eq!(error.code(), Some("TRYAGAIN"), "{error}");
                assert!(Instant::now() < until, "{error}");
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

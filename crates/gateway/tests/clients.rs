//! Redis's own programs talk to a gateway. Skipped where they are not installed.

mod common;

use std::process::Command;

use common::{Server, installed};

fn cli(server: &Server, args: &[&str]) -> String {
    let port = server.addr.port().to_string();
    let output = Command::new("redis-cli")
        .args(["-p", &port])
        .args(args)
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_owned()
}

#[test]
fn redis_cli() {
    if !installed("redis-cli") {
        return;
    }
    let server = Server::plain();
    assert_eq!(cli(&server, &["set", "greeting", "hello world"]), "OK");
    assert_eq!(cli(&server, &["get", "greeting"]), "hello world");
    assert_eq!(cli(&server, &["-3", "get", "none"]), "");
    assert_eq!(cli(&server, &["-c", "incr", "n"]), "1");
    assert_eq!(cli(&server, &["--scan"]), "greeting\nn");
    assert!(cli(&server, &["info"]).contains("redis_version"));
    assert!(cli(&server, &["cluster", "nodes"]).contains("myself,master"));
    assert!(cli(&server, &["client", "list"]).contains("cmd=client"));
    assert!(cli(&server, &["command", "docs", "get"]).contains("summary"));
    assert!(cli(&server, &["foo"]).starts_with("ERR unknown command 'foo'"));
}

#[test]
fn redis_benchmark() {
    if !installed("redis-benchmark") {
        return;
    }
    let server = Server::plain();
    let port = server.addr.port().to_string();
    let args = [
        "-p",
        &port,
        "-t",
        "set,get,incr",
        "-c",
        "50",
        "-P",
        "16",
        "-n",
        "200000",
        "-q",
    ];
    let output = Command::new("redis-benchmark").args(args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "\n");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && errors.is_empty(),
        "{text}{errors}"
    );
    for line in text
        .lines()
        .filter(|line| line.contains("requests per second"))
    {
        println!("{line}");
    }
    for test in ["SET: ", "GET: ", "INCR: "] {
        assert!(
            text.lines()
                .any(|line| line.starts_with(test) && line.contains("requests per second")),
            "{text}"
        );
    }
}

//! What guarded Redis ports need in tests: certificates, hashed passwords, an unmodified client.

use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::BINARY;

/// Whether a program is there; says so where not.
pub fn installed(program: &str, argument: &str) -> bool {
    let found = Command::new(program).arg(argument).output().is_ok();
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

fn openssl(directory: &Path, arguments: &str) {
    let output = Command::new("openssl")
        .current_dir(directory)
        .args(arguments.split(' '))
        .output()
        .expect("openssl");
    assert!(
        output.status.success(),
        "openssl {arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// An authority, and a certificate for the loopback address that it has signed.
pub fn certificates(directory: &Path) {
    openssl(
        directory,
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=authority -keyout ca.key -out \
         ca.crt",
    );
    fs::write(directory.join("names"), "subjectAltName=IP:127.0.0.1").expect("written");
    openssl(
        directory,
        "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=node -keyout node.key -out node.csr",
    );
    openssl(
        directory,
        "x509 -req -days 2 -in node.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile names -out node.crt",
    );
}

/// A line of the file of users.
pub fn hash(user: &str, password: &str) -> String {
    let mut child = Command::new(BINARY)
        .args(["ctl", "hash-password", "--user", user])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("run");
    let mut stdin = child.stdin.take().expect("piped");
    writeln!(stdin, "{password}").expect("written");
    drop(stdin);
    let output = child.wait_with_output().expect("ended");
    assert!(output.status.success());
    String::from_utf8(output.stdout).expect("text")
}

/// Asks with redis-cli until the answer is as wanted; answers the last one.
pub fn redis_cli(address: SocketAddr, arguments: &[&str], wanted: impl Fn(&str) -> bool) -> String {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let output = Command::new("redis-cli")
            .args([
                "-h",
                &address.ip().to_string(),
                "-p",
                &address.port().to_string(),
            ])
            .args(arguments)
            .output()
            .expect("redis-cli");
        let answer = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        if wanted(&answer) {
            return answer;
        }
        assert!(Instant::now() < until, "{arguments:?}: {answer}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

//! Separate processes that tests start: this program again, for one of its tests.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// A process, killed when this goes.
pub struct Process(Child);

impl Process {
    /// Runs this program's test of that name, which sees the variable and says "ready" on its own
    /// line; waits for that. `wrapper`: the command that runs it, if any.
    pub fn start(wrapper: &[&str], test: &str, variable: &str) -> Process {
        let program = std::env::current_exe().unwrap();
        let mut words = wrapper.iter();
        let mut command = match words.next() {
            Some(first) => {
                let mut command = Command::new(first);
                command.args(words).arg(program);
                command
            }
            None => Command::new(program),
        };
        let child = command
            .args(["--exact", test, "--nocapture"])
            .env(variable, "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut process = Process(child);
        let mut output = BufReader::new(process.0.stdout.take().unwrap());
        let mut line = String::new();
        while line.trim() != "ready" {
            line.clear();
            let n = output.read_line(&mut line).unwrap();
            assert!(n > 0, "{test}: the process is gone");
        }
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

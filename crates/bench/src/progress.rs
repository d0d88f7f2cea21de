//! What is in progress, for people who wait: a bar with live numbers on a terminal, a line every
//! few seconds elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// The bar, or the lines.
pub struct Progress {
    out: Box<dyn Write>,
    terminal: bool,
    step: usize,
    steps: usize,
    label: String,
    told: Option<Instant>,
    last: (u64, Duration),
    begun: Instant,
}

/// Characters of the bar.
const BAR: usize = 24;
/// Between two lines where there is no terminal.
const QUIET: Duration = Duration::from_secs(5);

impl Progress {
    /// On standard error.
    pub fn stderr(steps: usize) -> Progress {
        let stderr = std::io::stderr();
        Progress::to(stderr.is_terminal(), Box::new(stderr), steps)
    }

    /// To `out`, as on a terminal or not.
    pub fn to(terminal: bool, out: Box<dyn Write>, steps: usize) -> Progress {
        Progress {
            out,
            terminal,
            step: 0,
            steps,
            label: String::new(),
            told: None,
            last: (0, Duration::ZERO),
            begun: Instant::now(),
        }
    }

    /// The next step begins.
    pub fn step(&mut self, label: &str) {
        self.step += 1;
        label.clone_into(&mut self.label);
        self.last = (0, Duration::ZERO);
        self.tell("", self.terminal);
    }

    /// So many more steps are to come.
    pub fn expect(&mut self, steps: usize) {
        self.steps += steps;
    }

    /// What the step has come to.
    pub fn note(&mut self, text: &str) {
        self.tell(text, self.terminal);
    }

    /// Something is in progress that is no separate step.
    pub fn label(&mut self, label: &str) {
        label.clone_into(&mut self.label);
    }

    /// So many operations have ended since the step began.
    pub fn live(&mut self, done: u64, elapsed: Duration) {
        let seconds = (elapsed.saturating_sub(self.last.1)).as_secs_f64();
        let rate = done.saturating_sub(self.last.0) as f64 / seconds.max(1e-3);
        self.last = (done, elapsed);
        self.tell(&format!("{} ops/s", grouped(rate as u64)), self.terminal);
    }

    /// So many keys are there.
    pub fn filling(&mut self, keys: u64) {
        // Called very often.
        let wait = Duration::from_millis(200);
        if self.told.is_none_or(|told| told.elapsed() >= wait) {
            self.tell(&format!("{} keys written", grouped(keys)), self.terminal);
        }
    }

    /// One line that stays.
    pub fn say(&mut self, text: &str) {
        let clear = if self.terminal { "\r\x1b[K" } else { "" };
        // The terminal may be gone.
        let _ = writeln!(self.out, "{clear}{text}");
        let _ = self.out.flush();
    }

    /// Removes the bar, for now or for good.
    pub fn end(&mut self) {
        if self.terminal {
            let _ = write!(self.out, "\r\x1b[K");
            let _ = self.out.flush();
        }
    }

    fn tell(&mut self, numbers: &str, always: bool) {
        if !always && self.told.is_some_and(|told| told.elapsed() < QUIET) {
            return;
        }
        self.told = Some(Instant::now());
        let line = line(
            self.step,
            self.steps,
            &self.label,
            numbers,
            self.begun.elapsed(),
        );
        let _ = match self.terminal {
            true => write!(self.out, "\r\x1b[K{line}"),
            false => writeln!(self.out, "{line}"),
        };
        let _ = self.out.flush();
    }
}

fn line(step: usize, steps: usize, label: &str, numbers: &str, elapsed: Duration) -> String {
    let done = step.saturating_sub(1).min(steps);
    let full = BAR * done / steps.max(1);
    let bar = format!("{}{}", "█".repeat(full), "·".repeat(BAR - full));
    let seconds = elapsed.as_secs();
    // Repetitions of what was disturbed come on top of what was expected.
    let steps = steps.max(step);
    let mut line = format!(
        "{bar} {step}/{steps} {}:{:02} {label}",
        seconds / 60,
        seconds % 60
    );
    if !numbers.is_empty() {
        line.push_str("  ");
        line.push_str(numbers);
    }
    line
}

/// With commas between thousands.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("page").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_terminal_has_a_bar_that_is_written_over() {
        let page = Page::default();
        let mut progress = Progress::to(true, Box::new(page.clone()), 4);
        progress.step("first");
        progress.step("second");
        progress.live(50_000, Duration::from_millis(500));
        progress.live(60_000, Duration::from_millis(600));
        progress.end();
        let text = String::from_utf8(page.0.lock().expect("page").clone()).expect("text");
        assert!(text.contains("2/4") && text.contains("██████·"), "{text}");
        assert_eq!(text.matches("100,000 ops/s").count(), 2, "{text}");
        assert!(!text.contains('\n') && text.ends_with("\r\x1b[K"));
    }

    #[test]
    fn without_a_terminal_a_line_is_printed_periodically() {
        let page = Page::default();
        let mut progress = Progress::to(false, Box::new(page.clone()), 2);
        for step in 0..100 {
            progress.step(&format!("step {step}"));
            progress.live(1, Duration::from_millis(1));
        }
        let text = String::from_utf8(page.0.lock().expect("page").clone()).expect("text");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(!text.contains('\r'));
    }

    #[test]
    fn numbers_have_commas() {
        let numbers = [0, 999, 1000, 1_234_567].map(grouped);
        assert_eq!(numbers, ["0", "999", "1,000", "1,234,567"]);
    }
}

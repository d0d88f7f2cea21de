//! What was promised, what came out, and whether that is as promised.

use serde::Serialize;

/// One promise about a result.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// What the number is.
    pub what: String,
    /// The number.
    pub value: f64,
    /// `at least` or `at most`.
    pub bound: Bound,
    /// The limit.
    pub limit: f64,
    /// Whether it is kept.
    pub kept: bool,
    /// What a reader must know about this machine to judge it; empty if nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// On which side of its limit a number must lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// Not below.
    AtLeast,
    /// Not above.
    AtMost,
}

impl Verdict {
    /// A number that must not be below its limit.
    pub fn at_least(what: impl Into<String>, value: f64, limit: f64) -> Verdict {
        Verdict::new(what.into(), value, Bound::AtLeast, limit)
    }

    /// A number that must not be above its limit.
    pub fn at_most(what: impl Into<String>, value: f64, limit: f64) -> Verdict {
        Verdict::new(what.into(), value, Bound::AtMost, limit)
    }

    fn new(what: String, value: f64, bound: Bound, limit: f64) -> Verdict {
        let kept = match bound {
            Bound::AtLeast => value >= limit,
            Bound::AtMost => value <= limit,
        };
        Verdict {
            what,
            value,
            bound,
            limit,
            kept,
            note: String::new(),
        }
    }

    /// With a note.
    pub fn note(mut self, note: impl Into<String>) -> Verdict {
        self.note = note.into();
        self
    }

    /// In one line.
    pub fn line(&self) -> String {
        let side = match self.bound {
            Bound::AtLeast => "≥",
            Bound::AtMost => "≤",
        };
        let verdict = if self.kept { "ok  " } else { "MISS" };
        let mut line = format!(
            "{verdict} {}: {:.3} ({side} {})",
            self.what, self.value, self.limit
        );
        if !self.note.is_empty() {
            line.push_str(" – ");
            line.push_str(&self.note);
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_none_keeps_no_promise() {
        assert!(Verdict::at_least("x", 1.4, 1.4).kept);
        assert!(Verdict::at_most("x", 1.03, 1.03).kept);
        assert!(!Verdict::at_most("x", 1.031, 1.03).kept);
        assert!(!Verdict::at_least("x", f64::NAN, 1.0).kept);
        assert!(!Verdict::at_most("x", f64::NAN, 1.0).kept);
    }
}

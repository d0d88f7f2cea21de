//! Clients that read weakly (cyclone §2). What they read is not linearizable and not in the history; what they were promised is
//! checked here: each adds to a counter of its own, and no weak read may show less than it was told before the read began, by an
//! addition or by another weak read, whichever leader answered.

/// What one such client knows.
#[derive(Debug, Default)]
pub struct Weak {
    /// The highest count it was told.
    told: i64,
    turns: u64,
}

impl Weak {
    /// What to do next: `None` to add, otherwise to read, and what must be shown at least.
    pub fn turn(&mut self) -> Option<i64> {
        self.turns += 1;
        (!self.turns.is_multiple_of(3)).then_some(self.told)
    }

    /// An addition has been answered.
    pub fn added(&mut self, count: i64) {
        self.told = self.told.max(count);
    }

    /// A weak read has been answered.
    ///
    /// # Errors
    /// When it shows less than it must.
    pub fn read(&mut self, least: i64, value: Option<&[u8]>) -> anyhow::Result<()> {
        let text = value.map_or("0".into(), String::from_utf8_lossy);
        let count: i64 = text.parse()?;
        anyhow::ensure!(
            count >= least,
            "a weak read shows {count} to a client that was told {least} before"
        );
        self.told = self.told.max(count);
        Ok(())
    }
}

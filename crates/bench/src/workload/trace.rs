//! A sequence of operations as a file, so that load generators in other languages do the same work
//! (docs/benchmarks.md).
//!
//! ```text
//!  0        8     12    13   16
//! | key     | len | act | 0 | …   16 bytes each, little-endian
//! ```
//! `act`: 0 write, 1 read, 2 read-modify-write, 3 insert, 4 scan. A batch's writes follow each
//! other.

use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result};

use super::{Act, Op};

/// Writes operations.
///
/// # Errors
/// What the file system says.
pub fn write(path: &Path, ops: impl Iterator<Item = Op>) -> Result<()> {
    let file =
        std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut file = BufWriter::new(file);
    for op in ops {
        let act = match op.act {
            Act::Write => 0,
            Act::Read => 1,
            Act::ReadWrite => 2,
            Act::Insert => 3,
            Act::Scan => 4,
        };
        file.write_all(&op.key.to_le_bytes())?;
        file.write_all(&op.len.to_le_bytes())?;
        file.write_all(&[act, 0, 0, 0])?;
    }
    file.flush().context("writing the trace")
}

#[cfg(test)]
mod tests {
    use super::super::{Inserts, Keys, Mix, Sizes, Source, Workload};
    use super::*;

    #[test]
    fn a_trace_holds_what_the_source_draws() {
        let workload = Workload {
            keys: 50,
            key_bytes: 8,
            choice: Keys::Uniform,
            sizes: Sizes::Etc,
            mix: Mix::reads(0.5),
            batch: 1,
            spread: 0,
        };
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("trace");
        let mut source = Source::new(&workload, 3, 0, &Inserts::after(50));
        write(&path, (0..100).map(|_| source.draw())).expect("written");
        let bytes = std::fs::read(&path).expect("read");
        assert_eq!(bytes.len(), 1600);
        let mut source = Source::new(&workload, 3, 0, &Inserts::after(50));
        for line in bytes.chunks(16) {
            let op = source.draw();
            assert_eq!(line[..8], op.key.to_le_bytes());
            assert_eq!(line[8..12], op.len.to_le_bytes());
            assert_eq!(line[12], u8::from(op.act == Act::Read));
        }
    }
}

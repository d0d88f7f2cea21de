//! Where a server's checkpoints of its indexes lie: a file beside its memory, replaced as a whole. It may be missing, old or
//! damaged: then a start reads more of the memory.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cyclone_pmkv::{Checkpoint, SharedControl, Sink, Start};

/// Where a server's checkpoint is.
fn path(fabric: &Path, id: u32) -> PathBuf {
    fabric.join(format!("s{id}.index"))
}

/// What a server starts with, over a memory with this number.
pub(super) fn start(fabric: &Path, id: u32, memory: u64) -> Start {
    let bytes = fs::read(path(fabric, id));
    let checkpoint = bytes
        .ok()
        .and_then(|bytes| match Checkpoint::decode(&bytes) {
            Ok(checkpoint) => Some(Arc::new(checkpoint)),
            Err(error) => {
                tracing::warn!(server = id, %error, "the checkpoint of the indexes is not used");
                None
            }
        });
    Start { memory, checkpoint }
}

struct IntoFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl IntoFile {
    fn create(path: PathBuf) -> io::Result<IntoFile> {
        let file = BufWriter::new(File::create(path.with_extension("index.new"))?);
        Ok(IntoFile { path, file })
    }
}

impl Sink for IntoFile {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        fs::rename(self.path.with_extension("index.new"), &self.path)
    }
}

/// When the next checkpoint is due.
pub(super) struct Timetable {
    path: PathBuf,
    every: Duration,
    begun: Instant,
}

impl Timetable {
    /// One each so many seconds.
    pub fn new(fabric: &Path, id: u32, every_s: u64) -> Timetable {
        Timetable {
            path: path(fabric, id),
            every: Duration::from_secs(every_s.max(1)),
            begun: Instant::now(),
        }
    }

    /// Begins one if it is time. What fails is said, and tried again when the next is due.
    pub fn look(&mut self, control: &SharedControl) {
        if self.begun.elapsed() < self.every {
            return;
        }
        self.begun = Instant::now();
        let begun = IntoFile::create(self.path.clone())
            .and_then(|file| control.begin_checkpoint(Box::new(file)));
        if let Err(error) = begun {
            tracing::warn!(%error, "no checkpoint of the indexes");
        }
    }
}

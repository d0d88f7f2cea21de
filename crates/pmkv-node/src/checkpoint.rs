//! Where a server's checkpoints of its indexes lie: a file beside its memory, replaced as a whole.
//! It may be missing, old or damaged: then a start reads more of the memory.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
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

/// Where the bytes are.
enum State {
    Written(BufWriter<File>),
    /// A separate thread waits for the disk: the writing thread has a lease to renew.
    Synced(JoinHandle<io::Result<()>>),
    Over,
}

struct IntoFile {
    path: PathBuf,
    state: State,
}

impl IntoFile {
    fn create(path: PathBuf) -> io::Result<IntoFile> {
        let file = File::create(path.with_extension("index.new"))?;
        let state = State::Written(BufWriter::new(file));
        Ok(IntoFile { path, state })
    }

    /// Begins to make the file durable and the newest.
    fn sync(&self, mut file: BufWriter<File>) -> io::Result<JoinHandle<io::Result<()>>> {
        let path = self.path.clone();
        thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || {
                file.flush()?;
                file.get_ref().sync_all()?;
                fs::rename(path.with_extension("index.new"), &path)
            })
    }
}

impl Sink for IntoFile {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.state {
            State::Written(file) => file.write_all(bytes),
            State::Synced(_) | State::Over => Err(io::Error::other("the checkpoint is whole")),
        }
    }

    fn finish(&mut self) -> io::Result<bool> {
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Written(file) => State::Synced(self.sync(file)?),
            State::Synced(thread) if thread.is_finished() => {
                let ended = thread.join();
                ended.unwrap_or_else(|_| Err(io::Error::other("its thread has panicked")))?;
                State::Over
            }
            unchanged => unchanged,
        };
        Ok(matches!(self.state, State::Over))
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
        let begun = control.begin_checkpoint(|| {
            let file = IntoFile::create(self.path.clone())?;
            Ok(Box::new(file) as Box<dyn Sink>)
        });
        if let Err(error) = begun {
            tracing::warn!(%error, "no checkpoint of the indexes");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_newest_once_its_thread_has_made_it_durable() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = path(directory.path(), 3);
        fs::write(&path, "older").expect("written");
        let mut file = IntoFile::create(path.clone()).expect("created");
        file.put(b"some ").expect("put");
        file.put(b"bytes").expect("put");
        assert_eq!(fs::read(&path).expect("read"), b"older");
        while !file.finish().expect("no error") {
            assert!(file.put(b"more").is_err());
            thread::yield_now();
        }
        assert_eq!(fs::read(&path).expect("read"), b"some bytes");
        assert!(!path.with_extension("index.new").exists());
    }

    #[test]
    fn what_cannot_be_made_durable_is_an_error() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = IntoFile::create(path(directory.path(), 3)).expect("created");
        fs::remove_file(directory.path().join("s3.index.new")).expect("removed");
        let error = loop {
            match file.finish() {
                Ok(is_done) => assert!(!is_done),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

//! The device on ordinary reads and writes, done by a few threads: where io_uring is not to be had.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use super::device::{Action, Completion, DeviceError, FlashDevice, Request};
use super::probe::{FlashFacts, probe};

const THREADS: usize = 4;
const OUTSTANDING: usize = 64;
/// How long an area may stay locked behind a process that has ended.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The file of an area, opened for direct I/O where the file system takes it, and locked.
pub(crate) struct AreaFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    pub(crate) direct: bool,
    pub(crate) facts: FlashFacts,
}

impl AreaFile {
    /// Opens or makes it.
    pub(crate) fn open(path: &Path, sync: bool) -> io::Result<AreaFile> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let lock = FlockOperation::NonBlockingLockExclusive;
        AreaFile::open_with(path, sync, &options, lock)
    }

    fn open_with(
        path: &Path,
        sync: bool,
        options: &OpenOptions,
        operation: FlockOperation,
    ) -> io::Result<AreaFile> {
        let flags = |direct: bool| {
            let direct = if direct { libc::O_DIRECT } else { 0 };
            direct | if sync { libc::O_DSYNC } else { 0 }
        };
        let open = |direct: bool| {
            let mut options = options.clone();
            options.custom_flags(flags(direct)).mode(0o600).open(path)
        };
        let (file, direct) = match open(true) {
            Ok(file) => (file, true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (open(false)?, false),
            Err(error) => return Err(error),
        };
        lock(&file, operation)?;
        // Its name, and what an earlier process wrote last: a file that has grown may only have
        // done so in a journal.
        file.sync_all()?;
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
        let mut facts = probe(path);
        if !direct {
            // Then the kernel's cache is in between.
            facts.volatile_cache = Some(true);
        }
        let path = path.to_path_buf();
        Ok(AreaFile {
            file,
            path,
            direct,
            facts,
        })
    }

    /// Sets all of the area's space aside; its length goes on saying what has been written. Where
    /// nothing can be set aside that is no failure: in memory it would take that, and not every
    /// file system knows how.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), DeviceError> {
        let Some(there) = self.file.metadata().ok().filter(|it| it.is_file()) else {
            return Ok(());
        };
        if self.is_in_memory() {
            return Ok(());
        }
        let reserved = loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, bytes) {
                Err(Errno::INTR) => {}
                reserved => break reserved,
            }
        };
        match reserved {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => {
                // It may have taken all that there was, which others need. No request in flight
                // lengthens the file.
                let _ = self.file.set_len(there.len());
                match error {
                    // No file is ever so large.
                    Errno::FBIG => Err(DeviceError::NoSpace),
                    error => Err(DeviceError::from_errno(error.raw_os_error())),
                }
            }
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }

    pub(crate) fn is_in_memory(&self) -> bool {
        self.facts.in_memory
    }

    pub(crate) fn describe(&self, how: &str) -> String {
        let direct = if self.direct { "direct" } else { "cached" };
        format!("{} ({how}, {direct}; {})", self.path.display(), self.facts)
    }
}

/// Locks the file. A process that has just ended may leave the kernel at work for a short time on
/// its requests in flight, and the file is locked until that is done.
fn lock(file: &File, operation: FlockOperation) -> io::Result<()> {
    let until = Instant::now() + LOCK_PATIENCE;
    loop {
        match rustix::fs::flock(file, operation) {
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            locked => return Ok(locked?),
        }
    }
}

/// What a failed call says.
pub(crate) fn device_error(error: &io::Error) -> DeviceError {
    DeviceError::from_errno(error.raw_os_error().unwrap_or(libc::EIO))
}

type Jobs = Arc<Mutex<Receiver<Request>>>;

/// See the module's text.
pub struct ThreadedFlash {
    area: Arc<AreaFile>,
    bytes: u64,
    jobs: Option<Sender<Request>>,
    threads: Vec<JoinHandle<()>>,
    done: Receiver<Completion>,
    kept: Vec<Completion>,
    outstanding: usize,
    event: Arc<OwnedFd>,
}

impl ThreadedFlash {
    /// Opens (or makes) the area's file, which may grow to `bytes`.
    ///
    /// # Errors
    /// When it cannot be opened, or another process has it, or no thread can be started.
    pub fn open(path: &Path, bytes: u64) -> io::Result<ThreadedFlash> {
        ThreadedFlash::over(AreaFile::open(path, true)?, bytes)
    }

    /// Opens an area's file for inspection, whatever its size: writes fail.
    ///
    /// # Errors
    /// As [`ThreadedFlash::open`], and when there is none.
    pub fn open_read_only(path: &Path) -> io::Result<ThreadedFlash> {
        let mut options = File::options();
        options.read(true);
        let lock = FlockOperation::NonBlockingLockShared;
        let area = AreaFile::open_with(path, false, &options, lock)?;
        ThreadedFlash::over(area, u64::MAX >> 1)
    }

    fn over(area: AreaFile, bytes: u64) -> io::Result<ThreadedFlash> {
        let area = Arc::new(area);
        let event = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (jobs, queue) = channel();
        let (done_in, done) = channel();
        let queue: Jobs = Arc::new(Mutex::new(queue));
        let mut threads = Vec::with_capacity(THREADS);
        for number in 0..THREADS {
            let (queue, done) = (Arc::clone(&queue), done_in.clone());
            let (area, event) = (Arc::clone(&area), Arc::clone(&event));
            let thread = std::thread::Builder::new().name(format!("flash-{number}"));
            threads.push(thread.spawn(move || work(&queue, &done, &area, &event))?);
        }
        Ok(ThreadedFlash {
            area,
            bytes,
            jobs: Some(jobs),
            threads,
            done,
            kept: Vec::new(),
            outstanding: 0,
            event,
        })
    }
}

fn work(queue: &Jobs, done: &Sender<Completion>, area: &AreaFile, event: &OwnedFd) {
    loop {
        // The lock is held only while waiting, so a poisoned one still guards a sound queue.
        let request = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(mut request) = request else { return };
        let (offset, len) = (request.offset, request.len);
        let result = match request.action {
            Action::Read => area.file.read_exact_at(&mut request.buffer[..len], offset),
            Action::Write => area.file.write_all_at(&request.buffer[..len], offset),
        };
        let result = result.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => DeviceError::Short {
                asked: len,
                done: 0,
            },
            _ => device_error(&error),
        });
        let completion = Completion {
            token: request.token,
            action: request.action,
            buffer: request.buffer,
            result,
        };
        if done.send(completion).is_err() {
            return;
        }
        // Full is as good as written: the reader is woken either way.
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

impl FlashDevice for ThreadedFlash {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn grown_bytes(&self) -> u64 {
        self.area.len()
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.area.reserve(bytes)
    }

    fn submit(&mut self, _now_us: u64, request: Request) -> Result<(), Request> {
        let Some(jobs) = self
            .jobs
            .as_ref()
            .filter(|_| self.outstanding < OUTSTANDING)
        else {
            return Err(request);
        };
        jobs.send(request).map_err(|unsent| unsent.0)?;
        self.outstanding += 1;
        Ok(())
    }

    fn poll(&mut self, _now_us: u64, done: &mut Vec<Completion>) {
        let before = done.len();
        // Before looking: what comes in between makes it readable again.
        if self.outstanding > 0 {
            let _ = rustix::io::read(&*self.event, &mut [0; 8]);
        }
        done.append(&mut self.kept);
        done.extend(self.done.try_iter());
        self.outstanding -= done.len() - before;
    }

    fn wait(&mut self) {
        if self.outstanding > self.kept.len() {
            match self.done.recv_timeout(Duration::from_millis(100)) {
                Ok(completion) => self.kept.push(completion),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    }

    fn outstanding(&self) -> usize {
        self.outstanding
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.event.as_raw_fd())
    }

    fn is_in_memory(&self) -> bool {
        self.area.is_in_memory()
    }

    fn describe(&self) -> String {
        self.area.describe("threads")
    }
}

impl Drop for ThreadedFlash {
    fn drop(&mut self) {
        self.jobs = None;
        let mut waiting = self.outstanding - self.kept.len();
        while waiting > 0 && self.done.recv_timeout(Duration::from_secs(1)).is_ok() {
            waiting -= 1;
        }
        // Threads that a device holds up are left to themselves: it must not hang its owner.
        for thread in self.threads.drain(..).filter(|_| waiting == 0) {
            // One that panicked has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

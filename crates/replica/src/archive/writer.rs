//! The archive's thread: it alone touches the directory. A file that cannot be written is given up
//! with everything behind it that was handed out, and the loop has to begin again behind the last
//! sealed one.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cyclone_pmem::private_file;
use cyclone_wire::archive::{
    END_BYTES, ENTRY_BYTES, End, Head, Next, clock_after, next, seal_entry,
};
use cyclone_wire::ring::crc32c_of;

use super::opening::Opening;
use super::{ArchiveConfig, RETRY_US, files};
use crate::config::Config;

/// How long a start waits for a disk that does not answer.
const OPEN_WITHIN: Duration = Duration::from_secs(5);
/// How long the end waits for it.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// A failure that lasts is logged again.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// Consecutive entries of a log, without checksums.
pub(super) struct Part {
    pub(super) log: u16,
    pub(super) epoch: u64,
    pub(super) first: u64,
    pub(super) prev_term: u64,
    pub(super) gap_from: u64,
    pub(super) bytes: Vec<u8>,
    /// Of each entry in turn: what its payload has to have.
    pub(super) payload_crcs: Vec<u32>,
}

enum Job {
    Begin,
    Write(Part),
    Seal(u16),
    Close,
}

/// What the thread reports about a log.
#[derive(Clone, Default)]
pub(super) struct State {
    /// There were files when the directory was opened, readable or not.
    pub(super) began: bool,
    pub(super) sealed: u64,
    /// Term of the last sealed entry.
    pub(super) term: u64,
    /// The latest stamp up to there.
    pub(super) clock_ms: u64,
    pub(super) failed_epoch: u64,
    /// The entry whose payload was not what it had been in the log; 0: none yet.
    pub(super) damaged: u64,
    pub(super) failing: Option<String>,
    pub(super) files: u64,
    pub(super) bytes: u64,
}

struct Shared {
    states: Mutex<Vec<State>>,
    queued: AtomicU64,
    /// By log: the thread has been asked for a sealed file and has not begun with that. Its disk
    /// may hang for hours.
    sealing: Vec<AtomicBool>,
    /// The directory has been tried once.
    open_attempted: AtomicBool,
    /// The states say where its files end.
    open: AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<State>> {
        // States are replaced whole; a poisoned lock still guards sound ones.
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The event loop's end of the archive.
pub struct ArchiveWriter {
    directory: PathBuf,
    jobs: Sender<Job>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl ArchiveWriter {
    /// Starts the thread of a node's archive, if its configuration has one. It opens the directory,
    /// and goes on trying until it can.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn open(config: &Config) -> io::Result<Option<ArchiveWriter>> {
        let (cluster, replica) = (config.cluster_id, config.id);
        let open = |archive| Self::open_at(archive, cluster, replica, config.logs);
        config.archive.as_ref().map(open).transpose()
    }

    pub(super) fn open_at(
        archive: &ArchiveConfig,
        cluster: u128,
        replica: u64,
        logs: u16,
    ) -> io::Result<ArchiveWriter> {
        let directory = archive.directory.clone();
        let unknown = State {
            failing: Some("it is not open yet".into()),
            ..State::default()
        };
        let shared = Arc::new(Shared {
            states: Mutex::new(vec![unknown; usize::from(logs)]),
            queued: AtomicU64::new(0),
            sealing: (0..logs).map(|_| AtomicBool::new(false)).collect(),
            open_attempted: AtomicBool::new(false),
            open: AtomicBool::new(false),
        });
        let (jobs, queue) = channel();
        let mut thread = Thread {
            directory: directory.clone(),
            cluster,
            replica,
            seal_after: archive.seal_after,
            segment_bytes: archive.segment_bytes,
            shared: Arc::clone(&shared),
            drafts: (0..logs).map(|_| None).collect(),
            warned_at: None,
        };
        let thread = std::thread::Builder::new()
            .name("archive".into())
            .spawn(move || thread.run(&queue))?;
        Ok(ArchiveWriter {
            directory,
            jobs,
            shared,
            thread: Some(thread),
        })
    }

    /// Waits until the directory has been tried once, within reason. Returns whether it is open.
    pub(super) fn wait_open(&self) -> bool {
        let until = Instant::now() + OPEN_WITHIN;
        while !self.shared.open_attempted.load(Ordering::Acquire) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.is_open()
    }

    /// Whether it is known where the files end. Nothing is to be handed over before.
    pub(super) fn is_open(&self) -> bool {
        self.shared.open.load(Ordering::Acquire)
    }

    /// The files are this node's: from here on the directory may be changed.
    pub(super) fn begin(&self) {
        self.send(Job::Begin);
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Index and term of a log's last sealed entry; the term is 0 if it is not known.
    pub(super) fn end_of(&self, log: u16) -> (u64, u64) {
        let state = self.state(log);
        (state.sealed, state.term)
    }

    /// Whether a log had files when the directory was opened, readable or not.
    pub(super) fn had_files(&self, log: u16) -> bool {
        self.state(log).began
    }

    pub(super) fn state(&self, log: u16) -> State {
        let states = self.shared.lock();
        states.get(usize::from(log)).cloned().unwrap_or_default()
    }

    pub(super) fn failed_epoch(&self, log: u16) -> u64 {
        let states = self.shared.lock();
        let state = states.get(usize::from(log));
        state.map_or(0, |state| state.failed_epoch)
    }

    pub(super) fn queued(&self) -> u64 {
        self.shared.queued.load(Ordering::Acquire)
    }

    /// Hands over a part. The caller keeps to a bound on what is queued.
    pub(super) fn write(&self, part: Part) {
        let bytes = part.bytes.len() as u64;
        self.shared.queued.fetch_add(bytes, Ordering::AcqRel);
        self.send(Job::Write(part));
    }

    /// Asks for a sealed file, unless that waits to be done already; returns whether it did not.
    pub(super) fn seal(&self, log: u16) -> bool {
        let asked = &self.shared.sealing[usize::from(log)];
        let new = !asked.swap(true, Ordering::AcqRel);
        if new {
            self.send(Job::Seal(log));
        }
        new
    }

    fn send(&self, job: Job) {
        // The thread ends only when told to.
        let _ = self.jobs.send(job);
    }

    /// Seals what there is and ends the thread.
    pub(super) fn close(&mut self) {
        self.send(Job::Close);
        let Some(thread) = self.thread.take() else {
            return;
        };
        let until = Instant::now() + CLOSE_WITHIN;
        while !thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        match thread.is_finished() {
            true => drop(thread.join()),
            false => tracing::error!(
                "the archive's disk does not answer: what is not sealed is read from the log again"
            ),
        }
    }
}

impl Drop for ArchiveWriter {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.close();
        }
    }
}

/// A file that is being written.
struct Draft {
    file: BufWriter<File>,
    head: Head,
    seed: u32,
    epoch: u64,
    end: End,
    begun: Instant,
}

struct Thread {
    directory: PathBuf,
    cluster: u128,
    replica: u64,
    seal_after: Duration,
    segment_bytes: u64,
    shared: Arc<Shared>,
    drafts: Vec<Option<Draft>>,
    warned_at: Option<Instant>,
}

impl Thread {
    fn run(&mut self, queue: &Receiver<Job>) {
        if !self.open(queue) {
            return;
        }
        loop {
            match queue.recv_timeout(self.patience()) {
                Ok(Job::Begin) => {
                    (0..self.drafts.len() as u16).for_each(|log| self.drop_draft(log))
                }
                Ok(Job::Write(part)) => self.take(part),
                Ok(Job::Seal(log)) => {
                    // Before it is done: what is asked for from here on may want more than that.
                    self.shared.sealing[usize::from(log)].store(false, Ordering::Release);
                    self.seal(log);
                }
                Ok(Job::Close) | Err(RecvTimeoutError::Disconnected) => {
                    return (0..self.drafts.len() as u16).for_each(|log| self.seal(log));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            for log in 0..self.drafts.len() {
                let draft = self.drafts[log].as_ref();
                if draft.is_some_and(|draft| draft.begun.elapsed() >= self.seal_after) {
                    self.seal(log as u16);
                }
            }
        }
    }

    /// Tries until the directory is open; `false` if it is to end before.
    fn open(&mut self, queue: &Receiver<Job>) -> bool {
        let logs = self.drafts.len() as u16;
        let mut opening = Opening::new(&self.directory, self.cluster, self.replica, logs);
        loop {
            match opening.look() {
                Ok(states) => {
                    *self.shared.lock() = states;
                    self.shared.open.store(true, Ordering::Release);
                    self.shared.open_attempted.store(true, Ordering::Release);
                    if self.warned_at.take().is_some() {
                        let directory = self.directory.display();
                        tracing::warn!(%directory, "the archive is open");
                    }
                    return true;
                }
                Err(error) => {
                    self.tell(&error);
                    for state in &mut *self.shared.lock() {
                        state.failing = Some(error.to_string());
                    }
                }
            }
            self.shared.open_attempted.store(true, Ordering::Release);
            match queue.recv_timeout(Duration::from_micros(RETRY_US)) {
                Ok(Job::Close) | Err(RecvTimeoutError::Disconnected) => return false,
                // Nothing else is handed over before.
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn patience(&self) -> Duration {
        let drafts = self.drafts.iter().flatten();
        drafts
            .map(|draft| self.seal_after.saturating_sub(draft.begun.elapsed()))
            .min()
            .unwrap_or(Duration::from_secs(3600))
    }

    fn take(&mut self, mut part: Part) {
        let (log, epoch, bytes) = (part.log, part.epoch, part.bytes.len() as u64);
        let void = self.shared.lock()[usize::from(log)].failed_epoch >= epoch;
        if !void && let Err(error) = self.append(&mut part) {
            self.fail(log, epoch, &error);
        }
        self.shared.queued.fetch_sub(bytes, Ordering::AcqRel);
    }

    fn append(&mut self, part: &mut Part) -> io::Result<()> {
        let place = usize::from(part.log);
        // Behind a gap a new file begins, which names it.
        if let Some(draft) = &self.drafts[place]
            && draft.end.last + 1 != part.first
        {
            self.finish(part.log)?;
        }
        if self.drafts[place].is_none() {
            self.drafts[place] = Some(self.begin(part)?);
        }
        let Some(draft) = &mut self.drafts[place] else {
            return Ok(());
        };
        let mut rest = &mut part.bytes[..];
        let mut payload_crcs = part.payload_crcs.iter();
        while let Some(fixed) = rest.first_chunk::<ENTRY_BYTES>() {
            let Ok(Next::Entry(entry)) = next(fixed) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let length = ENTRY_BYTES + entry.length as usize;
            let (whole, behind) = std::mem::take(&mut rest).split_at_mut(length);
            if payload_crcs.next() != Some(&crc32c_of(&whole[ENTRY_BYTES..])) {
                // A checksum of the file's would make it look right permanently. What is before it
                // is sound.
                if draft.end.entries > 0 {
                    self.finish(part.log)?;
                }
                self.shared.lock()[place].damaged = entry.index;
                return Err(io::Error::other(format!(
                    "entry {} of log {} has changed in memory since it was written there",
                    entry.index, part.log
                )));
            }
            seal_entry(draft.seed, whole);
            draft.end.clock_ms = clock_after(draft.end.clock_ms, &whole[ENTRY_BYTES..]);
            draft.file.write_all(whole)?;
            draft.end.entries += 1;
            draft.end.bytes += length as u64;
            (draft.end.last, draft.end.last_term) = (entry.index, entry.term);
            rest = behind;
        }
        if draft.end.bytes >= self.segment_bytes {
            self.finish(part.log)?;
        }
        Ok(())
    }

    fn draft_path(&self, log: u16) -> PathBuf {
        self.directory
            .join(files::draft(self.cluster, log, self.replica))
    }

    fn begin(&self, part: &Part) -> io::Result<Draft> {
        let (clock_ms, logs) = {
            let states = self.shared.lock();
            (states[usize::from(part.log)].clock_ms, states.len() as u16)
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let head = Head {
            log: part.log,
            logs,
            cluster: self.cluster,
            replica: self.replica,
            first: part.first,
            prev_term: part.prev_term,
            gap_from: part.gap_from.min(part.first - 1),
            clock_ms,
            begun_ms: now.unwrap_or_default().as_millis() as u64,
        };
        let bytes = head.encode();
        // The last four of the head are its checksum.
        let seed = bytes.last_chunk().map_or(0, |sum| u32::from_le_bytes(*sum));
        let mut new = private_file();
        new.write(true).create(true).truncate(true);
        let file = new.open(self.draft_path(part.log))?;
        let mut file = BufWriter::with_capacity(256 << 10, file);
        file.write_all(&bytes)?;
        Ok(Draft {
            file,
            head,
            seed,
            epoch: part.epoch,
            end: End {
                last: part.first - 1,
                last_term: part.prev_term,
                entries: 0,
                bytes: bytes.len() as u64,
                clock_ms,
            },
            begun: Instant::now(),
        })
    }

    fn seal(&mut self, log: u16) {
        let epoch = self.drafts[usize::from(log)]
            .as_ref()
            .map(|draft| draft.epoch);
        if let Some(epoch) = epoch
            && let Err(error) = self.finish(log)
        {
            self.fail(log, epoch, &error);
        }
    }

    /// Ends a draft and gives it its name, durably.
    fn finish(&mut self, log: u16) -> io::Result<()> {
        let Some(mut draft) = self.drafts[usize::from(log)].take() else {
            return Ok(());
        };
        draft.file.write_all(&draft.end.encode(draft.seed))?;
        draft.file.flush()?;
        draft.file.get_ref().sync_all()?;
        let range = (draft.head.first, draft.end.last);
        let name = files::sealed(self.cluster, log, range, self.replica);
        fs::rename(self.draft_path(log), self.directory.join(name))?;
        files::sync(&self.directory)?;
        let mut states = self.shared.lock();
        let state = &mut states[usize::from(log)];
        (state.sealed, state.term) = (draft.end.last, draft.end.last_term);
        state.clock_ms = draft.end.clock_ms;
        state.files += 1;
        state.bytes += draft.end.bytes + END_BYTES as u64;
        if state.failing.take().is_some() {
            self.warned_at = None;
            tracing::warn!(log, sealed = state.sealed, "the archive goes on");
        }
        Ok(())
    }

    fn drop_draft(&mut self, log: u16) {
        self.drafts[usize::from(log)] = None;
        // One that stays is written over.
        let _ = fs::remove_file(self.draft_path(log));
    }

    fn fail(&mut self, log: u16, epoch: u64, error: &io::Error) {
        self.drop_draft(log);
        self.tell(error);
        let mut states = self.shared.lock();
        let state = &mut states[usize::from(log)];
        state.failed_epoch = state.failed_epoch.max(epoch);
        state.failing = Some(error.to_string());
    }

    fn tell(&mut self, error: &io::Error) {
        if self
            .warned_at
            .is_none_or(|warned_at| warned_at.elapsed() > TELL_AGAIN)
        {
            self.warned_at = Some(Instant::now());
            let directory = self.directory.display();
            tracing::error!(%directory, %error, "the archive cannot be written: trimming waits for it while there is room");
        }
    }
}

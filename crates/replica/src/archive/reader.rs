//! Reading archives back: the files of one or several nodes, put together to one log's entries.
//! Whatever is damaged or missing in one node's is taken from another's; where none has it, the
//! error names the file and the range.

use std::fs::File;
use std::io::{self, BufReader, Read as _};
use std::path::{Path, PathBuf};

use cyclone_wire::archive::{
    END_BYTES, ENTRY_BYTES, End, HEAD_BYTES, Head, Next, clock_after, clock_set, is_whole, next,
    stamp_ms,
};

use super::files::{self, SealedName};

/// Why an archive cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// A directory cannot be read.
    #[error("archive {path}: {source}")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is damaged, and no other has what it should have.
    #[error(
        "archive file {path}, which should hold entries {first} to {last} of log {log}, is damaged at entry {at}: {what}"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The log.
        log: u16,
        /// First entry by its name.
        first: u64,
        /// Last entry by its name.
        last: u64,
        /// The entry that was wanted.
        at: u64,
        /// What is wrong.
        what: String,
    },
    /// No replica has archived these entries.
    #[error("entries {from} to {to} of log {log} are in no archive file; the next one is {next}{}", if *.noted { ", which says that they had left the log before they were archived" } else { "" })]
    Gap {
        /// The log.
        log: u16,
        /// First missing entry.
        from: u64,
        /// Last missing entry.
        to: u64,
        /// The file behind them.
        next: PathBuf,
        /// Whether that file knows of them.
        noted: bool,
    },
    /// The entries do not go on from what they should.
    #[error(
        "archive file {path}: entry {index} of log {log} has term {found} there, not {wanted}: it is of another history"
    )]
    OtherHistory {
        /// The file.
        path: PathBuf,
        /// The log.
        log: u16,
        /// The entry.
        index: u64,
        /// Its term in the file.
        found: u64,
        /// Its term by what is known.
        wanted: u64,
    },
}

/// All archive files of one cluster in some directories.
#[derive(Debug)]
pub struct ArchiveDir {
    cluster: u128,
    files: Vec<SealedName>,
}

impl ArchiveDir {
    /// Looks what there is; nothing is read yet. Files of other clusters may lie there as well.
    ///
    /// # Errors
    /// A directory that cannot be read.
    pub fn open(directories: &[PathBuf], cluster: u128) -> Result<ArchiveDir, ArchiveError> {
        let mut found = Vec::new();
        for directory in directories {
            let named = files::list(directory).map_err(|source| ArchiveError::Directory {
                path: directory.clone(),
                source,
            })?;
            found.extend(named.into_iter().filter(|named| named.cluster == cluster));
        }
        found.sort();
        Ok(ArchiveDir {
            cluster,
            files: found,
        })
    }

    /// How many files there are.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The entries of a log behind `after`, whose term is known.
    pub fn read(&self, log: u16, after: u64, term: u64) -> LogReader<'_> {
        LogReader {
            archive_dir: self,
            log,
            next: after + 1,
            term,
            clock_ms: 0,
            before_ms: None,
            open: None,
            bad: Vec::new(),
        }
    }

    /// Shows index and stamp of the entries of a log behind `after`, in order; not of those without
    /// a stamp. Whatever is damaged or missing is passed over. Answers how many entries were.
    pub(super) fn stamps(&self, log: u16, after: u64, show: &mut dyn FnMut(u64, u64)) -> u64 {
        self.scan_entries(log, after, &mut |entry| {
            if let Some(stamp_ms) = stamp_ms(&entry.payload) {
                show(entry.index, stamp_ms);
            }
        })
    }

    /// The last entry of a log behind `after` that sets the clock to a time up to this one; `after`
    /// if none does.
    pub(super) fn last_set(&self, log: u16, after: u64, until_ms: u64) -> u64 {
        let mut last = after;
        self.scan_entries(log, after, &mut |entry| {
            if clock_set(&entry.payload).is_some_and(|time_ms| time_ms <= until_ms) {
                last = entry.index;
            }
        });
        last
    }

    fn scan_entries(&self, log: u16, after: u64, show: &mut dyn FnMut(&Archived)) -> u64 {
        let (mut seen, mut end, mut missing) = (after, after, 0);
        for (place, named) in self.of(log) {
            end = end.max(named.last);
            if named.last <= seen {
                continue;
            }
            let Ok((mut file, _)) = open(place, named, self.cluster) else {
                continue;
            };
            while let Ok(Some(entry)) = file.entry(named.last) {
                if entry.index > seen {
                    missing += entry.index - seen - 1;
                    seen = entry.index;
                    show(&entry);
                }
            }
        }
        missing + (end - seen)
    }

    fn of(&self, log: u16) -> impl Iterator<Item = (usize, &SealedName)> {
        let all = self.files.iter().enumerate();
        all.filter(move |(_, named)| named.log == log)
    }
}

/// An entry read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Archived {
    /// Its index.
    pub index: u64,
    /// Its term.
    pub term: u64,
    /// What the payload is.
    pub kind: u8,
    /// The payload.
    pub payload: Vec<u8>,
    /// The latest stamp among the log's entries up to this one, in milliseconds since 1970; 0: none
    /// is known.
    pub clock_ms: u64,
}

struct Open {
    place: usize,
    file: BufReader<File>,
    seed: u32,
    next: u64,
    entries: u64,
    bytes: u64,
    length: u64,
    /// Term of the entry before the next one.
    prev_term: u64,
}

/// One log's entries, in order.
pub struct LogReader<'a> {
    archive_dir: &'a ArchiveDir,
    log: u16,
    next: u64,
    term: u64,
    clock_ms: u64,
    /// The latest stamp before the first entry that was wanted.
    before_ms: Option<u64>,
    open: Option<Open>,
    /// Files that do not read back, and what is wrong with them.
    bad: Vec<(usize, String)>,
}

impl LogReader<'_> {
    /// The latest stamp seen so far.
    pub fn clock_ms(&self) -> u64 {
        self.clock_ms
    }

    /// The latest stamp before the first entry; 0 if none is known, or nothing has been read.
    pub fn before_ms(&self) -> u64 {
        self.before_ms.unwrap_or(0)
    }

    /// The latest stamp up to the entry before the next one, by the files that hold that; 0 if
    /// there is none. For a reader that has read nothing.
    pub fn stamp_before_end(&self) -> u64 {
        let last = self.next - 1;
        let files = self.archive_dir.of(self.log);
        let holding = files.filter(|(_, named)| (named.first..=named.last).contains(&last));
        let latest = |(place, named): (usize, &SealedName)| {
            let (mut file, head) = open(place, named, self.archive_dir.cluster).ok()?;
            let mut latest = head.clock_ms;
            while let Ok(Some(entry)) = file.entry(named.last) {
                if entry.index > last {
                    break;
                }
                latest = clock_after(latest, &entry.payload);
            }
            Some(latest)
        };
        holding.filter_map(latest).max().unwrap_or(0)
    }

    /// The next entry; `None` where the archive ends.
    ///
    /// # Errors
    /// [`ArchiveError`]; never anything but the very next entry.
    pub fn next_entry(&mut self) -> Result<Option<Archived>, ArchiveError> {
        loop {
            if self.open.is_none() && !self.choose()? {
                return Ok(None);
            }
            let Some(open) = &mut self.open else { continue };
            let place = open.place;
            match open.entry(self.archive_dir.files[place].last) {
                Ok(Some(entry)) => {
                    let before = self.clock_ms;
                    self.clock_ms = clock_after(before, &entry.payload);
                    if let Some(entry) = self.take(place, entry)? {
                        self.before_ms.get_or_insert(before);
                        return Ok(Some(entry));
                    }
                }
                Ok(None) => self.open = None,
                Err(what) => {
                    self.bad.push((place, what));
                    self.open = None;
                }
            }
        }
    }

    /// Checks an entry against what is known; `None` if it was there before.
    fn take(&mut self, place: usize, entry: Archived) -> Result<Option<Archived>, ArchiveError> {
        let (wanted, rises) = match entry.index.cmp(&(self.next - 1)) {
            std::cmp::Ordering::Less => return Ok(None),
            std::cmp::Ordering::Equal => (self.term, entry.term == self.term),
            std::cmp::Ordering::Greater => (self.term, entry.term >= self.term),
        };
        if !rises {
            return Err(ArchiveError::OtherHistory {
                path: self.archive_dir.files[place].path.clone(),
                log: self.log,
                index: entry.index,
                found: entry.term,
                wanted,
            });
        }
        if entry.index < self.next {
            return Ok(None);
        }
        (self.next, self.term) = (entry.index + 1, entry.term);
        let clock_ms = self.clock_ms;
        Ok(Some(Archived { clock_ms, ..entry }))
    }

    /// Opens the file that has the next entry; `false` where the archive ends.
    fn choose(&mut self) -> Result<bool, ArchiveError> {
        let next = self.next;
        let mut there: Vec<(usize, &SealedName)> = self
            .archive_dir
            .of(self.log)
            .filter(|(_, named)| (named.first..=named.last).contains(&next))
            .collect();
        // The one that goes furthest; of two alike the earlier named.
        there.sort_by_key(|(_, named)| std::cmp::Reverse(named.last));
        for &(place, named) in &there {
            if self.bad.iter().any(|(bad, _)| *bad == place) {
                continue;
            }
            match open(place, named, self.archive_dir.cluster) {
                Ok((file, head)) => {
                    // What is checked of the entries before is their last one's term.
                    if head.first == next && head.prev_term != 0 && head.prev_term != self.term {
                        return Err(ArchiveError::OtherHistory {
                            path: named.path.clone(),
                            log: self.log,
                            index: next - 1,
                            found: head.prev_term,
                            wanted: self.term,
                        });
                    }
                    self.clock_ms = self.clock_ms.max(head.clock_ms);
                    self.open = Some(file);
                    return Ok(true);
                }
                Err(what) => self.bad.push((place, what)),
            }
        }
        if let Some((_, named)) = there.first() {
            let what = self
                .bad
                .iter()
                .find(|(bad, _)| self.archive_dir.files[*bad] == **named);
            return Err(ArchiveError::Damaged {
                path: named.path.clone(),
                log: self.log,
                first: named.first,
                last: named.last,
                at: next,
                what: what.map_or(String::new(), |(_, what)| what.clone()),
            });
        }
        let behind = self
            .archive_dir
            .of(self.log)
            .filter(|(_, named)| named.first > next);
        let Some((place, named)) = behind.min_by_key(|(_, named)| named.first) else {
            return Ok(false);
        };
        let noted = open(place, named, self.archive_dir.cluster)
            .is_ok_and(|(_, head)| head.gap_from != 0 && head.gap_from <= next);
        Err(ArchiveError::Gap {
            log: self.log,
            from: next,
            to: named.first - 1,
            next: named.path.clone(),
            noted,
        })
    }
}

fn describe_io_error(path: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it is cut off".into(),
        _ => format!("{}: {error}", path.display()),
    }
}

fn open(place: usize, named: &SealedName, cluster: u128) -> Result<(Open, Head), String> {
    let fail = |error: io::Error| describe_io_error(&named.path, &error);
    let file = File::open(&named.path).map_err(fail)?;
    let length = file.metadata().map_err(fail)?.len();
    let mut file = BufReader::with_capacity(1 << 20, file);
    let mut bytes = [0; HEAD_BYTES];
    file.read_exact(&mut bytes).map_err(fail)?;
    let (head, seed) = Head::decode(&bytes).map_err(|error| error.to_string())?;
    let says = (head.cluster, head.log, head.first, head.replica);
    if says != (cluster, named.log, named.first, named.replica) {
        return Err("its head says something else than its name".into());
    }
    let open = Open {
        place,
        file,
        seed,
        next: head.first,
        entries: 0,
        bytes: HEAD_BYTES as u64,
        length,
        prev_term: head.prev_term,
    };
    Ok((open, head))
}

impl Open {
    /// The file's next entry; `None` at a sound end.
    fn entry(&mut self, last: u64) -> Result<Option<Archived>, String> {
        let fail = |error: io::Error| describe_io_error(Path::new("reading"), &error);
        let mut fixed = [0; ENTRY_BYTES];
        self.file.read_exact(&mut fixed).map_err(fail)?;
        let entry = match next(&fixed).map_err(|error| error.to_string())? {
            Next::End => return self.end(&fixed, last).map(|()| None),
            Next::Entry(entry) => entry,
        };
        let whole = ENTRY_BYTES as u64 + u64::from(entry.length);
        if self.bytes + whole > self.length {
            return Err("it is cut off".into());
        }
        let mut bytes = vec![0; whole as usize];
        bytes[..ENTRY_BYTES].copy_from_slice(&fixed);
        self.file
            .read_exact(&mut bytes[ENTRY_BYTES..])
            .map_err(fail)?;
        if !is_whole(self.seed, &bytes) {
            return Err("a checksum is wrong".into());
        }
        if entry.index != self.next || entry.index > last || entry.term < self.prev_term {
            return Err(format!("entry {} stands there", entry.index));
        }
        self.next += 1;
        self.entries += 1;
        self.bytes += whole;
        self.prev_term = entry.term;
        bytes.drain(..ENTRY_BYTES);
        Ok(Some(Archived {
            index: entry.index,
            term: entry.term,
            kind: entry.kind,
            payload: bytes,
            clock_ms: 0,
        }))
    }

    fn end(&mut self, fixed: &[u8; ENTRY_BYTES], last: u64) -> Result<(), String> {
        let mut bytes = [0; END_BYTES];
        bytes[..ENTRY_BYTES].copy_from_slice(fixed);
        self.file
            .read_exact(&mut bytes[ENTRY_BYTES..])
            .map_err(|error| describe_io_error(Path::new("reading"), &error))?;
        let end = End::decode(self.seed, &bytes).map_err(|error| error.to_string())?;
        let fits = end.last == last
            && end.last + 1 == self.next
            && end.entries == self.entries
            && end.bytes == self.bytes
            && self.length == self.bytes + END_BYTES as u64;
        fits.then_some(())
            .ok_or_else(|| "its end says something else than its entries".into())
    }
}

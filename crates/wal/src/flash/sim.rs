//! A simulated device: deterministic, with everything that flash does to those who trust it. The
//! disk outlives its devices, as a real one outlives processes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cyclone_wire::flash::{PAGE_BYTES, PageHeader};

use super::device::{Action, Completion, DeviceError, FlashDevice, Request};

/// Bytes that are written or not, where a page may tear.
const SECTOR: usize = 512;
/// Pages that count as written last: more than the writes that may be in flight.
const LATEST: usize = 128;

const BLANK: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// A page's bytes; none for one of zeros, because most are: space is written in advance.
type Page = Box<[u8]>;

/// What goes wrong. Each counts down the writes (or reads) until it strikes; `None`: never.
#[derive(Clone, Debug, Default)]
pub struct FlashFaults {
    /// Writes fail with this error while it stands.
    pub write_error: Option<DeviceError>,
    /// Reads of these pages (by number from the area's beginning) fail.
    pub read_error: Vec<u64>,
    /// The write with this number says that it is done, and is not.
    pub lose_write: Option<u64>,
    /// The write with this number goes to another place: (write, page number).
    pub misdirect_write: Option<(u64, u64)>,
    /// Nothing comes back before this time.
    pub hang_until_us: u64,
    /// A crash may leave a page half written.
    pub torn_pages: bool,
}

struct Disk {
    pages: BTreeMap<u64, Page>,
    /// The pages written last.
    latest: VecDeque<u64>,
    bytes: u64,
    random: u64,
    faults: FlashFaults,
    writes: u64,
    /// Longest time that a request takes.
    latency_us: u64,
    /// Requests in flight: when each completes, the device that handed it over, and what it is.
    waiting: VecDeque<(u64, u64, Request)>,
    now_us: u64,
    outstanding_limit: usize,
    /// The device in use; requests of an earlier one continue, but their completions are dropped.
    device: u64,
}

impl Disk {
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (place, page) in bytes.chunks(PAGE_BYTES).enumerate() {
            let number = offset / PAGE_BYTES as u64 + place as u64;
            let stored = match page == BLANK {
                true => Page::default(),
                false => page.into(),
            };
            self.pages.insert(number, stored);
            // What is written anew can be read again.
            self.faults.read_error.retain(|bad| *bad != number);
            self.latest.push_back(number);
            if self.latest.len() > LATEST {
                self.latest.pop_front();
            }
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        for (place, page) in into.chunks_mut(PAGE_BYTES).enumerate() {
            let number = offset / PAGE_BYTES as u64 + place as u64;
            match self.pages.get(&number) {
                Some(stored) if !stored.is_empty() => page.copy_from_slice(stored),
                _ => page.fill(0),
            }
        }
    }

    fn finish(&mut self, request: &mut Request) -> Result<(), DeviceError> {
        let (offset, len) = (request.offset, request.len);
        let first = offset / PAGE_BYTES as u64;
        match request.action {
            Action::Read => {
                let touched = first..first + (len / PAGE_BYTES) as u64;
                if self
                    .faults
                    .read_error
                    .iter()
                    .any(|bad| touched.contains(bad))
                {
                    return Err(DeviceError::Io(libc::EIO));
                }
                self.read(offset, &mut request.buffer[..len]);
            }
            Action::Write => {
                if let Some(error) = self.faults.write_error {
                    return Err(error);
                }
                let number = self.writes;
                self.writes += 1;
                let lost = self.faults.lose_write == Some(number);
                let astray = self
                    .faults
                    .misdirect_write
                    .filter(|(write, _)| *write == number);
                match astray {
                    Some((_, page)) => self.write(page * PAGE_BYTES as u64, &request.buffer[..len]),
                    None if lost => {}
                    None => self.write(offset, &request.buffer[..len]),
                }
            }
        }
        Ok(())
    }
}

/// The disk itself: for faults, crashes, and inspection.
#[derive(Clone)]
pub struct SimDisk {
    disk: Arc<Mutex<Disk>>,
}

impl SimDisk {
    /// A blank disk. `seed` decides about times and crashes.
    pub fn new(bytes: u64, seed: u64) -> SimDisk {
        SimDisk {
            disk: Arc::new(Mutex::new(Disk {
                pages: BTreeMap::new(),
                latest: VecDeque::new(),
                bytes,
                random: seed,
                faults: FlashFaults::default(),
                writes: 0,
                latency_us: 100,
                waiting: VecDeque::new(),
                now_us: 0,
                outstanding_limit: 64,
                device: 0,
            })),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device on it. Requests that an earlier one left in flight continue.
    pub fn device(&self) -> SimFlash {
        let mut disk = self.lock();
        disk.device += 1;
        SimFlash {
            disk: self.clone(),
            number: disk.device,
            lost_power: None,
            late: Vec::new(),
        }
    }

    /// A device on it that does nothing any more once its machine has lost power.
    pub fn device_of(&self, lost_power: impl Fn() -> bool + Send + 'static) -> SimFlash {
        SimFlash {
            lost_power: Some(Box::new(lost_power)),
            ..self.device()
        }
    }

    /// The process has ended: its requests in flight are completed.
    pub fn settle(&self) {
        let mut disk = self.lock();
        // The next process's clock may show less.
        disk.now_us = 0;
        for (_, _, mut request) in std::mem::take(&mut disk.waiting) {
            // Its owner is gone and will not be notified.
            let _ = disk.finish(&mut request);
        }
    }

    /// Changes what goes wrong from now on.
    pub fn faults(&self, change: impl FnOnce(&mut FlashFaults)) {
        change(&mut self.lock().faults);
    }

    /// Writes that the medium has been asked for, so far.
    pub fn writes(&self) -> u64 {
        self.lock().writes
    }

    /// Requests in flight.
    pub fn outstanding(&self) -> usize {
        self.lock().waiting.len()
    }

    /// The power fails: of every write in flight each page has reached the medium or not, or half
    /// of it has where pages may tear. Returns how many pages were at stake.
    pub fn crash(&self, seed: u64) -> usize {
        let mut disk = self.lock();
        disk.random ^= seed.rotate_left(17);
        disk.now_us = 0;
        let waiting = std::mem::take(&mut disk.waiting);
        let mut at_stake = 0;
        for (_, _, request) in waiting {
            if request.action == Action::Read {
                continue;
            }
            for (place, page) in request.buffer[..request.len].chunks(PAGE_BYTES).enumerate() {
                at_stake += 1;
                let offset = request.offset + (place * PAGE_BYTES) as u64;
                let torn = disk.faults.torn_pages;
                match disk.draw() % if torn { 3 } else { 2 } {
                    0 => {}
                    1 => disk.write(offset, page),
                    _ => disk.write_torn_page(offset, page),
                }
            }
        }
        at_stake
    }

    /// A copy of the disk as it stands, with no request in flight.
    pub fn copy(&self, seed: u64) -> SimDisk {
        let disk = self.lock();
        let copy = SimDisk::new(disk.bytes, seed);
        {
            let mut new = copy.lock();
            new.pages = disk.pages.clone();
            new.now_us = disk.now_us;
        }
        copy
    }

    /// A copy of the disk as a power failure now could leave it: see [`SimDisk::crash`]. `choose`
    /// decides per page in flight: 0 not written, 1 written, 2 torn.
    pub fn crashed_copy(&self, mut choose: impl FnMut(usize) -> u8) -> SimDisk {
        let copy = self.copy(1);
        let disk = self.lock();
        let mut new = copy.lock();
        let mut number = 0;
        for (_, _, request) in &disk.waiting {
            if request.action == Action::Read {
                continue;
            }
            for (place, page) in request.buffer[..request.len].chunks(PAGE_BYTES).enumerate() {
                let offset = request.offset + (place * PAGE_BYTES) as u64;
                match choose(number) {
                    0 => {}
                    1 => new.write(offset, page),
                    _ => new.write_torn_page(offset, page),
                }
                number += 1;
            }
        }
        drop(new);
        copy
    }

    /// Pages of writes in flight.
    pub fn in_flight_pages(&self) -> usize {
        let disk = self.lock();
        let writes = disk
            .waiting
            .iter()
            .filter(|(_, _, request)| request.action == Action::Write);
        writes.map(|(_, _, request)| request.len / PAGE_BYTES).sum()
    }

    /// Turns a bit of a page: rot.
    pub fn rot(&self, page: u64, bit: usize) {
        if let Some(bytes) = self.lock().pages.get_mut(&page) {
            if bytes.is_empty() {
                *bytes = vec![0; PAGE_BYTES].into();
            }
            bytes[bit / 8 % PAGE_BYTES] ^= 1 << (bit % 8);
        }
    }

    /// Whether reads of any page fail.
    pub fn has_unreadable(&self) -> bool {
        !self.lock().faults.read_error.is_empty()
    }

    /// Pages that were ever written, by number.
    pub fn written(&self) -> Vec<u64> {
        self.lock().pages.keys().copied().collect()
    }

    /// Pages that were written, but not among the last.
    pub fn settled(&self) -> Vec<u64> {
        let disk = self.lock();
        let pages = disk.pages.keys();
        pages
            .filter(|page| !disk.latest.contains(page))
            .copied()
            .collect()
    }

    /// Pages of the log that a later one says were durable when it was written: that one of them is
    /// damaged must be seen.
    pub fn vouched(&self) -> Vec<u64> {
        let disk = self.lock();
        let readable = disk
            .pages
            .iter()
            .filter(|(number, _)| !disk.faults.read_error.contains(number));
        let headers: Vec<(u64, PageHeader)> = readable
            .filter_map(|(number, page)| Some((*number, PageHeader::decode(page)?)))
            .collect();
        let durable = headers.iter().map(|(_, header)| header.durable).max();
        let below = |header: &PageHeader| durable.is_some_and(|end| header.sequence < end);
        let vouched = headers.into_iter().filter(|(_, header)| below(header));
        vouched.map(|(number, _)| number).collect()
    }

    /// A page's bytes.
    pub fn page(&self, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_BYTES];
        self.lock().read(number * PAGE_BYTES as u64, &mut bytes);
        bytes
    }
}

impl Disk {
    fn write_torn_page(&mut self, offset: u64, page: &[u8]) {
        let mut bytes = vec![0; PAGE_BYTES];
        self.read(offset, &mut bytes);
        for at in (0..PAGE_BYTES).step_by(SECTOR) {
            if self.draw().is_multiple_of(2) {
                bytes[at..at + SECTOR].copy_from_slice(&page[at..at + SECTOR]);
            }
        }
        self.write(offset, &bytes);
    }
}

/// A device on a [`SimDisk`].
pub struct SimFlash {
    disk: SimDisk,
    number: u64,
    lost_power: Option<Box<dyn Fn() -> bool + Send>>,
    /// Handed over after the power was lost: it never gets to the medium.
    late: Vec<Request>,
}

impl SimFlash {
    /// Without power nothing is done any more.
    fn fail_all(&mut self, done: &mut Vec<Completion>) {
        let mut disk = self.disk.lock();
        let (ours, others): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut disk.waiting)
            .into_iter()
            .partition(|(_, device, _)| *device == self.number);
        disk.waiting = others;
        let ours = ours.into_iter().map(|(_, _, request)| request);
        for request in ours.chain(self.late.drain(..)) {
            done.push(Completion {
                token: request.token,
                action: request.action,
                buffer: request.buffer,
                result: Err(DeviceError::Io(libc::EIO)),
            });
        }
    }

    fn is_dead(&self) -> bool {
        self.lost_power.as_ref().is_some_and(|lost| lost())
    }
}

impl FlashDevice for SimFlash {
    fn bytes(&self) -> u64 {
        self.disk.lock().bytes
    }

    fn submit(&mut self, now_us: u64, request: Request) -> Result<(), Request> {
        if self.is_dead() {
            self.late.push(request);
            return Ok(());
        }
        let mut disk = self.disk.lock();
        if disk.waiting.len() >= disk.outstanding_limit {
            return Err(request);
        }
        let time = 1 + disk.draw() % disk.latency_us;
        let now_us = now_us.max(disk.now_us);
        disk.waiting
            .push_back((now_us + time, self.number, request));
        Ok(())
    }

    fn poll(&mut self, now_us: u64, done: &mut Vec<Completion>) {
        if self.is_dead() {
            return self.fail_all(done);
        }
        let mut disk = self.disk.lock();
        disk.now_us = disk.now_us.max(now_us);
        if disk.now_us < disk.faults.hang_until_us {
            return;
        }
        let now_us = disk.now_us;
        if disk.waiting.iter().all(|(at, _, _)| *at > now_us) {
            return;
        }
        let (ready, waiting): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut disk.waiting)
            .into_iter()
            .partition(|(at, _, _)| *at <= now_us);
        disk.waiting = waiting;
        let mut ready: Vec<_> = ready.into();
        ready.sort_by_key(|(at, _, _)| *at);
        for (_, device, mut request) in ready {
            let result = disk.finish(&mut request);
            if device != self.number {
                continue;
            }
            done.push(Completion {
                token: request.token,
                action: request.action,
                buffer: request.buffer,
                result,
            });
        }
    }

    fn wait(&mut self) {
        let mut disk = self.disk.lock();
        let next = disk.waiting.iter().map(|(at, _, _)| *at).min();
        let hang = disk.faults.hang_until_us;
        if let Some(at) = next {
            disk.now_us = disk.now_us.max(at).max(hang);
        }
    }

    fn outstanding(&self) -> usize {
        let disk = self.disk.lock();
        let ours = disk
            .waiting
            .iter()
            .filter(|(_, device, _)| *device == self.number);
        ours.count() + self.late.len()
    }

    fn grown_bytes(&self) -> u64 {
        let disk = self.disk.lock();
        let last = disk.pages.keys().next_back();
        last.map_or(0, |page| (page + 1) * PAGE_BYTES as u64)
            .min(disk.bytes)
    }

    fn describe(&self) -> String {
        "a simulated disk".into()
    }
}

//! Combining buffers, lines, and the media behind them.

/// Bytes of a line of the memory bus.
const BUS_LINE_BYTES: u64 = 64;
/// Lines that a DIMM's buffer may have at most; keeps a store's work bounded.
const MAX_LINES: u64 = 1024;

/// What the modelled device is like. The default is the one set that reproduces the paper; see the
/// module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaParameters {
    /// DIMMs that addresses are spread over.
    pub dimms: u32,
    /// Consecutive bytes on one DIMM; a multiple of `line_bytes`.
    pub interleave_bytes: u64,
    /// Bytes that the media writes at once: a power of two from 64 to 4096.
    pub line_bytes: u64,
    /// Bytes of each DIMM's combining buffer.
    pub buffer_bytes: u64,
    /// Lines of the buffer that are with the media and combine nothing.
    pub draining_lines: u32,
    /// Time in which a DIMM's media writes one line, in nanoseconds.
    pub line_write_ns: u64,
}

impl Default for MediaParameters {
    fn default() -> MediaParameters {
        MediaParameters {
            dimms: 3,
            interleave_bytes: 4096,
            line_bytes: 256,
            buffer_bytes: 16 * 1024,
            draining_lines: 19,
            line_write_ns: 143,
        }
    }
}

impl MediaParameters {
    /// Lines of one DIMM's buffer that combine.
    ///
    /// # Errors
    /// [`MediaError`] names what does not fit together.
    fn combining_lines(&self) -> Result<usize, MediaError> {
        let wrong = |what, value| Err(MediaError { what, value });
        if self.dimms == 0 || self.dimms > 64 {
            return wrong("dimms, 1 to 64", u64::from(self.dimms));
        }
        if !self.line_bytes.is_power_of_two() || !(64..=4096).contains(&self.line_bytes) {
            return wrong(
                "line_bytes, a power of two from 64 to 4096",
                self.line_bytes,
            );
        }
        if self.interleave_bytes == 0 || !self.interleave_bytes.is_multiple_of(self.line_bytes) {
            return wrong(
                "interleave_bytes, a multiple of line_bytes",
                self.interleave_bytes,
            );
        }
        if self.line_write_ns > MAX_LINE_WRITE_NS {
            return wrong("line_write_ns, at most a second", self.line_write_ns);
        }
        let lines = self.buffer_bytes / self.line_bytes;
        if lines > MAX_LINES {
            return wrong("buffer_bytes, at most 1024 lines", self.buffer_bytes);
        }
        match lines.checked_sub(u64::from(self.draining_lines)) {
            None | Some(0) => wrong(
                "draining_lines, fewer than the buffer's lines",
                u64::from(self.draining_lines),
            ),
            Some(lines) => Ok(lines as usize),
        }
    }
}

/// A parameter that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("media model: {value} is not {what}")]
pub struct MediaError {
    what: &'static str,
    value: u64,
}

/// Bytes and lines so far. Lines that are still in the buffers are not yet written;
/// [`Media::drain`] writes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaStats {
    /// Bytes that arrived over the memory bus, in whole bus lines.
    pub request_bytes: u64,
    /// Bytes written to media.
    pub media_bytes: u64,
    /// Lines that left the buffer complete.
    pub full_lines: u64,
    /// Lines that left it incomplete: one read-modify-write each.
    pub partial_lines: u64,
}

impl MediaStats {
    /// Media bytes ÷ request bytes; 1 for no requests.
    pub fn amplification(&self) -> f64 {
        if self.request_bytes == 0 {
            return 1.0;
        }
        self.media_bytes as f64 / self.request_bytes as f64
    }

    /// What came after `earlier`.
    pub fn since(&self, earlier: &MediaStats) -> MediaStats {
        MediaStats {
            request_bytes: self.request_bytes - earlier.request_bytes,
            media_bytes: self.media_bytes - earlier.media_bytes,
            full_lines: self.full_lines - earlier.full_lines,
            partial_lines: self.partial_lines - earlier.partial_lines,
        }
    }
}

/// One DIMM's lines that combine.
#[derive(Clone, Debug)]
struct Dimm {
    /// Line numbers; `EMPTY` where there is none.
    lines: Vec<u64>,
    /// When each was written last, in stores.
    written: Vec<u64>,
    /// Which bus lines of each were written.
    filled: Vec<u64>,
}

const EMPTY: u64 = u64::MAX;
/// Picoseconds in a nanosecond.
const PICOS: u64 = 1000;
/// The longest time that a line may take.
const MAX_LINE_WRITE_NS: u64 = 1_000_000_000;

impl Dimm {
    fn new(lines: usize) -> Dimm {
        Dimm {
            lines: vec![EMPTY; lines],
            written: vec![0; lines],
            filled: vec![0; lines],
        }
    }

    /// The place of a line: its own, or that of the line written longest ago.
    fn place(&self, line: u64) -> usize {
        if let Some(place) = self.lines.iter().position(|held| *held == line) {
            return place;
        }
        let mut oldest = 0;
        for (place, written) in self.written.iter().enumerate() {
            if *written < self.written[oldest] {
                oldest = place;
            }
        }
        oldest
    }
}

/// The modelled device. Feed it every store in the order in which the memory controller would see
/// them.
#[derive(Clone, Debug)]
pub struct Media {
    parameters: MediaParameters,
    whole: u64,
    dimms: Vec<Dimm>,
    clock: u64,
    /// When all DIMMs together will have written what was given to them so far.
    media_free_ps: u64,
    /// A line's share of that time.
    line_write_ps: u64,
    /// How far the media may be behind while stores are still accepted at once.
    ahead_ps: u64,
    stats: MediaStats,
}

impl Media {
    /// A device with empty buffers.
    ///
    /// # Errors
    /// [`MediaError`] for parameters that do not fit together.
    pub fn new(parameters: MediaParameters) -> Result<Media, MediaError> {
        let lines = parameters.combining_lines()?;
        let bits = parameters.line_bytes / BUS_LINE_BYTES;
        let dimms = u64::from(parameters.dimms);
        let line_write_ps = parameters.line_write_ns * PICOS / dimms;
        Ok(Media {
            whole: u64::MAX >> (64 - bits),
            dimms: vec![Dimm::new(lines); parameters.dimms as usize],
            clock: 0,
            media_free_ps: 0,
            line_write_ps,
            ahead_ps: line_write_ps * u64::from(parameters.draining_lines) * dimms,
            stats: MediaStats::default(),
            parameters,
        })
    }

    /// Its parameters.
    pub fn parameters(&self) -> &MediaParameters {
        &self.parameters
    }

    /// A store of `len` bytes at `address`, time left out. The work is proportional to the bus
    /// lines touched.
    pub fn store(&mut self, address: u64, len: u64) {
        self.store_at(address, len, 0);
    }

    /// A store that reaches the memory controller at `now_ns`. Answers when it is accepted, and so
    /// durable: now, or later where the media is behind.
    pub fn store_at(&mut self, address: u64, len: u64, now_ns: u64) -> u64 {
        if len == 0 {
            return now_ns;
        }
        let mut accepted_ns = now_ns;
        let first = address / BUS_LINE_BYTES;
        let last = address.saturating_add(len - 1) / BUS_LINE_BYTES;
        for bus_line in first..=last {
            accepted_ns = accepted_ns.max(self.store_line(bus_line, now_ns));
        }
        accepted_ns
    }

    fn store_line(&mut self, bus_line: u64, now_ns: u64) -> u64 {
        let address = bus_line * BUS_LINE_BYTES;
        let line = address / self.parameters.line_bytes;
        let bit = 1 << (address % self.parameters.line_bytes / BUS_LINE_BYTES);
        let turn = address / self.parameters.interleave_bytes;
        let now_ps = now_ns.saturating_mul(PICOS);
        let dimm = &mut self.dimms[(turn % u64::from(self.parameters.dimms)) as usize];
        self.clock += 1;
        self.stats.request_bytes += BUS_LINE_BYTES;
        let place = dimm.place(line);
        if dimm.lines[place] != line {
            if dimm.lines[place] != EMPTY {
                if dimm.filled[place] == self.whole {
                    self.stats.full_lines += 1;
                } else {
                    self.stats.partial_lines += 1;
                }
                self.stats.media_bytes += self.parameters.line_bytes;
                let begun = self.media_free_ps.max(now_ps);
                self.media_free_ps = begun.saturating_add(self.line_write_ps);
            }
            dimm.lines[place] = line;
            dimm.filled[place] = 0;
        }
        dimm.filled[place] |= bit;
        dimm.written[place] = self.clock;
        self.media_free_ps
            .saturating_sub(self.ahead_ps)
            .div_ceil(PICOS)
            .max(now_ns)
    }

    /// Bytes and lines so far.
    pub fn stats(&self) -> MediaStats {
        self.stats
    }

    /// Media bytes ÷ request bytes so far.
    pub fn amplification(&self) -> f64 {
        self.stats.amplification()
    }

    /// Writes out what the buffers hold, as at a power failure.
    pub fn drain(&mut self) {
        for dimm in &mut self.dimms {
            for place in 0..dimm.lines.len() {
                if dimm.lines[place] != EMPTY {
                    if dimm.filled[place] == self.whole {
                        self.stats.full_lines += 1;
                    } else {
                        self.stats.partial_lines += 1;
                    }
                    self.stats.media_bytes += self.parameters.line_bytes;
                    dimm.lines[place] = EMPTY;
                    dimm.filled[place] = 0;
                    dimm.written[place] = 0;
                }
            }
        }
    }
}

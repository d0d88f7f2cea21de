//! One line of memory and what each of its words may hold after a crash.

use super::WORDS;
use crate::flush::LINE_BYTES;

/// A value that a word was given and that is not durable yet.
#[derive(Clone, Copy)]
struct Stored {
    word: u8,
    /// Covered by a flush that a fence has not completed yet.
    flushed: bool,
    value: [u8; 8],
}

/// A line some of whose words are open. Sets of words are bits, word 0 the lowest.
#[derive(Clone)]
pub(super) struct Line {
    pub(super) number: u32,
    pub(super) newest: [u8; LINE_BYTES],
    /// Words with one value that is not durable, the newest: nearly all that are open.
    single: u8,
    /// Those of `single` that are covered by a flush that a fence has not completed yet.
    flushed: u8,
    /// The values of all other open words, oldest first.
    stores: Vec<Stored>,
    /// Whether the next fence writes it back.
    pub(super) flushing: bool,
}

impl Line {
    /// What was stored into a line that was not open, if that is something new.
    pub(super) fn whole(number: u32, durable: &[u8], newest: &[u8; LINE_BYTES]) -> Option<Line> {
        let words = newest
            .as_chunks::<8>()
            .0
            .iter()
            .zip(durable.as_chunks::<8>().0);
        let single = words
            .rev()
            .fold(0, |single, (new, old)| single << 1 | u8::from(new != old));
        (single != 0).then(|| Line {
            single,
            ..Line::new(number, *newest)
        })
    }

    /// A line without an open word.
    pub(super) fn new(number: u32, newest: [u8; LINE_BYTES]) -> Line {
        Line {
            number,
            newest,
            single: 0,
            flushed: 0,
            stores: Vec::new(),
            flushing: false,
        }
    }

    /// With `last_only`, of several values that a word had since its last flush only the newest may
    /// survive.
    pub(super) fn store(&mut self, from: usize, bytes: &[u8], last_only: bool) {
        let old = self.newest;
        self.newest[from..from + bytes.len()].copy_from_slice(bytes);
        for word in from / 8..(from + bytes.len()).div_ceil(8) {
            let (was, value) = (word_of(&old, word), word_of(&self.newest, word));
            // Storing what is there already opens no new outcome.
            if value != was {
                self.open(word as u8, was, value, last_only);
            }
        }
    }

    fn open(&mut self, word: u8, was: [u8; 8], value: [u8; 8], last_only: bool) {
        let bit = 1 << word;
        let flushed = self.flushed & bit != 0;
        if self.single & bit != 0 {
            if last_only && !flushed {
                return;
            }
            self.single &= !bit;
            self.flushed &= !bit;
            let value = was;
            let earlier = Stored {
                word,
                flushed,
                value,
            };
            self.stores.push(earlier);
        } else if self.stores.iter().all(|stored| stored.word != word) {
            self.single |= bit;
            return;
        }
        let mut same = self.stores.iter_mut();
        let earlier = same.find(|stored| stored.word == word && !stored.flushed);
        match earlier.filter(|_| last_only) {
            Some(stored) => stored.value = value,
            None => self.stores.push(Stored {
                word,
                flushed: false,
                value,
            }),
        }
    }

    /// What the word may hold besides the durable value, oldest first.
    pub(super) fn values(&self, word: u8) -> Vec<[u8; 8]> {
        if self.single & 1 << word != 0 {
            return vec![word_of(&self.newest, usize::from(word))];
        }
        let of_word = self.stores.iter().filter(|stored| stored.word == word);
        of_word.map(|stored| stored.value).collect()
    }

    pub(super) fn flush(&mut self, words: u8) {
        self.flushed |= self.single & words;
        for stored in &mut self.stores {
            stored.flushed |= words & 1 << stored.word != 0;
        }
    }

    /// Makes what was flushed durable; returns whether nothing is open any more.
    pub(super) fn fence(&mut self, durable: &mut [u8]) -> bool {
        let flushed = std::mem::take(&mut self.flushed);
        match flushed {
            0xff => durable.copy_from_slice(&self.newest),
            _ => {
                for word in (0..WORDS).filter(|word| flushed & 1 << word != 0) {
                    durable[word * 8..word * 8 + 8].copy_from_slice(&word_of(&self.newest, word));
                }
            }
        }
        self.single &= !flushed;
        self.stores.retain(|stored| {
            if stored.flushed {
                let at = usize::from(stored.word) * 8;
                durable[at..at + 8].copy_from_slice(&stored.value);
            }
            !stored.flushed
        });
        self.single == 0 && self.stores.is_empty()
    }
}

fn word_of(line: &[u8; LINE_BYTES], word: usize) -> [u8; 8] {
    let mut value = [0; 8];
    value.copy_from_slice(&line[word * 8..word * 8 + 8]);
    value
}

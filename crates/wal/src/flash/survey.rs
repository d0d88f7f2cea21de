//! What opening an area keeps of its pages. Each is read once, and what the log is made from is
//! noted in their place: which entries begin and end in it. Where the log begins and ends is known
//! only after the last one.

use cyclone_wire::flash::{EntryHead, FlashSuperblock, PAGE_BYTES, PageHeader};
use cyclone_wire::ring::HardState;

use super::assemble::{Assembler, MalformedPage, Object, Step};

/// In place of a sequence: the page is not whole, or not in its place.
const NONE: u64 = u64::MAX;

/// Something met in a page. `began` is the page in which an object began: if that is not of the
/// log, nor is the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageState {
    /// So many entries, one after the other, begin and end here; all are of one term, and so is
    /// their predecessor.
    Run { index: u64, term: u64, count: u32 },
    /// An entry begins.
    Begun {
        index: u64,
        term: u64,
        prev_term: u64,
    },
    /// An entry is whole.
    Ended { index: u64, term: u64, began: u64 },
    /// The hard state from here on, by its number.
    HardState { number: usize, began: u64 },
    /// The log begins anew.
    Reset { index: u64, term: u64, began: u64 },
    /// Something that makes no sense.
    MalformedPage { what: &'static str, began: u64 },
}

/// A page by its place.
struct Page {
    sequence: u64,
    /// Where the log begins, as it says.
    first: u64,
    /// Where its facts begin.
    facts: usize,
    life: u32,
    /// It only tells what was durable and what had been trimmed.
    is_bare: bool,
}

/// See the module's text.
pub(crate) struct AreaScan {
    block: FlashSuperblock,
    pages: Vec<Page>,
    facts: Vec<PageState>,
    hard_states: Vec<HardState>,
    assembler: Assembler<()>,
    /// The sequence that would go on with the page seen last.
    next: u64,
    /// What ends behind the area's end: in the page of this sequence, before anything else.
    carried_over: Option<(u64, PageState)>,
    /// The highest that any page says.
    pub(crate) first: u64,
    pub(crate) durable: u64,
    pub(crate) life: u32,
}

impl AreaScan {
    /// `pages` is how many will come.
    pub(crate) fn new(block: FlashSuperblock, pages: u64) -> AreaScan {
        AreaScan {
            block,
            pages: Vec::with_capacity(pages as usize),
            facts: Vec::new(),
            hard_states: Vec::new(),
            assembler: Assembler::from_index(0),
            next: NONE,
            carried_over: None,
            first: 0,
            durable: 0,
            life: 0,
        }
    }

    fn header(&self, place: u64, bytes: &[u8]) -> Option<PageHeader> {
        let segment_pages = u64::from(self.block.segment_bytes) / PAGE_BYTES as u64;
        PageHeader::decode(bytes).filter(|header| {
            header.tag == self.block.tag
                && header.log == self.block.log
                && header.sequence % self.block.pages == place
                && header.first.is_multiple_of(segment_pages)
        })
    }

    /// Takes the next page of the area.
    pub(crate) fn take(&mut self, bytes: &[u8]) {
        let header = self.header(self.pages.len() as u64, bytes);
        self.pages.push(Page {
            sequence: header.map_or(NONE, |header| header.sequence),
            first: header.map_or(0, |header| header.first),
            facts: self.facts.len(),
            life: header.map_or(0, |header| header.life),
            is_bare: header.is_none_or(|header| header.used == 0),
        });
        let Some(header) = header else {
            self.next = NONE;
            return;
        };
        self.first = self.first.max(header.first);
        self.durable = self.durable.max(header.durable);
        self.life = self.life.max(header.life);
        if header.sequence < self.first {
            // No longer of the log, whatever follows.
            self.next = NONE;
            return;
        }
        if header.sequence != self.next {
            self.assembler.forget();
        }
        self.next = header.sequence + 1;
        if let Err(MalformedPage { began, what }) = self.feed(&header, bytes) {
            self.facts.push(PageState::MalformedPage { what, began });
            if began < header.sequence {
                // Should that page not be of the log, what stands behind the object's end counts.
                self.assembler.forget();
                if let Err(MalformedPage { began, what }) = self.feed(&header, bytes) {
                    self.facts.push(PageState::MalformedPage { what, began });
                }
            }
        }
    }

    fn feed(&mut self, header: &PageHeader, bytes: &[u8]) -> Result<(), MalformedPage> {
        let AreaScan {
            facts,
            hard_states,
            assembler,
            pages,
            ..
        } = self;
        let here = pages.last().map_or(0, |page| page.facts);
        assembler.feed(header, bytes, |step| match step {
            Step::Begun(EntryHead {
                index,
                term,
                prev_term,
                ..
            }) => facts.push(PageState::Begun {
                index,
                term,
                prev_term,
            }),
            Step::Done(object, began) => {
                let fact = of_object(object, began, hard_states);
                note(facts, here, fact);
            }
        })
    }

    /// Whether an object has begun in the area's last page that may go on in its first one: then
    /// pages are to be taken by
    /// [`AreaScan::reread_page`], from the first one on.
    pub(crate) fn may_wrap(&self) -> bool {
        let wrapped = self.pages.len() as u64 == self.block.pages;
        let since = self.assembler.open_since();
        wrapped
            && self.carried_over.is_none()
            && self.next != NONE
            && since.is_some_and(|since| since >= self.first)
            && self.life_of(self.next).is_some()
    }

    /// Takes once more the next of the pages in which an object from the area's end may go on.
    /// Returns whether it reads as before.
    pub(crate) fn reread_page(&mut self, bytes: &[u8]) -> bool {
        let place = self.next % self.block.pages;
        let header = self.header(place, bytes);
        let Some(header) = header.filter(|header| header.sequence == self.next) else {
            return false;
        };
        self.next += 1;
        let (mut first, hard_states) = (None, &mut self.hard_states);
        let since = self.assembler.open_since();
        let fed = self.assembler.feed(&header, bytes, |step| {
            // What follows was noted the first time.
            if first.is_none() {
                first = Some(match step {
                    Step::Begun(_) => None,
                    Step::Done(object, began) => Some(of_object(object, began, hard_states)),
                });
            }
        });
        if let Err(MalformedPage { began, what }) = fed
            && first.is_none()
            && Some(began) == since
        {
            first = Some(Some(PageState::MalformedPage { what, began }));
        }
        if let Some(fact) = first {
            self.carried_over = fact.map(|fact| (header.sequence, fact));
            self.assembler.forget();
        }
        true
    }

    /// The sequence that would go on with the page seen last.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The life in which a page of the log was written; `None`: it is not there.
    pub(crate) fn life_of(&self, sequence: u64) -> Option<u32> {
        let page = self.pages.get((sequence % self.block.pages) as usize)?;
        (page.sequence == sequence).then_some(page.life)
    }

    /// Where the log begins at least, as pages of it say from `first` to below `tail`.
    pub(crate) fn first_published(&self, first: u64, tail: u64) -> u64 {
        let place = |sequence: u64| (sequence % self.block.pages) as usize;
        let told = (first..tail).map(|sequence| self.pages[place(sequence)].first);
        told.max().unwrap_or(first)
    }

    /// Behind the last page with records below a sequence; `first` if there is none.
    pub(crate) fn records_end(&self, first: u64, below: u64) -> u64 {
        let place = |sequence: u64| (sequence % self.block.pages) as usize;
        let mut pages = (first..below).rev();
        let last = pages.find(|sequence| !self.pages[place(*sequence)].is_bare);
        last.map_or(first, |last| last + 1)
    }

    /// Pages behind a sequence.
    pub(crate) fn behind(&self, sequence: u64) -> u64 {
        let found = self.pages.iter().map(|page| page.sequence);
        found
            .filter(|found| *found != NONE && *found > sequence)
            .count() as u64
    }

    /// What was met in a page of the log, in order.
    pub(crate) fn facts(&self, sequence: u64) -> impl Iterator<Item = PageState> + '_ {
        let place = (sequence % self.block.pages) as usize;
        let start = |place: usize| {
            let page = self.pages.get(place);
            page.map_or(self.facts.len(), |page| page.facts)
        };
        let carried_over = self.carried_over.filter(|(page, _)| *page == sequence);
        let here = &self.facts[start(place)..start(place + 1)];
        carried_over
            .map(|(_, fact)| fact)
            .into_iter()
            .chain(here.iter().copied())
    }

    /// A hard state by its number.
    pub(crate) fn hard_state(&self, number: usize) -> Option<&HardState> {
        self.hard_states.get(number)
    }
}

fn of_object(object: Object<()>, began: u64, hard_states: &mut Vec<HardState>) -> PageState {
    match object {
        Object::Entry(EntryHead { index, term, .. }, ()) => PageState::Ended { index, term, began },
        Object::Reset(index, term) => PageState::Reset { index, term, began },
        Object::HardState(state) => {
            if hard_states.last() != Some(&state) {
                hard_states.push(state);
            }
            let number = hard_states.len() - 1;
            PageState::HardState { number, began }
        }
    }
}

/// Notes what has come to an end in a page whose facts begin at `here`. Small entries are noted
/// together.
fn note(facts: &mut Vec<PageState>, here: usize, fact: PageState) {
    let begun = facts[here..].last().copied();
    let (
        PageState::Ended { index, term, .. },
        Some(PageState::Begun {
            index: begun,
            prev_term,
            ..
        }),
    ) = (fact, begun)
    else {
        facts.push(fact);
        return;
    };
    if begun != index || prev_term != term {
        facts.push(fact);
        return;
    }
    facts.pop();
    match facts[here..].last_mut() {
        Some(PageState::Run {
            index: from,
            term: of,
            count,
        }) if *of == term && *from + u64::from(*count) == index => *count += 1,
        _ => facts.push(PageState::Run {
            index,
            term,
            count: 1,
        }),
    }
}

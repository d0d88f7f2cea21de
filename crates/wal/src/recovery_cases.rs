//! The decision table of recovery: what becomes of one index of the ring, from the facts about its
//! slot and record. A case that is not in the table cannot be compiled into recovery: the facts are
//! read by [`crate::Ring::open`], and only this table decides. Drawn in docs/internals/recovery.md.

/// What a slot says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// It is null.
    Null,
    /// It was stored for another index.
    OtherIndex,
    /// It points outside the record area.
    Outside,
    /// It points into the record area.
    Inside,
}

/// What the record's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    /// It does not match its checksum.
    Damaged,
    /// It is of another log or index.
    OtherPlace,
    /// Its predecessor's term is another, or its term is below it.
    OtherTerm,
    /// It belongs here.
    Matches,
}

/// Where the record's payload lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segments {
    /// Beyond the record area.
    Outside,
    /// In a frame, and there is no pool.
    NoPool,
    /// In a frame that does not exist.
    NoFrame,
    /// In memory that the ring has.
    Inside,
}

/// The facts about one index, in the order in which they are read: what follows a fact that decides
/// is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) slot: Slot,
    /// The durable commit index reaches this index.
    pub(crate) is_committed: bool,
    pub(crate) header: Option<Header>,
    pub(crate) segments: Option<Segments>,
    /// The payload matches its checksum.
    pub(crate) is_payload_whole: Option<bool>,
    /// The record lies behind its predecessor, or at the begin of the area.
    pub(crate) is_adjacent: Option<bool>,
}

impl Facts {
    pub(crate) fn of(slot: Slot, is_committed: bool) -> Facts {
        Facts {
            slot,
            is_committed,
            header: None,
            segments: None,
            is_payload_whole: None,
            is_adjacent: None,
        }
    }
}

/// What recovery does about an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The log ends before it.
    End,
    /// Its record is the next entry.
    Keep,
    /// What was durable does not read back: the ring is not opened.
    Corrupt(&'static str),
}

/// A row of the table; `None` matches every fact.
struct Case {
    slot: Slot,
    is_committed: Option<bool>,
    header: Option<Header>,
    segments: Option<Segments>,
    is_payload_whole: Option<bool>,
    is_adjacent: Option<bool>,
    decision: Decision,
}

impl Case {
    /// A row that is decided by the slot alone.
    const fn slot(slot: Slot, what: &'static str) -> Case {
        Case {
            slot,
            is_committed: None,
            header: None,
            segments: None,
            is_payload_whole: None,
            is_adjacent: None,
            decision: Decision::Corrupt(what),
        }
    }

    const fn null(is_committed: bool, decision: Decision) -> Case {
        Case {
            is_committed: Some(is_committed),
            decision,
            ..Case::slot(Slot::Null, "")
        }
    }

    const fn header(header: Header, what: &'static str) -> Case {
        Case {
            header: Some(header),
            ..Case::slot(Slot::Inside, what)
        }
    }

    const fn segments(segments: Segments, what: &'static str) -> Case {
        Case {
            segments: Some(segments),
            ..Case::header(Header::Matches, what)
        }
    }

    const fn payload(is_whole: bool, what: &'static str) -> Case {
        Case {
            is_payload_whole: Some(is_whole),
            ..Case::segments(Segments::Inside, what)
        }
    }

    const fn place(is_adjacent: bool, decision: Decision) -> Case {
        Case {
            is_adjacent: Some(is_adjacent),
            decision,
            ..Case::payload(true, "")
        }
    }

    fn matches(&self, facts: &Facts) -> bool {
        fn is<T: PartialEq>(wanted: Option<T>, fact: Option<T>) -> bool {
            wanted.is_none() || wanted == fact
        }
        self.slot == facts.slot
            && is(self.is_committed, Some(facts.is_committed))
            && is(self.header, facts.header)
            && is(self.segments, facts.segments)
            && is(self.is_payload_whole, facts.is_payload_whole)
            && is(self.is_adjacent, facts.is_adjacent)
    }
}

#[rustfmt::skip]
const CASES: [Case; 13] = [
    Case::null(false, Decision::End),
    Case::null(true, Decision::Corrupt("the log ends below the durable commit index")),
    Case::slot(Slot::OtherIndex, "the slot names another index"),
    Case::slot(Slot::Outside, "the slot points outside the records"),
    Case::header(Header::Damaged, "the record's header does not match its checksum"),
    Case::header(Header::OtherPlace, "the record belongs to another place"),
    Case::header(Header::OtherTerm, "the record does not follow its predecessor"),
    Case::segments(Segments::Outside, "the record leaves the record area"),
    Case::segments(Segments::NoPool, "the record names a frame, and there is no pool"),
    Case::segments(Segments::NoFrame, "the record names a frame that does not exist"),
    Case::payload(false, "the payload does not match its checksum"),
    Case::place(false, Decision::Corrupt("the record does not lie behind its predecessor")),
    Case::place(true, Decision::Keep),
];

/// What becomes of an index. The table is total: exactly one row matches what recovery can read.
pub(crate) fn decide(facts: &Facts) -> Decision {
    let row = CASES.iter().find(|case| case.matches(facts));
    row.map_or(
        Decision::Corrupt("the facts about the record are incomplete"),
        |case| case.decision,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOTS: [Slot; 4] = [Slot::Null, Slot::OtherIndex, Slot::Outside, Slot::Inside];
    const HEADERS: [Header; 4] = [
        Header::Damaged,
        Header::OtherPlace,
        Header::OtherTerm,
        Header::Matches,
    ];
    const SEGMENTS: [Segments; 4] = [
        Segments::Outside,
        Segments::NoPool,
        Segments::NoFrame,
        Segments::Inside,
    ];

    /// All facts that can be read, each as far as reading goes.
    fn readable() -> Vec<Facts> {
        let mut all = Vec::new();
        for slot in SLOTS {
            for is_committed in [false, true] {
                let facts = Facts::of(slot, is_committed);
                if slot != Slot::Inside {
                    all.push(facts);
                    continue;
                }
                for header in HEADERS.map(Some) {
                    let facts = Facts { header, ..facts };
                    if header != Some(Header::Matches) {
                        all.push(facts);
                        continue;
                    }
                    for segments in SEGMENTS.map(Some) {
                        let facts = Facts { segments, ..facts };
                        if segments != Some(Segments::Inside) {
                            all.push(facts);
                            continue;
                        }
                        for (whole, adjacent) in
                            [(false, None), (true, Some(false)), (true, Some(true))]
                        {
                            all.push(Facts {
                                is_payload_whole: Some(whole),
                                is_adjacent: adjacent,
                                ..facts
                            });
                        }
                    }
                }
            }
        }
        all
    }

    #[test]
    fn exactly_one_row_matches_whatever_can_be_read() {
        let all = readable();
        assert_eq!(all.len(), 2 * (3 + 3 + 3 + 3));
        let mut used = [0; CASES.len()];
        for facts in &all {
            let rows: Vec<usize> = (0..CASES.len())
                .filter(|row| CASES[*row].matches(facts))
                .collect();
            let [row] = rows[..] else {
                panic!("rows {rows:?} match {facts:?}");
            };
            used[row] += 1;
        }
        assert!(used.iter().all(|count| *count > 0), "{used:?}");
    }

    #[test]
    fn only_a_whole_record_in_its_place_is_kept_and_only_an_uncommitted_index_ends_the_log() {
        for facts in readable() {
            let is_whole = facts.is_payload_whole == Some(true) && facts.is_adjacent == Some(true);
            let expected = match facts.slot {
                Slot::Null if !facts.is_committed => Decision::End,
                Slot::Inside if is_whole => Decision::Keep,
                _ => {
                    let decision = decide(&facts);
                    assert!(matches!(decision, Decision::Corrupt(_)), "{facts:?}");
                    continue;
                }
            };
            assert_eq!(decide(&facts), expected, "{facts:?}");
        }
    }

    #[test]
    fn facts_that_were_not_read_never_keep_a_record() {
        let facts = Facts::of(Slot::Inside, false);
        assert!(matches!(decide(&facts), Decision::Corrupt(_)));
    }
}

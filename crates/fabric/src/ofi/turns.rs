//! A connection's messages in the order in which they were sent.
//!
//! libfabric promises order for the matching of messages with receive buffers (`FI_ORDER_SAS`), not
//! for completions: with `tcp;ofi_rxm` a message of more than 16 KB is sent by rendezvous or in
//! segments, and small ones behind it complete before it. So messages are numbered, and what comes
//! early waits.

use std::collections::BTreeMap;

use super::wire::Header;

/// Messages that may wait for one before them. Far fewer than half of all numbers, so that early
/// ones and late ones can be distinguished.
const MAX_EARLY: usize = 4096;
/// So many of the largest messages may wait at most, in bytes.
const MAX_EARLY_LARGEST: usize = 64;

/// What a message's number says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// To be handled now; those after it may have come already.
    InTurn,
    /// Kept until its turn.
    Early,
    /// A number that was handled: dropped.
    Late,
    /// No room to keep it.
    TooMany,
}

/// The turn of one connection's messages in one direction.
pub struct Turns {
    expected: u16,
    early: BTreeMap<u16, (Header, Vec<u8>)>,
    early_bytes: usize,
    max_early_bytes: usize,
}

impl Turns {
    /// For messages of so many bytes at most.
    pub fn new(largest: usize) -> Turns {
        Turns {
            expected: 0,
            early: BTreeMap::new(),
            early_bytes: 0,
            max_early_bytes: MAX_EARLY_LARGEST.saturating_mul(largest),
        }
    }

    /// Says what to do with a message that came, and keeps it if it is early.
    pub fn arrived(&mut self, header: Header, payload: &[u8]) -> Arrival {
        let ahead = header.number.wrapping_sub(self.expected);
        if ahead == 0 {
            self.expected = self.expected.wrapping_add(1);
            return Arrival::InTurn;
        }
        if ahead > u16::MAX / 2 || self.early.contains_key(&header.number) {
            return Arrival::Late;
        }
        let room = self.max_early_bytes - self.early_bytes;
        if self.early.len() >= MAX_EARLY || payload.len() > room {
            return Arrival::TooMany;
        }
        self.early_bytes += payload.len();
        self.early.insert(header.number, (header, payload.to_vec()));
        Arrival::Early
    }

    /// The message whose turn it is, if it came early.
    pub fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        let message = self.early.remove(&self.expected)?;
        self.expected = self.expected.wrapping_add(1);
        self.early_bytes -= message.1.len();
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::wire::Kind;
    use super::*;

    fn message(number: u16) -> Header {
        Header {
            kind: Kind::User,
            number,
            incarnation: 1,
            connection: 2,
            words: [0; 5],
        }
    }

    proptest! {
        #[test]
        fn any_order_of_arrival_becomes_the_order_of_sending(start: u16, shuffled in Just((0..300u16).collect::<Vec<_>>()).prop_shuffle(),
                                                             twice in prop::collection::vec(0..300usize, 0..40)) {
            let mut turns = Turns { expected: start, ..Turns::new(64) };
            let mut arrivals = shuffled.clone();
            arrivals.extend(twice.iter().map(|&place| shuffled[place]));
            let mut handled = Vec::new();
            for number in arrivals {
                let number = start.wrapping_add(number);
                if turns.arrived(message(number), &number.to_le_bytes()) == Arrival::InTurn {
                    handled.push(number);
                }
                while let Some((header, payload)) = turns.next() {
                    prop_assert_eq!(&payload[..], &header.number.to_le_bytes()[..]);
                    handled.push(header.number);
                }
            }
            let sent: Vec<u16> = (0..300).map(|number: u16| start.wrapping_add(number)).collect();
            prop_assert_eq!(handled, sent);
            prop_assert_eq!(turns.early_bytes, 0);
        }
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut turns = Turns::new(1000);
        for number in 1..=MAX_EARLY as u16 {
            assert_eq!(turns.arrived(message(number), &[]), Arrival::Early);
        }
        let next = MAX_EARLY as u16 + 1;
        assert_eq!(turns.arrived(message(next), &[]), Arrival::TooMany);
    }

    /// A few large messages are as much as many small ones; what has had its turn does not count
    /// any more.
    #[test]
    fn the_bytes_of_what_waits_are_bounded() {
        let largest = [7; 1000];
        let mut turns = Turns::new(largest.len());
        let most = MAX_EARLY_LARGEST as u16;
        for number in 1..=most {
            assert_eq!(turns.arrived(message(number), &largest), Arrival::Early);
        }
        let early = message(most + 1);
        assert_eq!(turns.arrived(early, &largest[..1]), Arrival::TooMany);
        assert_eq!(turns.arrived(early, &[]), Arrival::Early);
        assert_eq!(turns.arrived(message(0), &largest), Arrival::InTurn);
        assert!(turns.next().is_some());
        let early = message(most + 2);
        assert_eq!(turns.arrived(early, &largest), Arrival::Early);
        while turns.next().is_some() {}
        assert_eq!(turns.early_bytes, 0);
    }
}

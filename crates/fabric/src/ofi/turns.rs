//! A connection's messages in the order in which they were sent.
//!
//! libfabric promises order for the matching of messages with receive buffers (`FI_ORDER_SAS`), not for completions:
//! with `tcp;ofi_rxm` a message of more than 16 KB goes by rendezvous or in segments, and small ones behind it complete
//! before it. So messages are numbered, and what comes early waits.

use std::collections::BTreeMap;

use super::wire::Header;

/// Messages that may wait for one before them. Far fewer than half of all numbers, so that early ones and late ones
/// are told apart.
const MAX_EARLY: usize = 4096;

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
#[derive(Default)]
pub struct Turns {
    expected: u16,
    early: BTreeMap<u16, (Header, Vec<u8>)>,
}

impl Turns {
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
        if self.early.len() >= MAX_EARLY {
            return Arrival::TooMany;
        }
        self.early.insert(header.number, (header, payload.to_vec()));
        Arrival::Early
    }

    /// The message whose turn it is, if it came early.
    pub fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        let message = self.early.remove(&self.expected)?;
        self.expected = self.expected.wrapping_add(1);
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
            let mut turns = Turns { expected: start, ..Turns::default() };
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
        }
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut turns = Turns::default();
        for number in 1..=MAX_EARLY as u16 {
            assert_eq!(turns.arrived(message(number), &[]), Arrival::Early);
        }
        let next = MAX_EARLY as u16 + 1;
        assert_eq!(turns.arrived(message(next), &[]), Arrival::TooMany);
    }
}

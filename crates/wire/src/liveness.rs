//! Who answers a leader, as it tells the other replicas: term of log 0, then the members' ids
//! (docs/formats.md).

use crate::codec::{DecodeError, Reader, Write};

/// Most ids in one message.
pub const MAX_MEMBERS: usize = 64;

/// Appends the term and the members that answer.
pub fn encode(term: u64, alive: &[u64], out: &mut Vec<u8>) {
    out.put_u64(term);
    alive.iter().for_each(|id| out.put_u64(*id));
}

/// Reads the term and the members that answer.
///
/// # Errors
/// Anything that [`encode`] would not write, and more than [`MAX_MEMBERS`] ids.
pub fn decode(bytes: &[u8]) -> Result<(u64, Vec<u64>), DecodeError> {
    let mut reader = Reader::new(bytes);
    let term = reader.u64()?;
    let mut alive = Vec::new();
    while reader.left() > 0 {
        if alive.len() == MAX_MEMBERS {
            return Err(DecodeError::Contradiction("members that answer"));
        }
        alive.push(reader.u64()?);
    }
    reader.finish()?;
    Ok((term, alive))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_garbage_is_refused() {
        for alive in [vec![], vec![1], vec![1, 2, u64::MAX]] {
            let mut out = Vec::new();
            encode(7, &alive, &mut out);
            assert_eq!(decode(&out), Ok((7, alive)));
            out.push(0);
            assert!(decode(&out).is_err());
        }
        assert!(decode(&[0; 7]).is_err());
        assert!(decode(&[0; 8 * (MAX_MEMBERS + 2)]).is_err());
    }
}

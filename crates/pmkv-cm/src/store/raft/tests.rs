//! Bytes from other replicas, and from a memory that was damaged: what was written comes back, and
//! nothing else does any harm or takes up more memory than it has bytes.

use cyclone_pmem::Region;
use cyclone_wire::ring::crc32c_of;
use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::*;

fn record(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..most)
}

fn key() -> impl Strategy<Value = Key> {
    prop::sample::select(&Key::ALL[..])
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        key().prop_map(Request::Get),
        (key(), any::<u64>(), record(400)).prop_map(|(key, expected, value)| Request::Swap {
            key,
            expected,
            value,
        }),
    ]
}

fn state() -> impl Strategy<Value = State> {
    let records = prop::array::uniform2((any::<u64>(), record(400)));
    (any::<u64>(), any::<(u64, u64)>(), any::<u64>(), records).prop_map(
        |(sequence, applied, last, values)| {
            let mut records = Records::at(last);
            for (key, (revision, value)) in Key::ALL.into_iter().zip(values) {
                let revision = revision % last.max(1);
                if revision > 0 {
                    records.put(key, Record { revision, value });
                }
            }
            State {
                sequence,
                applied,
                records,
            }
        },
    )
}

/// Damage: bits flipped, bytes put in, cut off.
fn damaged(mut bytes: Vec<u8>, damage: &[(prop::sample::Index, u8, u8)]) -> Vec<u8> {
    for (at, how, what) in damage {
        let at = at.index(bytes.len() + 1);
        match how % 3 {
            0 if at < bytes.len() => bytes[at] ^= (*what).max(1),
            1 => bytes.insert(at, *what),
            _ => bytes.truncate(at),
        }
    }
    bytes
}

fn damage() -> impl Strategy<Value = Vec<(prop::sample::Index, u8, u8)>> {
    prop::collection::vec(any::<(prop::sample::Index, u8, u8)>(), 1..4)
}

/// The same body under a right checksum: how far the decoder itself may be trusted.
fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len().saturating_sub(4));
    let sum = crc32c_of(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

fn check_state(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(state) = State::decode(bytes) {
        let held: usize = Key::ALL.map(|key| state.records.get(key).value.capacity())[..]
            .iter()
            .sum();
        prop_assert!(held <= bytes.len());
        prop_assert_eq!(state.encode(), bytes);
    }
    Ok(())
}

fn check_request(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(request) = decode_request(bytes) {
        if let Request::Swap { value, .. } = &request {
            prop_assert!(value.capacity() <= bytes.len());
        }
        prop_assert_eq!(encode_request(&request), bytes);
    }
    Ok(())
}

proptest! {
    #[test]
    fn states_and_requests_come_back(state in state(), request in request()) {
        let bytes = state.encode();
        let again = State::decode(&bytes).expect("a state");
        prop_assert_eq!((again.sequence, again.applied), (state.sequence, state.applied));
        prop_assert_eq!(again.encode(), bytes);
        prop_assert_eq!(decode_request(&encode_request(&request)), Ok(request));
    }

    #[test]
    fn any_bytes_do_no_harm(bytes in record(300), kind in 0u8..6) {
        check_state(&bytes)?;
        check_request(&bytes)?;
        let mut framed = vec![1, kind];
        framed.extend_from_slice(&bytes);
        framed.extend_from_slice(&[0; 4]);
        let framed = summed(framed);
        check_state(&framed)?;
        check_request(&framed)?;
    }

    #[test]
    fn damaged_ones_are_refused(state in state(), request in request(), damage in damage()) {
        for whole in [state.encode(), encode_request(&request)] {
            let bytes = damaged(whole.clone(), &damage);
            // Two flips may undo each other.
            if bytes != whole {
                prop_assert!(State::decode(&bytes).is_err());
                prop_assert!(decode_request(&bytes).is_err());
            }
            let bytes = summed(bytes);
            check_state(&bytes)?;
            check_request(&bytes)?;
        }
    }
}

/// A length that is not there: nothing is set aside for it.
#[test]
fn a_record_longer_than_its_bytes_is_refused() {
    let claim = |len: u32| {
        let mut bytes = vec![1, 4, 1, 0];
        bytes.put_u64(7);
        bytes.put_u32(len);
        bytes.extend_from_slice(&[0; 4]);
        summed(bytes)
    };
    assert!(decode_request(&claim(0)).is_ok());
    for len in [1, MAX_RECORD as u32, u32::MAX] {
        assert!(decode_request(&claim(len)).is_err(), "{len:?}");
    }
    let swap = |len| Request::Swap {
        key: Key::LeaderRecord,
        expected: 1,
        value: vec![7; len],
    };
    assert!(decode_request(&encode_request(&swap(MAX_RECORD))).is_ok());
    // The log takes a little more than a record; a state with it could not be read again.
    assert!(decode_request(&encode_request(&swap(MAX_RECORD + 1))).is_err());
}

/// A replica that hears anything goes on.
#[test]
fn messages_of_any_bytes_do_no_harm() {
    let (region, _sim) = Region::simulated(MIN_AREA_BYTES).expect("memory");
    let area = region.take(0, MIN_AREA_BYTES).expect("all of it");
    let options = RaftOptions {
        id: 1,
        replicas: vec![1, 2, 3],
        tick_us: 1000,
        patience_us: 100_000,
        seed: 3,
    };
    let mut store = RaftStore::create(area, options).expect("a replica");
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut said: Vec<Vec<u8>> = Vec::new();
    let mut now_us = 0;
    for round in 0..2000 {
        now_us += 500;
        store.poll(now_us, &mut Vec::new());
        let own = store.take_messages().map(|(_, bytes)| bytes);
        said.extend(own.filter(|bytes| bytes.len() < 4096));
        let tree = (any::<prop::sample::Index>(), damage(), record(200)).new_tree(&mut runner);
        let (which, damage, any) = tree.expect("a value").current();
        let bytes = match said.is_empty() || round % 4 == 0 {
            true => [&[[STATE, envelope::RAFT, 0][round % 3]], &any[..]].concat(),
            false => damaged(said[which.index(said.len())].clone(), &damage),
        };
        store.receive(&bytes);
    }
    assert!(!store.has_failed());
}

//! Messages, back-pressure and ends.

use cyclone_fabric::{Access, Event, FabricError, Operation, WriteOrder};

use crate::group::{Group, pattern};

pub fn messages_arrive_in_order_and_are_answered(group: &mut Group) {
    let on = group.connect(0, 1);
    let is_ordered = group.endpoints[0].capabilities().write_order == WriteOrder::Posted;
    for number in 0..30u8 {
        let bytes = pattern(usize::from(number) * 10 + 1, number);
        group.post(0, on, Operation::Send { bytes: &bytes }, 100);
        if !is_ordered {
            group.outcome(0, 100).expect("sent");
        }
    }
    for number in 0..30u8 {
        let (from, bytes) = group.until(1, |event| match event {
            Event::Received { connection, bytes } => Some((*connection, bytes.clone())),
            _ => None,
        });
        assert_eq!(bytes, pattern(usize::from(number) * 10 + 1, number));
        let answer = [number];
        group.post(1, from, Operation::Send { bytes: &answer }, 200);
        group.outcome(1, 200).expect("answered");
        let answer = group.until(0, |event| match event {
            Event::Received { connection, bytes } => {
                assert_eq!(*connection, on);
                Some(bytes.clone())
            }
            _ => None,
        });
        assert_eq!(answer, [number]);
    }
}

pub fn a_full_queue_says_busy_and_recovers(group: &mut Group) {
    let key = group.register(1, Access::ALL);
    let on = group.connect(0, 1);
    let bytes = pattern(4096, 1);
    let write = Operation::Write {
        key: &key,
        offset: 0,
        bytes: &bytes,
    };
    let mut posted = 0u64;
    // A provider that does everything at once may never be busy; its events are then not unbounded
    // either.
    while posted < 5_000 {
        match group.endpoints[0].post(on, write, posted) {
            Ok(()) => posted += 1,
            Err(FabricError::Busy) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(posted > 0);
    for context in 0..posted {
        group.outcome(0, context).expect("write");
    }
    group.perform(0, on, write).expect("there is room again");
}

pub fn a_disconnect_is_noticed(group: &mut Group) {
    let on = group.connect(0, 1);
    group.post(0, on, Operation::Send { bytes: b"hello" }, 1);
    group.outcome(0, 1).expect("sent");
    let peer = group.until(1, |event| match event {
        Event::Received { connection, .. } => Some(*connection),
        _ => None,
    });
    group.endpoints[0].disconnect(on);
    group.until(1, |event| match event {
        Event::Disconnected { connection } if *connection == peer => Some(()),
        _ => None,
    });
    let gone = group.endpoints[0].post(on, Operation::Send { bytes: b"?" }, 2);
    assert!(matches!(gone, Err(FabricError::Unknown(_))), "{gone:?}");
}

use super::*;

fn limits() -> Limits {
    Limits {
        max_message: 4096,
        held_bytes: 8192,
        per_association: 4,
        timeout_us: 1000,
    }
}

fn header(assoc: u64, first: u64, index: u16, count: u16, total: u32) -> DataHeader {
    DataHeader {
        assoc,
        seq: first + u64::from(index),
        total,
        index,
        count,
    }
}

fn piece(byte: u8, len: usize) -> Payload {
    Payload::from_vec(vec![byte; len])
}

#[test]
fn pieces_in_any_order_make_the_message() {
    let mut r = Reassembler::new(limits(), 2048);
    for index in [2u16, 0] {
        let kept = r.add(
            0,
            &header(1, 7, index, 3, 700),
            true,
            piece(index as u8, if index == 2 { 100 } else { 300 }),
        );
        assert!(matches!(kept, Outcome::Kept));
    }
    let Outcome::Whole(payload) = r.add(0, &header(1, 7, 1, 3, 700), true, piece(1, 300)) else {
        panic!("not whole")
    };
    assert_eq!(
        payload.to_vec(),
        [vec![0; 300], vec![1; 300], vec![2; 100]].concat()
    );
    assert!(r.is_empty() && r.held_bytes == 0);
}

#[test]
fn fragments_that_contradict_each_other_are_refused() {
    let mut r = Reassembler::new(limits(), 2048);
    assert!(matches!(
        r.add(0, &header(1, 7, 0, 3, 700), true, piece(0, 300)),
        Outcome::Kept
    ));
    for bad in [
        header(1, 7, 1, 3, 800),
        header(1, 7, 1, 2, 700),
        header(1, 7, 0, 3, 700),
    ] {
        assert!(matches!(
            r.add(0, &bad, true, piece(0, 300)),
            Outcome::Refused
        ));
    }
    let too_long = piece(0, 600);
    assert!(matches!(
        r.add(0, &header(1, 7, 1, 3, 700), true, too_long),
        Outcome::Refused
    ));
    // Lengths that do not add up.
    for (bad, len) in [
        (header(1, 7, 1, 3, 700), 290),
        (header(1, 7, 2, 3, 700), 50),
        (header(1, 8, 1, 4, 900), 300),
        (header(1, 8, 3, 4, 900), 200),
        (header(1, 8, 1, 2, 900), 900),
        (header(1, 8, 0, 1, 900), 900),
    ] {
        let refused = r.add(0, &bad, true, piece(0, len));
        assert!(matches!(refused, Outcome::Refused), "{bad:?} {len}");
    }
    for (index, len) in [(2, 100), (1, 300)] {
        let _ = r.add(0, &header(1, 7, index, 3, 700), true, piece(0, len));
    }
    assert!(r.is_empty() && r.held_bytes == 0);
    // More than the largest message, or absurdly many pieces.
    assert!(matches!(
        r.add(0, &header(1, 9, 0, 3, 5000), true, piece(0, 300)),
        Outcome::Refused
    ));
    assert!(matches!(
        r.add(0, &header(1, 9, 0, 900, 4000), true, piece(0, 300)),
        Outcome::Refused
    ));
}

#[test]
fn memory_is_bounded_and_clients_cannot_push_out_nodes() {
    let mut r = Reassembler::new(limits(), 2048);
    assert!(matches!(
        r.add(0, &header(1, 0, 0, 2, 4000), true, piece(0, 3000)),
        Outcome::Kept
    ));
    for i in 0..100 {
        let _ = r.add(1 + i, &header(2, i * 10, 0, 2, 4000), false, piece(0, 3000));
        assert!(r.held_bytes <= 8192 && r.len() <= 5);
    }
    assert!(matches!(
        r.add(200, &header(1, 0, 1, 2, 4000), true, piece(0, 1000)),
        Outcome::Whole(_)
    ));
    r.expire(5000);
    assert!(r.is_empty() && r.held_bytes == 0 && r.dropped() > 90);
}

#[test]
fn those_behind_a_later_one_go_first_and_an_association_takes_its_messages_along() {
    let mut r = Reassembler::new(limits(), 2048);
    let mut begin = |now_us, assoc, first| {
        let kept = r.add(
            now_us,
            &header(assoc, first, 0, 2, 600),
            false,
            piece(0, 300),
        );
        assert!(matches!(kept, Outcome::Kept));
        let held: Vec<Key> = r.partials.keys().copied().collect();
        assert_eq!(r.ages.len(), held.len());
        held
    };
    for first in 0..4 {
        begin(10 - first, 1, 10 * first);
    }
    // The fifth of one association.
    assert_eq!(begin(20, 1, 40), [(1, 0), (1, 10), (1, 20), (1, 40)]);
    // The fifth and later of others: no room for so many.
    let mut gone = Vec::new();
    for assoc in 2..8 {
        let held = begin(20 + assoc, assoc, 0);
        for key in [(1, 20), (1, 10), (1, 0), (1, 40)] {
            if !held.contains(&key) && !gone.contains(&key) {
                gone.push(key);
            }
        }
    }
    assert_eq!(gone[..3], [(1, 20), (1, 10), (1, 0)]);
    let left = r.len();
    r.forget(7);
    assert_eq!((r.len(), r.ages.len()), (left - 1, left - 1));
    r.expire(1025);
    assert!(r.partials.keys().all(|key| *key == (6, 0)) && r.len() == 1);
    r.forget(6);
    assert!(r.ages.is_empty() && r.held_bytes == 0);
}

/// A message over a narrow way needs longer than a silent one is kept: it was dropped, sent again,
/// and dropped again.
#[test]
fn a_message_that_goes_on_coming_is_kept_for_a_limited_time() {
    let mut r = Reassembler::new(limits(), 2048);
    for index in 0..4u16 {
        let now_us = 600 * u64::from(index);
        let kept = r.add(now_us, &header(1, 0, index, 5, 1500), true, piece(0, 300));
        assert!(matches!(kept, Outcome::Kept));
        r.expire(now_us + 599);
    }
    let whole = r.add(2400, &header(1, 0, 4, 5, 1500), true, piece(0, 300));
    assert!(matches!(whole, Outcome::Whole(_)));

    // One that has stopped goes, before others that began earlier and go on.
    let mut add = |now_us, assoc, index| {
        let header = header(assoc, 0, index, 13, 3900);
        assert!(matches!(
            r.add(now_us, &header, true, piece(0, 300)),
            Outcome::Kept
        ));
        r.expire(now_us);
        r.partials.keys().map(|key| key.0).collect::<Vec<u64>>()
    };
    add(0, 1, 0);
    add(100, 2, 0);
    add(900, 1, 1);
    assert_eq!(add(1100, 1, 2), [1]);
    // However steadily it comes, there is an end.
    let steadily = |r: &mut Reassembler, index: u16| {
        let now_us = 999 * u64::from(index);
        r.expire(now_us);
        r.add(
            now_us,
            &header(4, 0, index, 40, 12_000),
            true,
            piece(0, 300),
        )
    };
    let mut r = Reassembler::new(
        Limits {
            max_message: 1 << 20,
            held_bytes: 1 << 20,
            ..limits()
        },
        2048,
    );
    for index in 0..30 {
        assert!(matches!(steadily(&mut r, index), Outcome::Kept));
    }
    assert_eq!((r.len(), r.dropped()), (1, 0));
    r.expire(MAX_AGE_FACTOR * 1000);
    assert_eq!((r.len(), r.dropped()), (0, 1));
}

/// Clients that upload in turn: each sends a part of its message, then the next one does; a client
/// that has sent all begins anew.
struct Crowd {
    room: Reassembler,
    clients: u64,
    now_us: u64,
    turn: u64,
}

const CROWD_COUNT: u16 = 28;
const CROWD_TURN: u16 = 7;
const CROWD_PIECE: usize = 1024;

impl Crowd {
    /// With room for some 18 messages.
    fn new(clients: u64) -> Crowd {
        let message = usize::from(CROWD_COUNT) * (CROWD_PIECE + 256);
        let limits = Limits {
            max_message: 64 << 10,
            held_bytes: 18 * message,
            per_association: 64,
            timeout_us: 1_000_000,
        };
        Crowd {
            room: Reassembler::new(limits, 2048),
            clients,
            now_us: 0,
            turn: 0,
        }
    }

    fn add(&mut self, client: u64, first: u64, index: u16, from_node: bool) -> Outcome {
        let total = usize::from(CROWD_COUNT) * CROWD_PIECE;
        let header = header(client, first, index, CROWD_COUNT, total as u32);
        self.room
            .add(self.now_us, &header, from_node, piece(1, CROWD_PIECE))
    }

    /// A turn of each, `late` of which are behind the others by as many turns as their number says,
    /// and so many µs for each: how many messages became whole.
    fn round(&mut self, late: bool, each_us: u64) -> usize {
        let turns = u64::from(CROWD_COUNT / CROWD_TURN);
        let mut whole = 0;
        for client in 1..=self.clients {
            let turn = self.turn + if late { client } else { 0 };
            let (first, part) = (turn / turns * 100, (turn % turns) as u16 * CROWD_TURN);
            for index in part..part + CROWD_TURN {
                let outcome = self.add(client, first, index, false);
                whole += usize::from(matches!(outcome, Outcome::Whole(_)));
            }
            self.now_us += each_us;
            if self.now_us % 250_000 < each_us {
                self.room.expire(self.now_us);
            }
        }
        self.turn += 1;
        whole
    }
}

/// Each pushed the others out, the oldest first, which was nearest its end: of 64 in turn none ever
/// became whole.
#[test]
fn of_many_clients_that_upload_at_once_some_get_through_all_the_time() {
    for clients in [24, 48, 64, 1000] {
        for late in [false, true] {
            // A round of theirs in no time, or in half a second.
            for each_us in [1, 500_000 / clients] {
                let mut crowd = Crowd::new(clients);
                let mut whole = Vec::new();
                for _ in 0..6 {
                    whole.push((0..4).map(|_| crowd.round(late, each_us)).sum::<usize>());
                }
                let least = whole[1..].iter().min().expect("some rounds");
                assert!(*least >= 12, "{clients} {late} {each_us}: {whole:?}");
            }
        }
    }
}

#[test]
fn clients_that_are_silent_make_room_for_those_that_go_on() {
    let mut crowd = Crowd::new(20);
    // Most of the room is held by messages that nothing more comes of.
    for client in 1001..1013 {
        for index in 0..CROWD_COUNT - 1 {
            let kept = crowd.add(client, 0, index, false);
            assert!(matches!(kept, Outcome::Kept));
        }
    }
    let mut whole = 0;
    while whole < 20 {
        assert!(crowd.now_us < 900_000, "of 20 only {whole} get through");
        whole = (0..4).map(|_| crowd.round(true, 500)).sum();
    }
    // No message was dropped for a pause alone.
    let silent_us = crowd.room.limits.timeout_us / SILENCE_DIVISOR;
    assert!(crowd.now_us > silent_us, "{} µs", crowd.now_us);
}

/// The fragment that ends the silence is not what ends the message.
#[test]
fn a_message_that_comes_again_after_a_silence_stays() {
    let mut crowd = Crowd::new(0);
    let late = CROWD_COUNT / 2;
    for index in 0..late {
        crowd.add(1, 0, index, false);
    }
    for message in 0..60 {
        for index in 0..CROWD_COUNT {
            crowd.add(2, message * 100, index, false);
        }
    }
    crowd.now_us += 200_000;
    // Others take all the room there is.
    let limit = crowd.room.limits.held_bytes;
    let (mut before, mut cost) = (crowd.room.held_bytes(), 0);
    for (client, index) in (10..40).flat_map(|n| (0..CROWD_COUNT - 1).map(move |i| (n, i))) {
        if before + cost > limit {
            break;
        }
        crowd.add(client, 0, index, false);
        cost = cost.max(crowd.room.held_bytes() - before);
        before = crowd.room.held_bytes();
    }
    assert_eq!(crowd.room.dropped(), 0);
    for index in late..CROWD_COUNT - 1 {
        let kept = crowd.add(1, 0, index, false);
        assert!(matches!(kept, Outcome::Kept));
    }
    let whole = crowd.add(1, 0, CROWD_COUNT - 1, false);
    assert!(matches!(whole, Outcome::Whole(_)));
    assert!(crowd.room.dropped() > 0, "room was wanting");
}

#[test]
fn what_is_left_of_a_message_that_went_takes_no_room_from_others() {
    let mut crowd = Crowd::new(0);
    // Eighteen begin, one has all but its last fragment: the last to begin has to go for it.
    for part in [0..1, 1..CROWD_COUNT - 1] {
        for client in 1..=18 {
            for index in part.clone() {
                crowd.add(client, 0, index, false);
            }
        }
    }
    let held = crowd.room.held_bytes();
    let fill = |crowd: &mut Crowd, client| {
        let outcomes = (0..CROWD_COUNT).map(|index| crowd.add(client, 0, index, false));
        outcomes.filter(|it| matches!(it, Outcome::Kept)).count()
    };
    let mut kept = 0;
    for client in 30..60 {
        kept += fill(&mut crowd, client);
    }
    assert!(kept > 0, "there was room for some, {held} bytes were held");
    // Rests come and find no room, or have to make room for clients that began before.
    for client in 60..90 {
        for index in 1..CROWD_COUNT {
            crowd.add(client, 0, index, false);
        }
    }
    for client in 1..=18 {
        let whole = crowd.add(client, 0, CROWD_COUNT - 1, false);
        assert!(matches!(whole, Outcome::Whole(_)), "{client}");
    }
    // One that comes with its beginning last is whole all the same where there is room.
    let mut r = Reassembler::new(limits(), 2048);
    for (index, len) in [(2, 100), (1, 300)] {
        let kept = r.add(0, &header(9, 7, index, 3, 700), false, piece(0, len));
        assert!(matches!(kept, Outcome::Kept));
    }
    let whole = r.add(0, &header(9, 7, 0, 3, 700), false, piece(0, 300));
    assert!(matches!(whole, Outcome::Whole(_)));
}

/// Sixty-four messages of one client that go on drop by drop would hold all the room for half a
/// minute.
#[test]
fn a_client_that_dribbles_holds_no_more_than_a_message_where_others_want_room() {
    let mut crowd = Crowd::new(15);
    let mut whole = 0;
    let mut drip = 0;
    for _ in 0..400 {
        // By the dribbling one: another piece of each of its messages.
        for message in 0..64 {
            crowd.add(2000, message * 100, drip % (CROWD_COUNT - 1), false);
        }
        drip += u16::from(crowd.turn.is_multiple_of(16));
        whole += crowd.round(true, 10_000);
    }
    assert!(whole > 15 * 90, "{whole} of {} messages", 15 * 100);
}

#[test]
fn nodes_take_room_from_clients_whatever_their_age() {
    let mut crowd = Crowd::new(0);
    for client in 1..=18 {
        for index in 0..CROWD_COUNT - 1 {
            crowd.add(client, 0, index, false);
        }
    }
    crowd.now_us += 1;
    for node in 101..=110 {
        for index in 0..CROWD_COUNT {
            let outcome = crowd.add(node, 0, index, true);
            assert!(!matches!(outcome, Outcome::NoRoom | Outcome::Refused));
        }
    }
    // The oldest stay of the clients'.
    let whole = |crowd: &mut Crowd, client| {
        let outcome = crowd.add(client, 0, CROWD_COUNT - 1, false);
        matches!(outcome, Outcome::Whole(_))
    };
    assert!(whole(&mut crowd, 1));
}

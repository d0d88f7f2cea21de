//! CPU time of the client's state machine per request, with 256 requests in flight and without
//! packets. HACKING.md says how to run it.

use std::time::{Duration, Instant};

use cyclone_client::{ClientCore, CoreConfig};
use cyclone_wire::client::{Status, put_response, requests};
use cyclone_wire::command::Operation;
use cyclone_wire::envelope;
use cyclone_wire::reply::Reply;

const ROUNDS: u32 = 10_000;
const IN_FLIGHT: u32 = 256;
/// The session that the cluster opens for the client.
const SESSION: i64 = 1;

/// What the leader answers: every request of the message is done.
fn answer(message: &[u8], reply: &Reply) -> Vec<u8> {
    let body = &message[1..];
    let mut walk = requests(body.len());
    let mut answer = vec![envelope::CLIENT_RESPONSE];
    while let Some(request) = walk.next(body) {
        let (id, _) = request.expect("a request");
        put_response(&mut answer, id, &Status::Done(reply.clone()));
    }
    answer
}

fn submit(core: &mut ClientCore, now_us: u64, key: u32) {
    let (key, value) = (key.to_be_bytes(), [7; 100]);
    let operation = Operation::Append {
        key: &key,
        value: &value,
    };
    core.submit(now_us, &operation);
}

fn main() {
    let nodes = vec![(1, "10.0.0.1:7000".to_owned())];
    let mut core = ClientCore::new(nodes, CoreConfig::default());
    let mut now_us = 1_000_000;
    let mut out = Vec::new();
    // The first request opens the session.
    submit(&mut core, now_us, 0);
    for reply in [Reply::Int(SESSION), Reply::Ok] {
        core.transmit(now_us, &mut out);
        assert_eq!(out.len(), 1, "a message to the only node");
        for (node, message) in out.drain(..) {
            now_us += 50;
            core.on_message(now_us, node, &answer(&message, &reply));
        }
    }
    assert_eq!(core.completions().count(), 1);

    let (mut busy, mut done) = (Duration::ZERO, 0);
    for round in 0..ROUNDS {
        let begun = Instant::now();
        for n in 0..IN_FLIGHT {
            submit(&mut core, now_us, round * IN_FLIGHT + n);
        }
        core.transmit(now_us, &mut out);
        busy += begun.elapsed();
        let mut answers = Vec::new();
        for (node, message) in out.drain(..) {
            answers.push((node, answer(&message, &Reply::Ok)));
            core.recycle(message);
        }
        now_us += 500;
        let begun = Instant::now();
        for (node, answer) in answers {
            core.on_message(now_us, node, &answer);
        }
        done += core
            .completions()
            .filter(|(_, it)| *it == Ok(Reply::Ok))
            .count() as u32;
        busy += begun.elapsed();
    }
    assert_eq!(done, ROUNDS * IN_FLIGHT);
    println!("{:?} per request", busy / done);
}

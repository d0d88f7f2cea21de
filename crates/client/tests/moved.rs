//! A member that has moved: the others name its new address, and the client asks it there.

mod fake;

use std::net::SocketAddr;

use cyclone_client::{ClientConfig, ClientCore, ClientError, CoreConfig, StepClient};
use cyclone_packet::door::port_of;
use cyclone_packet::{Faults, Identity, Keys, MemNet, Outgoing, Port, PortConfig};
use cyclone_pmem::{Pool, Region};
use cyclone_wire::client::{Status, put_response};
use cyclone_wire::command::{Operation, Query};
use cyclone_wire::envelope;
use cyclone_wire::reply::Reply;
use fake::{Cluster, Mood, parse};

const CLIENT_KEY: [u8; 32] = [7; 32];
const FRAME_BYTES: u32 = 2048;
const FRAMES: u64 = 256;

fn pool() -> Pool {
    let region = Region::anonymous(FRAMES * u64::from(FRAME_BYTES)).unwrap();
    Pool::new(region.take(0, region.len()).unwrap(), FRAME_BYTES)
}

struct Door {
    port: Port,
    /// Messages that came in here.
    taken: usize,
}

/// A member with its own port and that of its only log.
struct Member {
    id: u64,
    doors: Vec<Door>,
}

impl Member {
    /// `boot`: another one for every member that starts.
    fn start(net: &MemNet, id: u64, address: &str, boot: u8) -> Member {
        let address: SocketAddr = address.parse().unwrap();
        let door = |number: u16| {
            let at = SocketAddr::new(address.ip(), address.port() + number);
            let keys = Keys {
                node: Some([9; 32]),
                client: CLIENT_KEY,
            };
            let identity = Identity::Node(port_of(id, number));
            let config = PortConfig::new(identity, keys, [boot + number as u8; 16]);
            let driver = Box::new(net.driver(at, 1500));
            let port = Port::new(driver, pool(), config).unwrap();
            Door { port, taken: 0 }
        };
        let doors = vec![door(0), door(1)];
        Member { id, doors }
    }

    fn step(&mut self, now_us: u64, cluster: &mut Cluster) {
        let mut inbox = Vec::new();
        for door in &mut self.doors {
            while door.port.poll(now_us, &mut inbox).unwrap() > 0 {}
            for message in inbox.drain(..) {
                door.taken += 1;
                let body = message.body.to_vec();
                let answer = cluster.receive(self.id, &body, || Mood::Executes);
                door.port
                    .send(
                        now_us,
                        &[Outgoing {
                            to: message.from,
                            parts: &[&answer],
                        }],
                    )
                    .unwrap();
            }
        }
    }
}

struct Stage {
    client: StepClient,
    members: Vec<Member>,
    cluster: Cluster,
    now_us: u64,
}

impl Stage {
    /// Adds 1 and answers what came of it, and how long that took in microseconds.
    fn incr(&mut self) -> (Result<Reply, ClientError>, u64) {
        let began_us = self.now_us;
        let operation = Operation::IncrBy {
            key: b"n",
            delta: 1,
        };
        self.client.core.submit(self.now_us, &operation);
        loop {
            self.client.step(self.now_us).unwrap();
            for member in &mut self.members {
                member.step(self.now_us, &mut self.cluster);
            }
            let done = self.client.core.completions().next();
            if let Some((_, outcome)) = done {
                return (outcome, self.now_us - began_us);
            }
            self.now_us += 100;
        }
    }
}

#[test]
fn a_member_that_has_moved_is_asked_at_its_new_address() {
    // Story: the client had asked member 3 at its first address. It moved and led there; the others
    // said so, and the client went on asking at the old one.
    let net = MemNet::new(1, Faults::default());
    let first = |id: u64| format!("10.0.0.{id}:7000");
    let start = |id: u64| Member::start(&net, id, &first(id), 10 * id as u8);
    let nodes = (1..=3).map(|id| (id, first(id).parse().unwrap())).collect();
    let mut config = ClientConfig::new(nodes, CLIENT_KEY);
    config.core.log_ports = 1;
    let driver = Box::new(net.driver("10.0.1.1:5000".parse().unwrap(), 1500));
    let mut stage = Stage {
        client: StepClient::over(driver, pool(), [1; 16], config).unwrap(),
        members: (1..=3).map(start).collect(),
        cluster: Cluster::new(),
        now_us: 1_000_000,
    };
    stage.cluster.lead(3);
    assert_eq!(stage.incr().0, Ok(Reply::Int(1)));
    assert_eq!(stage.incr().0, Ok(Reply::Int(2)));
    assert!(stage.members[2].doors.iter().all(|door| door.taken > 0));
    stage.cluster.lead(1);
    assert_eq!(stage.incr().0, Ok(Reply::Int(3)));
    // It stops, is moved, starts, and leads later.
    stage.members[2] = Member::start(&net, 3, "10.0.0.33:7000", 70);
    let moved = "10.0.0.33:7000".to_owned();
    stage.cluster.moved.insert(3, moved);
    assert_eq!(stage.incr().0, Ok(Reply::Int(4)));
    stage.cluster.lead(3);
    let (outcome, took_us) = stage.incr();
    assert_eq!(outcome, Ok(Reply::Int(5)));
    assert!(took_us < 100_000, "{took_us} µs");
    // The port of its log has moved with it. What is sent there first finds no association, and
    // nothing is for a second.
    assert_eq!(stage.incr().0, Ok(Reply::Int(6)));
    stage.now_us += 1_100_000;
    assert_eq!(stage.incr().0, Ok(Reply::Int(7)));
    assert!(stage.members[2].doors.iter().all(|door| door.taken > 0));
}

#[test]
fn a_dead_member_named_at_two_addresses_does_not_hide_the_next_leader() {
    let nodes = (1..=3)
        .map(|id| (id, format!("10.0.0.{id}:7000")))
        .collect();
    let mut core = ClientCore::new(nodes, CoreConfig::default());
    core.submit_query(0, &Query::Get { key: b"n" }, false);
    let (mut sent, mut out) = (0, Vec::new());
    for now_us in (0..1_100_000).step_by(100) {
        core.transmit(now_us, &mut out);
        sent += out.len();
        for (node, message) in out.drain(..) {
            let status = match node {
                // Dead, and each of the others has its own idea of where it is.
                3 => continue,
                2 if now_us >= 1_000_000 => Status::Done(Reply::Nil),
                _ => Status::NotLeader {
                    leader: Some((3, format!("10.0.0.3{node}:7000"))),
                },
            };
            let mut answer = vec![envelope::CLIENT_RESPONSE];
            for (id, _) in parse(&message) {
                put_response(&mut answer, id, &status);
            }
            core.on_message(now_us, node, &answer);
        }
        assert!(core.learned().count() <= 1);
    }
    let done: Vec<_> = core.completions().map(|(_, outcome)| outcome).collect();
    assert_eq!(done, [Ok(Reply::Nil)]);
    assert!(sent < 300, "{sent} messages in a second");
}

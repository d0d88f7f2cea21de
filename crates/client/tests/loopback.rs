//! The blocking client over real sockets, against nodes that are only a port and the fake cluster.

mod fake;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cyclone_client::{Client, ClientConfig, ClientError, NotDone};
use cyclone_packet::{Identity, Keys, Outgoing, Port, PortConfig, Security, UdpDriver, UdpOptions};
use cyclone_pmem::{Pool, Region};
use cyclone_wire::command::Operation;
use cyclone_wire::reply::Reply;
use fake::{Cluster, Mood};

const CLIENT_KEY: [u8; 32] = [7; 32];

struct Nodes {
    cluster: Arc<Mutex<Cluster>>,
    addresses: Vec<(u64, SocketAddr)>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Nodes {
    fn start(security: Security) -> Nodes {
        let cluster = Arc::new(Mutex::new(Cluster::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (mut addresses, mut threads) = (Vec::new(), Vec::new());
        for id in 1..=3 {
            let region = Region::anonymous(256 * 9216).unwrap();
            let pool = Pool::new(region.take(0, region.len()).unwrap(), 9216);
            let any = (Ipv4Addr::LOCALHOST, 0).into();
            let driver = UdpDriver::bind(any, &pool, UdpOptions::default()).unwrap();
            let keys = Keys {
                node: Some([9; 32]),
                client: CLIENT_KEY,
            };
            let mut config = PortConfig::new(Identity::Node(id), keys, [id as u8; 16]);
            config.security = security;
            let mut port = Port::new(Box::new(driver), pool, config).unwrap();
            addresses.push((id, port.local_addr()));
            let (cluster, stop) = (Arc::clone(&cluster), Arc::clone(&stop));
            threads.push(std::thread::spawn(move || {
                let (begun, mut inbox) = (Instant::now(), Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    port.wait(Duration::from_millis(5)).unwrap();
                    let now_us = begun.elapsed().as_micros() as u64;
                    while port.poll(now_us, &mut inbox).unwrap() > 0 {}
                    for message in inbox.drain(..) {
                        let body = message.body.to_vec();
                        let answer = cluster
                            .lock()
                            .unwrap()
                            .receive(id, &body, || Mood::Executes);
                        port.send(
                            now_us,
                            &[Outgoing {
                                to: message.from,
                                parts: &[&answer],
                            }],
                        )
                        .unwrap();
                    }
                }
            }));
        }
        Nodes {
            cluster,
            addresses,
            stop,
            threads,
        }
    }

    fn client(&self, security: Security) -> Client {
        let mut config = ClientConfig::new(self.addresses.clone(), CLIENT_KEY);
        config.security = security;
        Client::connect(config).unwrap()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads
            .drain(..)
            .for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn calls_and_pipelines_mix_and_survive_a_leader_change() {
    for security in [Security::Authenticated, Security::Encrypted] {
        let nodes = Nodes::start(security);
        let mut client = nodes.client(security);
        client.put(b"k", &vec![b'v'; 1 << 20]).unwrap();
        assert_eq!(client.incr(b"n", 1), Ok(1));
        let waiting: Vec<u64> = (0..500)
            .map(|_| {
                client.submit(&Operation::IncrBy {
                    key: b"n",
                    delta: 1,
                })
            })
            .collect();
        nodes.cluster.lock().unwrap().lead(3);
        // A blocking call must not swallow the others' outcomes.
        assert_eq!(client.incr(b"other", 1), Ok(1));
        let mut done = Vec::new();
        let until = Instant::now() + Duration::from_secs(10);
        while done.len() < waiting.len() && Instant::now() < until {
            client.poll(Duration::from_millis(100), &mut done).unwrap();
        }
        let mut tickets: Vec<u64> = done.iter().map(|(ticket, _)| *ticket).collect();
        tickets.sort_unstable();
        let mut expected = waiting;
        expected.sort_unstable();
        assert_eq!(tickets, expected);
        let mut counts: Vec<i64> = done
            .into_iter()
            .map(|(_, outcome)| match outcome {
                Ok(Reply::Int(count)) => count,
                other => panic!("{other:?}"),
            })
            .collect();
        counts.sort_unstable();
        assert_eq!(counts, (2..=501).collect::<Vec<i64>>());
        assert_eq!(client.pending(), 0);
    }
}

#[test]
fn a_cluster_that_does_not_answer_ends_in_time() {
    let mut config = ClientConfig::new(vec![(1, (Ipv4Addr::LOCALHOST, 9).into())], CLIENT_KEY);
    config.core.deadline_us = 300_000;
    let mut client = Client::connect(config).unwrap();
    let begun = Instant::now();
    assert_eq!(
        client.put(b"k", b"v"),
        Err(ClientError::NotDone(NotDone::NotSent))
    );
    assert_eq!(
        client.get(b"k"),
        Err(ClientError::NotDone(NotDone::NoLeader))
    );
    let took = begun.elapsed();
    assert!(
        took >= Duration::from_millis(600) && took < Duration::from_secs(3),
        "{took:?}"
    );
}

#[test]
fn a_value_beyond_the_port_is_refused_at_once() {
    let mut client = Client::connect(ClientConfig::new(
        vec![(1, (Ipv4Addr::LOCALHOST, 9).into())],
        CLIENT_KEY,
    ))
    .unwrap();
    let outcome = client.put(b"k", &vec![0; 5 << 20]);
    assert_eq!(outcome, Err(ClientError::NotDone(NotDone::TooLarge)));
}

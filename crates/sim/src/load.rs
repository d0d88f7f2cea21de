//! The clients: the real client over the simulated network, choosing operations and noting what
//! came of them.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use cyclone_client::{ClientConfig, ClientError, CoreConfig, StepClient};
use cyclone_pmem::{Pool, Region};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{self, Condition, Query};
use cyclone_wire::reply::Reply;

use crate::amplify::Amplifier;
use crate::bank::{BankState, TransferClient};
use crate::expiring::Expiring;
use crate::history::{Answer, History, Op, Operation, Outcome};
use crate::machine::{CLIENT_KEY, address};
use crate::net::Net;
use crate::plan::{Kind, Plan};
use crate::random::Random;
use crate::snapshot_scans::SnapshotScanWorkload;
use crate::weak::Weak;

/// Bytes per frame: the largest datagram.
const FRAME_BYTES: u32 = 9216;
/// Frames that all clients share.
const FRAMES: u64 = 512;

/// A client's operation in flight.
pub(crate) struct Pending {
    pub(crate) key: Vec<u8>,
    pub(crate) op: Op,
    pub(crate) invoke_us: u64,
}

/// Where a client's packets come from.
pub(crate) fn address_of(number: u64) -> SocketAddr {
    let ip = Ipv4Addr::new(
        10,
        78 + (number >> 16) as u8,
        (number >> 8) as u8,
        number as u8,
    );
    (ip, 9000).into()
}

/// The client that [`address_of`] names.
pub(crate) fn number_of(address: SocketAddr) -> u64 {
    match address {
        SocketAddr::V4(address) => u64::from(u32::from(*address.ip()).wrapping_sub(0x0a4e_0000)),
        SocketAddr::V6(_) => u64::MAX,
    }
}

/// One client.
pub struct Client {
    /// Its number, unique in the run.
    pub number: u64,
    /// Where its packets come from.
    pub address: SocketAddr,
    steps: StepClient,
    pending: BTreeMap<u64, Pending>,
    chooser: Chooser,
    /// Reads weakly instead.
    weak: Option<Weak>,
    /// Moves money instead.
    teller: Option<TransferClient>,
    /// Has keys that expire instead.
    expiring: Option<Expiring>,
    /// Carries tokens and scans instead.
    porter: Option<SnapshotScanWorkload>,
    /// Asks much instead.
    amplifier: Option<Amplifier>,
}

/// What a client wants next.
pub(crate) struct Chooser {
    number: u64,
    written: u64,
    /// Whether it never writes: a leader that receives no writes has nothing to notice its fall by.
    only_reads: bool,
    pub(crate) random: Random,
}

/// Writes of a log's volume of unknown outcome; then another one is begun. Any of them may have
/// happened at any time, so with many the checker would have to try too many orders.
const MOST_UNKNOWN: u32 = 6;

/// The keys that pieces are appended to go on under another name at times, as books do in volumes.
#[derive(Default)]
struct Volumes(BTreeMap<Vec<u8>, (u64, u32)>);

impl Volumes {
    /// The key in use for this one.
    fn current(&self, key: Vec<u8>) -> Vec<u8> {
        match self.0.get(&key) {
            Some((volume @ 1.., _)) => [&key[..], b":", volume.to_string().as_bytes()].concat(),
            _ => key,
        }
    }

    /// The outcome of a write to this key will stay unknown.
    fn doubt(&mut self, key: &[u8]) {
        let Some(number) = key.strip_prefix(b"log:") else {
            return;
        };
        let len = number.iter().position(|byte| *byte == b':');
        let first = &key[..len.map_or(key.len(), |len| b"log:".len() + len)];
        let (volume, unknown) = self.0.get(first).copied().unwrap_or_default();
        if self.current(first.to_vec()) == key {
            let next = match unknown + 1 {
                MOST_UNKNOWN => (volume + 1, 0),
                unknown => (volume, unknown),
            };
            self.0.insert(first.to_vec(), next);
        }
    }
}

/// An operation as the cluster takes it.
pub(crate) enum Request<'a> {
    Query(Query<'a>),
    Write(command::Operation<'a>),
}

/// What all clients share.
pub struct Load {
    plan: Plan,
    pool: Pool,
    net: Net,
    random: Random,
    born: u64,
    /// What every client received so far.
    pub history: History,
    /// Operations that ended with an answer.
    pub answered: u64,
    /// Where tellers move money.
    pub books: BankState,
    volumes: Volumes,
}

impl Load {
    /// No clients yet.
    pub fn new(plan: &Plan, net: &Net, random: Random) -> anyhow::Result<Load> {
        let region = Region::anonymous(FRAMES * u64::from(FRAME_BYTES))?;
        let pool = Pool::new(region.take(0, region.len())?, FRAME_BYTES);
        Ok(Load {
            plan: plan.clone(),
            pool,
            net: net.clone(),
            random,
            born: 0,
            history: History::new(),
            answered: 0,
            books: BankState::default(),
            volumes: Volumes::default(),
        })
    }

    /// Another client.
    pub fn client(&mut self) -> anyhow::Result<Client> {
        self.born += 1;
        let number = self.born;
        let mut random = self.random.fork(number);
        let from = address_of(number);
        let nodes = 1..=self.plan.nodes + self.plan.spares;
        let nodes = nodes.map(|id| (id, address(id))).collect();
        let mut config = ClientConfig::new(nodes, CLIENT_KEY);
        config.max_message = 4 * self.plan.max_value_bytes + 4096;
        config.core = CoreConfig {
            window: self.plan.most_pending.max(8),
            max_queued: 64,
            deadline_us: self.plan.election_us * random.within(2, 12),
            attempt_us: 5_000 + self.plan.heartbeat_us / 4,
            // Some know of the logs' own ports.
            log_ports: match self.plan.own_loops && number.is_multiple_of(2) {
                true => self.plan.logs,
                false => 0,
            },
            ..CoreConfig::default()
        };
        let mut boot = [0; 16];
        boot[..8].copy_from_slice(&random.draw().to_le_bytes());
        boot[8..].copy_from_slice(&random.draw().to_le_bytes());
        let driver = self.net.driver(from, None);
        let steps = StepClient::over(Box::new(driver), self.pool.clone(), boot, config)?;
        let teller = (self.plan.has(Kind::Gangs) && number.is_multiple_of(2)).then(|| {
            TransferClient::new(random.fork(number), self.plan.max_value_bytes.min(6_000))
        });
        // By number: drawn, it would change what every seed means.
        let weak = (teller.is_none() && number % 4 == 3).then(|| Weak::new(number));
        let expiring = (self.plan.expiry && number % 8 == 1)
            .then(|| Expiring::new(number, &self.plan, random.fork(number)));
        let porter = (self.plan.has(Kind::Gangs) && number % 8 == 5)
            .then(|| SnapshotScanWorkload::new(number, random.fork(number)));
        let amplifier = (teller.is_none()
            && self.plan.work_bytes > 0
            && number % 4 == 1
            && self.plan.clients <= 100)
            .then(|| Amplifier::new(number, &self.plan, random.fork(number)));
        Ok(Client {
            number,
            address: from,
            steps,
            pending: BTreeMap::new(),
            weak,
            teller,
            expiring,
            porter,
            amplifier,
            chooser: Chooser::new(number, random),
        })
    }

    /// A client gives up: its operations in flight may or may not happen.
    pub fn bury(&mut self, client: Client) {
        self.net.remove(client.address);
        if let Some(teller) = client.teller {
            teller.bury(client.number, &mut self.history, &mut self.books);
        }
        for pending in client.pending.into_values() {
            self.ended(client.number, pending, Outcome::Unknown);
        }
    }

    /// Notes what came of an operation.
    pub(crate) fn ended(&mut self, client: u64, pending: Pending, outcome: Outcome) {
        self.answered += u64::from(matches!(outcome, Outcome::Done { .. }));
        if outcome == Outcome::Unknown && !pending.op.reads_only() {
            self.volumes.doubt(&pending.key);
        }
        self.history.push(Operation {
            client,
            key: pending.key,
            op: pending.op,
            invoke_us: pending.invoke_us,
            outcome,
        });
    }

    /// Lets a client choose an operation and submit it.
    pub fn submit(&mut self, client: &mut Client, now_us: u64) {
        if let Some(teller) = &mut client.teller {
            return teller.act(self.books.current(), &mut client.steps.core, now_us);
        }
        if let Some(amplifier) = &mut client.amplifier {
            return amplifier.act(&mut client.steps.core, now_us);
        }
        if let Some(expiring) = &mut client.expiring {
            return expiring.act(&mut client.steps.core, now_us);
        }
        if let Some(porter) = &mut client.porter {
            return porter.act(&mut client.steps.core, now_us);
        }
        if let Some(weak) = &mut client.weak {
            if let Some(key) = weak.act(&mut client.steps.core, now_us) {
                client.submit(key, Op::Incr(1), now_us);
            }
            return;
        }
        let (key, op) = self.choose(&mut client.chooser);
        client.submit(key, op, now_us);
    }

    /// What a chooser wants next.
    pub(crate) fn choose(&self, chooser: &mut Chooser) -> (Vec<u8>, Op) {
        let (key, op) = chooser.choose(&self.plan);
        (self.volumes.current(key), op)
    }

    /// Moves a client on and notes outcomes. Answers how many operations ended.
    pub fn step(&mut self, client: &mut Client, now_us: u64) -> anyhow::Result<usize> {
        client.steps.step(now_us)?;
        let mut ended = 0;
        for (ticket, result) in client.steps.core.completions() {
            if let Some(teller) = &mut client.teller
                && teller.ended(
                    client.number,
                    ticket,
                    now_us,
                    &result,
                    &mut self.history,
                    &mut self.books,
                )?
            {
                self.answered += u64::from(result.is_ok());
                ended += 1;
                continue;
            }
            if let Some(weak) = &mut client.weak
                && weak.ended(ticket, &result)?
            {
                ended += 1;
                continue;
            }
            if let Some(amplifier) = &mut client.amplifier
                && amplifier.ended(ticket, &result)?
            {
                self.answered += u64::from(result.is_ok());
                ended += 1;
                continue;
            }
            if let Some(expiring) = &mut client.expiring
                && expiring.ended(ticket, now_us, &result)?
            {
                self.answered += u64::from(result.is_ok());
                ended += 1;
                continue;
            }
            if let Some(porter) = &mut client.porter
                && porter.ended(ticket, &result)?
            {
                self.answered += u64::from(result.is_ok());
                ended += 1;
                continue;
            }
            let Some(pending) = client.pending.remove(&ticket) else {
                anyhow::bail!("client {} was answered twice", client.number);
            };
            let outcome = match result {
                Ok(reply) => Outcome::Done {
                    return_us: now_us,
                    answer: answer(reply)?,
                },
                Err(ClientError::NotDone(_)) => Outcome::NotDone,
                Err(ClientError::Unknown) => Outcome::Unknown,
                Err(error) => anyhow::bail!("client {}: {error}", client.number),
            };
            self.ended(client.number, pending, outcome);
            ended += 1;
        }
        Ok(ended)
    }
}

pub(crate) fn answer(reply: Reply) -> anyhow::Result<Answer> {
    Ok(match reply {
        Reply::Ok => Answer::Ok,
        Reply::Nil => Answer::Nil,
        Reply::Int(number) => Answer::Int(number),
        Reply::Bytes(bytes) => Answer::Bytes(bytes),
        Reply::Failed(_) => Answer::Refused,
        Reply::Array(_) => anyhow::bail!("an array answers no operation of the load"),
    })
}

impl Client {
    /// Operations without an outcome.
    pub fn pending(&self) -> usize {
        let weak = self.weak.as_ref().map_or(0, Weak::pending);
        let expiring = self.expiring.as_ref().map_or(0, Expiring::pending);
        let teller = self.teller.as_ref().map_or(0, TransferClient::pending);
        let porter = self
            .porter
            .as_ref()
            .map_or(0, SnapshotScanWorkload::pending);
        let amplifier = self.amplifier.as_ref().map_or(0, Amplifier::pending);
        self.pending.len() + weak + expiring + teller + porter + amplifier
    }

    /// Whether it moves money between logs.
    pub fn is_teller(&self) -> bool {
        self.teller.is_some()
    }

    /// When it wants to be stepped again at the latest.
    pub fn next_timeout_us(&mut self) -> Option<u64> {
        self.steps.next_timeout_us()
    }

    /// The next pause between operations.
    pub fn pause_us(&mut self, plan: &Plan) -> u64 {
        self.chooser.random.wait(plan.think_us)
    }

    /// Whether the client has had enough.
    pub fn quits(&mut self, plan: &Plan) -> bool {
        self.chooser.random.chance(plan.quit)
    }

    /// Submits an operation.
    pub fn submit(&mut self, key: Vec<u8>, op: Op, now_us: u64) {
        let core = &mut self.steps.core;
        let ticket = match request(&key, &op) {
            Request::Query(query) => {
                let mode = match self.chooser.random.chance(0.1) {
                    true => ReadMode::Log,
                    // Not drawn: that would change what every seed means.
                    false if (now_us / 16).is_multiple_of(4) => ReadMode::Lease,
                    false => ReadMode::Index,
                };
                core.submit_read(now_us, &query, mode)
            }
            Request::Write(operation) => core.submit(now_us, &operation),
        };
        let pending = Pending {
            key,
            op,
            invoke_us: now_us,
        };
        self.pending.insert(ticket, pending);
    }
}

/// An operation of the history as the cluster takes it.
pub(crate) fn request<'a>(key: &'a [u8], op: &'a Op) -> Request<'a> {
    let set = |value, condition, get| command::Operation::Set {
        key,
        value,
        condition,
        get,
    };
    Request::Write(match op {
        Op::Get => return Request::Query(Query::Get { key }),
        Op::Len => return Request::Query(Query::StrLen { key }),
        Op::Set(value) => set(value, Condition::Always, false),
        Op::SetAbsent(value) => set(value, Condition::Absent, false),
        Op::GetSet(value) => set(value, Condition::Always, true),
        Op::Incr(delta) => command::Operation::IncrBy { key, delta: *delta },
        Op::Append(value) => command::Operation::Append { key, value },
        Op::Del => command::Operation::Del { keys: vec![key] },
        Op::GetDel => command::Operation::GetDel { key },
    })
}

impl Chooser {
    pub(crate) fn new(number: u64, mut random: Random) -> Chooser {
        Chooser {
            number,
            written: 0,
            only_reads: random.chance(0.4),
            random,
        }
    }

    fn value(&mut self, plan: &Plan) -> Vec<u8> {
        self.written += 1;
        let mut value = format!("{}.{}", self.number, self.written).into_bytes();
        if self.random.chance(plan.large) {
            let room = (plan.max_value_bytes - value.len()) as u64;
            let more = if self.random.chance(0.3) {
                room
            } else {
                self.random.below(room + 1)
            };
            value.resize(value.len() + more as usize, b'~');
        } else if self.random.chance(0.02) {
            value.clear();
        }
        value
    }

    /// Registers, counters and logs: keys of one kind see one kind of write, so that answers say
    /// much.
    pub(crate) fn choose(&mut self, plan: &Plan) -> (Vec<u8>, Op) {
        let number = match plan.hot && self.random.chance(0.9) {
            true => self.random.below(2.min(plan.keys)),
            false => self.random.below(plan.keys),
        };
        let register = || format!("register:{number}").into_bytes();
        let log = || format!("log:{number}").into_bytes();
        if self.only_reads || self.random.chance(plan.reads) {
            return match self.random.below(10) {
                0 => (log(), Op::Len),
                1 => (log(), Op::Get),
                _ => (register(), Op::Get),
            };
        }
        match self.random.below(12) {
            0..3 => (format!("counter:{number}").into_bytes(), Op::Incr(1)),
            // Deleted sometimes: it must not grow beyond the longest value, whose refusal the
            // checker does not know.
            3 if self.random.below(15) == 0 => (log(), Op::Del),
            3 => {
                self.written += 1;
                let piece = format!("{}.{};", self.number, self.written).into_bytes();
                (log(), Op::Append(piece))
            }
            4 => (register(), Op::Del),
            5 => (register(), Op::GetDel),
            6 => (register(), Op::SetAbsent(self.value(plan))),
            7 => (register(), Op::GetSet(self.value(plan))),
            _ => (register(), Op::Set(self.value(plan))),
        }
    }
}

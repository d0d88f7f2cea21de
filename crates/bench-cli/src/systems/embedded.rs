//! A replica inside this process, beside the load, as library users have it; the others are
//! processes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone::cluster::LocalCluster;
use cyclone::config::File;
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::{Done, Job, Lane, Lanes, Outcome, Request, lanes};
use cyclone_bench::system::{Filling, Measured, Running};
use cyclone_bench::workload::Workload;
use cyclone_replica::{Answers, Embedded, LogThread, Outcome as Answer};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Condition, Operation, Query};
use cyclone_wire::reply::Reply;
use cyclone_wire::slot::slot;

use super::cyclone::{config_of, others_wait_longer};
use super::native::operation;

/// A cluster whose leader is in this process.
pub struct Inside {
    /// Those that are left to the load's threads, and are not with one now.
    loops: Loops,
    apart: usize,
    /// Ends before the others.
    leader: Arc<Embedded>,
    cluster: LocalCluster,
}

/// The loops of the leader's logs, by their first log.
type Loops = Arc<Mutex<BTreeMap<u16, LogThread>>>;

impl Inside {
    /// Starts it. `apart`: the load's threads move the leader's logs.
    pub fn start(mut cluster: LocalCluster, mode: ReadMode, apart: bool) -> Result<Inside> {
        if mode != ReadMode::Index {
            bail!("variant.reads: an embedded replica reads by ReadIndex");
        }
        others_wait_longer(&cluster)?;
        for node in 1..cluster.nodes.len() {
            cluster.start(node, true)?;
        }
        let config = File::read(&config_of(&cluster, 0))?.to_config(true)?;
        let started = match apart {
            true => Embedded::start_apart(config),
            false => Embedded::start(config).map(|leader| (leader, Vec::new())),
        };
        let (leader, loops) = started.context("starting the replica in this process")?;
        let first = |mut own: LogThread| Some((own.lanes().first()?.log(), own));
        let loops: BTreeMap<u16, LogThread> = loops.into_iter().filter_map(first).collect();
        if !leader.wait_to_lead(Duration::from_secs(20)) {
            bail!("the replica in this process does not come to lead");
        }
        Ok(Inside {
            apart: loops.len(),
            loops: Arc::new(Mutex::new(loops)),
            leader: Arc::new(leader),
            cluster,
        })
    }
}

impl Lanes for Inside {
    fn lanes(&self, _inflight: usize) -> usize {
        self.apart.max(1)
    }

    fn open(&self, _number: usize, _share: usize) -> Result<Box<dyn Lane>> {
        if self.apart > 0 {
            return Ok(Box::new(DriverLane::take(&self.loops)?));
        }
        Ok(Box::new(InsideLane {
            leader: Arc::clone(&self.leader),
            answers: Answers::new(),
            known: Vec::new(),
        }))
    }
}

impl Running for Inside {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        lanes::preload(self, workload, seed, 256, live)
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        let followers: Vec<Process> = (1..self.cluster.nodes.len())
            .filter_map(|node| {
                Some(Process {
                    role: "followers".to_owned(),
                    pid: self.cluster.pid(node)?,
                })
            })
            .collect();
        let mut measured = lanes::run(self, job, &followers)?;
        measured.usage.name_own("leader with clients");
        Ok(measured)
    }
}

struct InsideLane {
    leader: Arc<Embedded>,
    answers: Arc<Answers>,
    known: Vec<(u64, Answer)>,
}

impl Lane for InsideLane {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let (leader, answers) = (&self.leader, &self.answers);
        match request {
            Request::Read(key) => {
                leader.submit_read_to(answers, token, &Query::Get { key: &key });
            }
            Request::Write(pairs) => leader.submit_to(answers, token, &operation(pairs)),
            Request::Scan(..) => bail!("there are no range scans"),
        }
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        self.answers.wait(patience, &mut self.known);
        for (token, answer) in self.known.drain(..) {
            let outcome = outcome(&answer)?;
            done.push(Done { token, outcome });
        }
        Ok(())
    }
}

/// Load in the thread that moves the logs: no thread is woken, and no other thread takes part at
/// the leader.
struct DriverLane {
    own: Option<LogThread>,
    /// Where it goes in the end.
    back: Loops,
    /// For each of its logs what makes a key lie there: a hash tag.
    tags: Vec<String>,
    key: Vec<u8>,
}

impl DriverLane {
    fn take(loops: &Loops) -> Result<DriverLane> {
        let free = lock(loops).pop_first();
        let (_, mut own) = free.context("all loops of the logs are in use")?;
        let logs = own.lanes().first().map_or(1, |lane| lane.logs());
        let tag = |log: u16| {
            let tags = (0u32..).map(|n| format!("{{{n}}}"));
            let lies = |tag: &String| slot(tag.as_bytes()) % logs == log;
            tags.into_iter().find(lies).context("slots are many")
        };
        let tags = own.lanes().iter().map(|lane| tag(lane.log()));
        Ok(DriverLane {
            tags: tags.collect::<Result<_>>()?,
            own: Some(own),
            back: Arc::clone(loops),
            key: Vec::new(),
        })
    }
}

impl Lane for DriverLane {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let Request::Write([pair]) = request else {
            bail!("client = \"driver\" writes one key at a time");
        };
        let which = token as usize % self.tags.len();
        self.key.clear();
        self.key.extend_from_slice(self.tags[which].as_bytes());
        self.key.extend_from_slice(&pair.key);
        let set = Operation::Set {
            key: &self.key,
            value: pair.value,
            condition: Condition::Always,
            get: false,
        };
        let own = self.own.as_mut().context("until it is dropped")?;
        own.lanes()[which].submit(token, &set);
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        let own = self.own.as_mut().context("until it is dropped")?;
        own.turn(patience)
            .context("the replica in this process has stopped")?;
        for lane in own.lanes() {
            for (token, answer) in lane.take_completions() {
                let outcome = outcome(&answer)?;
                done.push(Done { token, outcome });
            }
        }
        Ok(())
    }
}

impl Drop for DriverLane {
    fn drop(&mut self) {
        if let Some(mut own) = self.own.take()
            && let Some(first) = own.lanes().first().map(|lane| lane.log())
        {
            lock(&self.back).insert(first, own);
        }
    }
}

fn lock(loops: &Loops) -> MutexGuard<'_, BTreeMap<u16, LogThread>> {
    loops.lock().unwrap_or_else(PoisonError::into_inner)
}

fn outcome(answer: &Answer) -> Result<Outcome> {
    Ok(match answer {
        Answer::Done(Reply::Failed(failure)) => bail!("the store refuses: {failure}"),
        Answer::Done(_) => Outcome::Done,
        Answer::TooLarge => bail!("too large"),
        Answer::NotLeader(_) | Answer::Busy | Answer::Damaged => Outcome::Refused,
        Answer::Lost | Answer::Unknown => Outcome::Unfinished,
    })
}

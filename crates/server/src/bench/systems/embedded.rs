//! A replica inside this process, beside the load, as library users have it; the others are processes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cyclone_bench::cpu::Process;
use cyclone_bench::drive::{Done, Job, Lane, Lanes, Outcome, Request, lanes};
use cyclone_bench::system::{Measured, Running};
use cyclone_bench::workload::Workload;
use cyclone_replica::{Embedded, Outcome as Answer};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::Query;
use cyclone_wire::reply::Reply;

use super::cyclone::config_of;
use super::native::operation;
use crate::cluster::LocalCluster;
use crate::config::File;

/// A cluster whose leader is in this process.
pub struct Inside {
    /// Ends before the others.
    leader: Arc<Embedded>,
    cluster: LocalCluster,
}

/// The others wait longer before they stand for election, so that ours leads.
const OTHERS_ELECTION_MS: u64 = 400;

impl Inside {
    /// Starts it.
    pub fn start(mut cluster: LocalCluster, mode: ReadMode) -> Result<Inside> {
        if mode != ReadMode::Index {
            bail!("variant.reads: an embedded replica reads by ReadIndex");
        }
        for node in 1..cluster.nodes.len() {
            let path = config_of(&cluster, node);
            let mut file = File::read(&path)?;
            file.timing.election_ms = OTHERS_ELECTION_MS;
            std::fs::write(&path, toml::to_string(&file)?)?;
            cluster.start(node, true)?;
        }
        let config = File::read(&config_of(&cluster, 0))?.to_config(true)?;
        let leader = Embedded::start(config).context("starting the replica in this process")?;
        if !leader.wait_to_lead(Duration::from_secs(20)) {
            bail!("the replica in this process does not come to lead");
        }
        Ok(Inside {
            leader: Arc::new(leader),
            cluster,
        })
    }
}

impl Lanes for Inside {
    fn lanes(&self, _inflight: usize) -> usize {
        1
    }

    fn open(&self, _number: usize, _share: usize) -> Result<Box<dyn Lane>> {
        Ok(Box::new(InsideLane {
            leader: Arc::clone(&self.leader),
            waiting: VecDeque::new(),
        }))
    }
}

impl Running for Inside {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut dyn FnMut(u64)) -> Result<()> {
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
        lanes::run(self, job, &followers)
    }
}

struct InsideLane {
    leader: Arc<Embedded>,
    /// Calls by token, oldest first: answers come in this order, or nearly.
    waiting: VecDeque<(u64, Receiver<Answer>)>,
}

impl Lane for InsideLane {
    fn submit(&mut self, token: u64, request: Request<'_>) -> Result<()> {
        let answer = match request {
            Request::Read(key) => self.leader.submit_read(&Query::Get { key: &key }),
            Request::Write(pairs) => self.leader.submit(&operation(pairs)),
            Request::Scan(..) => bail!("there are no range scans"),
        };
        self.waiting.push_back((token, answer));
        Ok(())
    }

    fn poll(&mut self, patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        let Some((_, oldest)) = self.waiting.front() else {
            std::thread::sleep(patience.min(Duration::from_millis(1)));
            return Ok(());
        };
        let mut answer = match oldest.recv_timeout(patience) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => bail!("the replica has stopped"),
        };
        while let Some(seen) = answer.take() {
            let Some((token, _)) = self.waiting.pop_front() else {
                break;
            };
            done.push(Done {
                token,
                outcome: outcome(&seen)?,
            });
            if let Some((_, next)) = self.waiting.front() {
                answer = match next.try_recv() {
                    Ok(answer) => Some(answer),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => bail!("the replica has stopped"),
                };
            }
        }
        Ok(())
    }
}

fn outcome(answer: &Answer) -> Result<Outcome> {
    Ok(match answer {
        Answer::Done(Reply::Failed(failure)) => bail!("the store refuses: {failure}"),
        Answer::Done(_) => Outcome::Done,
        Answer::TooLarge => bail!("too large"),
        Answer::NotLeader(_) | Answer::Busy | Answer::Lost | Answer::Unknown => Outcome::Refused,
    })
}

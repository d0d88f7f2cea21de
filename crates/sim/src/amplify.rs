//! A client whose commands cost much to apply, some of them too much. What it writes first in a
//! batch shows whether the batch was done: all of its marks are those of the last batch that was,
//! whatever else was tried. And what must hold at every replica: no command and no call does more
//! than it may, and no replies are made that no client gets.

use cyclone_client::{ClientCore, ClientError};
use cyclone_replica::Node;
use cyclone_wire::batch::{self, Allowed};
use cyclone_wire::client::ReadMode;
use cyclone_wire::command::{Command, Condition, ExpireIf, Expiry, Operation, Query};
use cyclone_wire::gang::Head;
use cyclone_wire::reply::{Failure, Reply};
use cyclone_wire::work;

use crate::check::Broken;
use crate::plan::{Kind, Plan};
use crate::random::Random;

/// Keys that a batch marks.
const MARKS: usize = 3;
/// The longest value that is read again and again.
const MOST_LONG: usize = 16 << 10;
/// Times that a batch reads it, at most: so many lookups exceed the limit alone.
const MOST_TIMES: u64 = 40;

#[derive(Clone, Copy, Debug)]
enum Act {
    /// Makes the long value.
    Make,
    /// Marks the keys, and reads the long value so often.
    Mark { mark: u64, times: u64 },
    /// Reads the marks.
    Look,
}

/// What such a client knows.
#[derive(Debug)]
pub struct Amplifier {
    number: u64,
    random: Random,
    limit: u64,
    long: usize,
    /// Whether its keys lie in one log.
    together: bool,
    written: u64,
    /// After an operation of unknown outcome, other keys are taken.
    volume: u64,
    made: bool,
    mark: Option<u64>,
    pending: Option<(u64, Act)>,
}

impl Amplifier {
    /// Client `number`, before it does anything.
    pub fn new(number: u64, plan: &Plan, random: Random) -> Amplifier {
        Amplifier {
            number,
            random,
            limit: plan.work_bytes.into(),
            long: plan.max_value_bytes.min(MOST_LONG),
            together: !plan.has(Kind::Gangs) || number % 8 == 1,
            written: 0,
            volume: 0,
            made: false,
            mark: None,
            pending: None,
        }
    }

    fn key(&self, name: &str) -> Vec<u8> {
        let (number, volume) = (self.number, self.volume);
        match self.together {
            true => format!("{{amplify:{number}:{volume}}}:{name}").into_bytes(),
            false => format!("amplify:{number}:{volume}:{name}").into_bytes(),
        }
    }

    fn marks(&self) -> Vec<Vec<u8>> {
        (0..MARKS).map(|n| self.key(&n.to_string())).collect()
    }

    /// Does something, unless it waits for an answer.
    pub fn act(&mut self, core: &mut ClientCore, now_us: u64) {
        if self.pending.is_some() {
            return;
        }
        self.written += 1;
        let act = match (self.made, self.random.below(4)) {
            (false, _) => Act::Make,
            (true, 0) => Act::Look,
            (true, _) => Act::Mark {
                mark: self.written,
                times: self.random.below(MOST_TIMES),
            },
        };
        let (long, marks) = (self.key("long"), self.marks());
        let ticket = match act {
            Act::Make => {
                let offset = self.long as u64 - 1;
                let (key, value) = (&long[..], &b"x"[..]);
                core.submit(now_us, &Operation::SetRange { key, offset, value })
            }
            Act::Look => {
                let keys = marks.iter().map(Vec::as_slice).collect();
                core.submit_read(now_us, &Query::MultiGet { keys }, ReadMode::Index)
            }
            Act::Mark { mark, times } => {
                let value = mark.to_string();
                let set = |key| Operation::Set {
                    key,
                    value: value.as_bytes(),
                    condition: Condition::Always,
                    get: false,
                };
                let mut operations: Vec<_> = marks.iter().map(|key| set(key)).collect();
                let key = &long[..];
                let again = match self.random.below(3) {
                    0 => Operation::Read(Query::StrLen { key }),
                    1 => Operation::GetExpire {
                        key,
                        expiry: Expiry::Keep,
                    },
                    _ => Operation::Expire {
                        key,
                        expiry: Expiry::After(1 << 40),
                        condition: ExpireIf::Always,
                    },
                };
                operations.extend((0..times).map(|_| again.clone()));
                let batch = Operation::Batch {
                    expectations: Vec::new(),
                    operations,
                };
                core.submit(now_us, &batch)
            }
        };
        self.pending = Some((ticket, act));
    }

    /// Operations without an outcome.
    pub fn pending(&self) -> usize {
        usize::from(self.pending.is_some())
    }

    /// Takes an outcome in. Answers `false` if it is not one of its operations'.
    ///
    /// # Errors
    /// When the answer cannot be.
    pub fn ended(
        &mut self,
        ticket: u64,
        result: &Result<Reply, ClientError>,
    ) -> anyhow::Result<bool> {
        let Some((_, act)) = self.pending.take_if(|pending| pending.0 == ticket) else {
            return Ok(false);
        };
        match (act, result) {
            (_, Err(ClientError::NotDone(_))) | (Act::Look, Err(ClientError::Unknown)) => {}
            (_, Err(ClientError::Unknown)) => {
                (self.volume, self.made, self.mark) = (self.volume + 1, false, None);
            }
            (_, Err(error)) => anyhow::bail!("client {}: {error}", self.number),
            (Act::Make, Ok(Reply::Int(length))) if *length == self.long as i64 => self.made = true,
            (Act::Mark { mark, times }, Ok(Reply::Array(replies))) => {
                let long = self.long as u64;
                anyhow::ensure!(
                    replies.len() == MARKS + times as usize
                        && times * (work::LOOKUP_BYTES + long) <= self.limit,
                    "client {}: a batch that reads {long} bytes {times} times was done",
                    self.number
                );
                self.mark = Some(mark);
            }
            (Act::Mark { times, .. }, Ok(Reply::Failed(Failure::TooMuchWork { bytes, limit }))) => {
                let most = times * (2 * work::LOOKUP_BYTES + 3 * self.long as u64) + 4096;
                anyhow::ensure!(
                    bytes > limit && *limit == self.limit && most > self.limit,
                    "client {}: a batch that reads {} bytes {times} times was refused for {bytes} of {limit}",
                    self.number,
                    self.long
                );
            }
            (Act::Look, Ok(Reply::Array(found))) => {
                let wanted = match self.mark {
                    Some(mark) => Reply::Bytes(mark.to_string().into_bytes()),
                    None => Reply::Nil,
                };
                anyhow::ensure!(
                    found.iter().all(|mark| *mark == wanted),
                    "client {}: the last batch that was done marked its keys {wanted:?}, and they are {found:?}",
                    self.number
                );
            }
            (act, Ok(reply)) => {
                anyhow::bail!("client {} was answered {reply:?} to {act:?}", self.number)
            }
        }
        Ok(true)
    }
}

/// What the commands of an entry need at least is not more than they may do.
///
/// # Errors
/// If it is: the leader was to refuse it.
pub fn is_within(payload: &[u8]) -> Result<(), Broken> {
    let head = Head::decode(payload).map_or(0, |(_, at)| at);
    let Ok(commands) = batch::iter(&payload[head..]) else {
        return Ok(());
    };
    let (Some(value), Some(limit)) = (commands.max_value_bytes(), commands.max_work_bytes()) else {
        return Ok(());
    };
    for command in commands.flat_map(Command::decode) {
        let least = command.operation.least_work(value.into());
        if command.operation.is_of_many() && least > limit.into() {
            return Err(Broken(format!(
                "a command was proposed that needs {least} bytes of work and may need {limit}"
            )));
        }
    }
    Ok(())
}

/// No command and no call of a replica's store has done more than it may.
///
/// # Errors
/// If one has.
pub fn within_bounds(node: &Node) -> Result<(), Broken> {
    let Allowed {
        value_bytes,
        work_bytes,
    } = node.config().allowed();
    let (id, done) = (node.config().id, node.store().work_done());
    let (value, limit) = (u64::from(value_bytes), u64::from(work_bytes));
    // A command on one key is always allowed. What is found to be too much has been read.
    let command = limit.max(3 * value) + value + 4 * work::LOOKUP_BYTES;
    let call = command + 2 * work::portion(work_bytes);
    let what = match () {
        () if done.largest_command > command => {
            format!(
                "a command did {} bytes of work, of {command}",
                done.largest_command
            )
        }
        () if done.largest_call > call => {
            format!(
                "a call of apply did {} bytes of work, of {call}",
                done.largest_call
            )
        }
        () if done.unwanted_reply_bytes > 0 => {
            format!(
                "{} bytes of replies were made for no client",
                done.unwanted_reply_bytes
            )
        }
        () => return Ok(()),
    };
    Err(Broken(format!("replica {id}: {what}")))
}

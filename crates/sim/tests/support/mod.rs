//! Makes histories: a random source, a simulated store with overlapping clients, and a checker that
//! tries everything.
#![allow(dead_code)] // Each test file uses its part.

use cyclone_sim::history::{After, History, Op, Operation, Outcome};

/// A small random source (xorshift64*), so that a seed means the same everywhere.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        for _ in 0..8 {
            random.next();
        }
        random
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Which operations a key gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Reads and writes of values that are never repeated.
    Register,
    /// The same, and removals.
    Removable,
    /// Reads and increments.
    Counter,
    /// Reads and appends.
    Appends,
    /// Strings of few different values, every kind of write.
    Values,
    /// Everything, with few values.
    Everything,
}

pub const MIXES: [Mix; 6] = [
    Mix::Register,
    Mix::Removable,
    Mix::Counter,
    Mix::Appends,
    Mix::Everything,
    Mix::Values,
];

pub fn random_op(random: &mut Random, mix: Mix, unique: u64) -> Op {
    let fresh = format!("v{unique}").into_bytes();
    let few = vec![b'0' + random.below(3) as u8];
    match (mix, random.below(10)) {
        (Mix::Everything, 0) => Op::Set(few),
        (Mix::Everything, 1) => Op::SetAbsent(few),
        (Mix::Everything, 2) => Op::GetSet(few),
        (Mix::Everything, 3) => Op::Incr(random.below(5) as i64 - 2),
        (Mix::Everything, 4) => Op::Append(few),
        (Mix::Everything, 5) => Op::Del,
        (Mix::Everything, 6) => Op::GetDel,
        (Mix::Everything, 7) => Op::Len,
        (Mix::Everything, _) | (_, 5..) => Op::Get,
        (Mix::Values, 0) => Op::SetAbsent(few),
        (Mix::Values, 1) => Op::GetSet(few),
        (Mix::Values, 2) => Op::Del,
        (Mix::Values, 3) => Op::GetDel,
        (Mix::Values, _) => Op::Set(few),
        (Mix::Removable, 4) => Op::Del,
        (Mix::Register | Mix::Removable, _) => Op::Set(fresh),
        (Mix::Counter, _) => Op::Incr(1 + random.below(3) as i64),
        (Mix::Appends, _) => Op::Append(fresh),
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub keys: u64,
    pub clients: u64,
    pub operations: usize,
    pub unknown_percent: u64,
    pub mix: Option<Mix>,
}

/// Runs a store one operation at a time, each at a random moment between its invocation and its
/// return, so that the history is linearizable by construction. The clients overlap as `clients`
/// concurrent ones do.
pub fn simulate(seed: u64, plan: Plan) -> History {
    let random = &mut Random::new(seed);
    // (moment of effect, client, key, op, invoke, outcome kind)
    struct Pending {
        at: u64,
        client: u64,
        key: u64,
        op: Op,
        invoke: u64,
        return_at: Option<u64>,
    }
    let mut pending = Vec::new();
    let mut free_at: Vec<u64> = (0..plan.clients).map(|c| c % 50).collect();
    let mut history = History::new();
    for unique in 0..plan.operations as u64 {
        let client = random.below(plan.clients);
        let key = random.below(plan.keys);
        let mix = plan
            .mix
            .unwrap_or(MIXES[(key % MIXES.len() as u64) as usize]);
        let op = random_op(random, mix, unique);
        let invoke = free_at[client as usize] + 1 + random.below(20);
        let unknown = random.chance(plan.unknown_percent);
        let at = invoke + random.below(if unknown { 2000 } else { 60 });
        let return_at = (!unknown).then(|| at + random.below(60));
        free_at[client as usize] = return_at.unwrap_or(invoke + 50);
        if unknown && random.chance(40) {
            history.push(Operation {
                client,
                key: format!("k{key}").into_bytes(),
                op,
                invoke_us: invoke,
                outcome: Outcome::Unknown,
            });
            continue;
        }
        pending.push(Pending {
            at,
            client,
            key,
            op,
            invoke,
            return_at,
        });
    }
    pending.sort_by_key(|p| p.at);
    let mut states: Vec<Option<Vec<u8>>> = vec![None; plan.keys as usize];
    for p in pending {
        let state = &mut states[p.key as usize];
        let (after, answer) = p.op.apply(state.as_deref());
        match after {
            After::Same => {}
            After::Nil => *state = None,
            After::Value(value) => *state = Some(value),
        }
        history.push(Operation {
            client: p.client,
            key: format!("k{}", p.key).into_bytes(),
            op: p.op,
            invoke_us: p.invoke,
            outcome: p
                .return_at
                .map_or(Outcome::Unknown, |return_us| Outcome::Done {
                    return_us,
                    answer,
                }),
        });
    }
    history
}

/// Tries every order of one key's operations. Only for tiny histories.
pub fn brute_force(operations: &[Operation]) -> bool {
    fn extend(operations: &[Operation], left: &mut Vec<usize>, state: Option<&[u8]>) -> bool {
        let deadline = left
            .iter()
            .filter_map(|&i| match operations[i].outcome {
                Outcome::Done { return_us, .. } => Some(return_us),
                _ => None,
            })
            .min();
        let Some(deadline) = deadline else {
            return true;
        };
        for position in 0..left.len() {
            let index = left[position];
            let operation = &operations[index];
            if operation.invoke_us > deadline {
                continue;
            }
            let (after, answer) = operation.op.apply(state);
            if let Outcome::Done { answer: given, .. } = &operation.outcome
                && *given != answer
            {
                continue;
            }
            left.remove(position);
            let fits = match &after {
                After::Same => extend(operations, left, state),
                After::Nil => extend(operations, left, None),
                After::Value(value) => extend(operations, left, Some(value)),
            };
            left.insert(position, index);
            if fits {
                return true;
            }
        }
        false
    }
    let mut left: Vec<usize> = (0..operations.len())
        .filter(|&i| operations[i].outcome != Outcome::NotDone)
        .collect();
    extend(operations, &mut left, None)
}

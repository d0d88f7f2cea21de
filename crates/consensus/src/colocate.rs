//! Bringing the leaders of several logs together on one replica (cyclone §5.1), as a decision per
//! tick: pure, no clock.
//!
//! Log 0 decides where. Its leader campaigns in every log without a leader; the leader of another
//! log hands it to log 0's leader, once that one has all of it. Where a log does not come for long,
//! log 0 goes to where that log is, and after that to others in turn, each time with more patience:
//! two replicas that cannot have everything do not throw log 0 at each other without end, and one
//! that can is reached.
//= cyclone §5.1

/// A log as its replica sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLeadership {
    /// Whether this replica leads it.
    pub leads: bool,
    /// Its leader, if known.
    pub leader: Option<u64>,
    /// Whether that leader has been silent for long enough for an election.
    pub silent: bool,
    /// Whether this replica asks for votes.
    pub candidate: bool,
    /// Leader only: peers that are heard from and have every entry.
    pub ready: Vec<u64>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Begin an election in this log.
    Campaign {
        /// The log.
        log: usize,
    },
    /// Hand this log's leadership over.
    Transfer {
        /// The log.
        log: usize,
        /// To whom.
        to: u64,
    },
}

/// What one replica remembers from tick to tick.
#[derive(Clone, Debug)]
pub struct Colocation {
    own: u64,
    election_ticks: u32,
    /// Ticks until each log may be acted on again.
    cooldown: Vec<u32>,
    /// Ticks since this replica leads log 0 without leading all.
    split_ticks: u32,
    /// Times that log 0 was given away for that.
    home_transfers: u32,
    leaving: bool,
}

/// Election time-outs that log 0's leader waits for the other logs at first.
const PATIENCE: u32 = 4;
/// Doublings of the patience.
const MOST_PATIENCE: u32 = 4;

impl Colocation {
    /// For replica `own` of so many logs.
    pub fn new(own: u64, logs: usize, election_ticks: u32) -> Colocation {
        Colocation {
            own,
            election_ticks,
            cooldown: vec![0; logs],
            split_ticks: 0,
            home_transfers: 0,
            leaving: false,
        }
    }

    /// This replica is about to stop: it no longer attracts logs.
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// Whether [`Colocation::leave`] was called.
    pub fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// What to do now; called with `ticks` that have passed, and with 0 when leadership has changed
    /// in between.
    pub fn decide(&mut self, ticks: u32, logs: &[LogLeadership]) -> Vec<Action> {
        for cooldown in &mut self.cooldown {
            *cooldown = cooldown.saturating_sub(ticks);
        }
        let Some((home, others)) = logs.split_first() else {
            return Vec::new();
        };
        if self.leaving || others.is_empty() {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if !home.leads {
            self.split_ticks = 0;
            self.hand_over(home, others, &mut actions);
        } else if others.iter().all(|log| log.leads) {
            (self.split_ticks, self.home_transfers) = (0, 0);
        } else {
            self.claim_logs(ticks, home, others, &mut actions);
        }
        actions
    }

    /// Another replica leads log 0, or none does.
    fn hand_over(
        &mut self,
        home: &LogLeadership,
        others: &[LogLeadership],
        actions: &mut Vec<Action>,
    ) {
        let Some(to) = home.leader.filter(|_| !home.silent) else {
            return;
        };
        for (log, view) in (1..).zip(others) {
            if view.leads && view.ready.contains(&to) && self.cooldown[log] == 0 {
                self.cooldown[log] = self.election_ticks;
                actions.push(Action::Transfer { log, to });
            }
        }
    }

    /// This replica leads log 0.
    fn claim_logs(
        &mut self,
        ticks: u32,
        home: &LogLeadership,
        others: &[LogLeadership],
        actions: &mut Vec<Action>,
    ) {
        for (log, view) in (1..).zip(others) {
            // An election that is begun again forgets the votes that are on their way: where they
            // take longer than the rest it would never end. One that fails Raft begins again
            // without a caller.
            let free = (view.leader.is_none() || view.silent) && !view.candidate;
            if !view.leads && free && self.cooldown[log] == 0 {
                self.cooldown[log] = self.election_ticks / 2 + 1;
                actions.push(Action::Campaign { log });
            }
        }
        self.split_ticks = self.split_ticks.saturating_add(ticks);
        let patience = (self.election_ticks * PATIENCE) << self.home_transfers.min(MOST_PATIENCE);
        if self.split_ticks < patience {
            return;
        }
        // First to where the log is that does not come; if that did not help, to others in turn.
        let there = others
            .iter()
            .filter(|view| !view.leads)
            .find_map(|view| view.leader.filter(|id| home.ready.contains(id)));
        let turn = || {
            let count = home.ready.len().max(1);
            home.ready
                .get(self.home_transfers as usize / 2 % count)
                .copied()
        };
        let to = match self.home_transfers.is_multiple_of(2) {
            true => there.or_else(turn),
            false => turn(),
        };
        // Where no replica is ready now, the next attempt decides: a replica that is heard from is
        // asked anew once per election time-out, and patience is a multiple of that, so that a
        // whole patience later none would be ready again.
        if let Some(to) = to.filter(|to| *to != self.own) {
            (self.split_ticks, self.home_transfers) = (0, self.home_transfers + 1);
            actions.push(Action::Transfer { log: 0, to });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who leads what in a made-up cluster of three, where some replicas can never lead some logs.
    struct World {
        leaders: Vec<Option<u64>>,
        cannot: Vec<(u64, usize)>,
        minds: Vec<Colocation>,
        /// How many ticks an election takes.
        election: u32,
        /// By log: who asks for votes, and for how long still.
        running: Vec<Option<(u64, u32)>>,
    }

    const TICKS: u32 = 10;

    impl World {
        fn new(leaders: &[u64], cannot: &[(u64, usize)]) -> World {
            World {
                leaders: leaders.iter().map(|id| (*id > 0).then_some(*id)).collect(),
                cannot: cannot.to_vec(),
                minds: (1..=3)
                    .map(|id| Colocation::new(id, leaders.len(), TICKS))
                    .collect(),
                election: 0,
                running: vec![None; leaders.len()],
            }
        }

        fn views(&self, own: u64) -> Vec<LogLeadership> {
            let logs = self.leaders.iter().zip(&self.running);
            logs.map(|(leader, running)| LogLeadership {
                leads: *leader == Some(own),
                leader: *leader,
                silent: false,
                candidate: running.is_some_and(|(id, _)| id == own),
                ready: match *leader == Some(own) {
                    true => (1..=3).filter(|id| *id != own).collect(),
                    false => Vec::new(),
                },
            })
            .collect()
        }

        fn can(&self, id: u64, log: usize) -> bool {
            !self.cannot.contains(&(id, log))
        }

        /// One tick of every replica; returns whether anything moved.
        fn tick(&mut self) -> bool {
            let mut moved = false;
            for (running, leader) in self.running.iter_mut().zip(&mut self.leaders) {
                if let Some((id, left)) = running {
                    *left -= 1;
                    if *left == 0 {
                        *leader = Some(*id);
                        *running = None;
                    }
                }
            }
            for own in 1..=3u64 {
                let views = self.views(own);
                for action in self.minds[own as usize - 1].decide(1, &views) {
                    let (log, to) = match action {
                        Action::Campaign { log } if self.election > 0 => {
                            self.running[log] = Some((own, self.election));
                            continue;
                        }
                        Action::Campaign { log } => (log, own),
                        Action::Transfer { log, to } => {
                            assert_eq!(self.leaders[log], Some(own), "hands over what it leads");
                            (log, to)
                        }
                    };
                    if self.can(to, log) {
                        moved |= self.leaders[log] != Some(to);
                        self.leaders[log] = Some(to);
                    }
                }
            }
            moved
        }

        fn together(&self) -> bool {
            self.leaders[0].is_some() && self.leaders.iter().all(|id| *id == self.leaders[0])
        }
    }

    /// Every assignment of leaders to three logs converges to log 0's leader, within a few ticks
    /// and for good.
    #[test]
    fn all_logs_come_to_log_zero() {
        for case in 0..4u64.pow(3) {
            let leaders = [case % 4, case / 4 % 4, case / 16];
            if leaders[0] == 0 {
                continue;
            }
            let mut world = World::new(&leaders, &[]);
            for _ in 0..TICKS {
                world.tick();
            }
            assert!(world.together(), "{leaders:?} ends as {:?}", world.leaders);
            assert_eq!(world.leaders[0], Some(leaders[0]), "log 0 stays");
            for _ in 0..TICKS * 100 {
                assert!(!world.tick(), "{leaders:?} does not come to rest");
            }
        }
    }

    /// Whatever replicas cannot lead whatever logs: as long as one can lead all, everything ends up
    /// at such a one.
    #[test]
    fn where_a_log_cannot_come_log_zero_moves() {
        for able in 1..=3u64 {
            // Each of the two others cannot lead some set of logs; log 0 it can, or the question
            // does not arise.
            for case in 1..64usize {
                let others: Vec<u64> = (1..=3).filter(|id| *id != able).collect();
                let mut cannot = Vec::new();
                for (position, other) in others.iter().enumerate() {
                    for log in 1..4 {
                        if case >> (position * 3 + log - 1) & 1 == 1 {
                            cannot.push((*other, log));
                        }
                    }
                }
                let start: Vec<u64> = (0..4)
                    .map(|log| {
                        (1..=3)
                            .find(|id| !cannot.contains(&(*id, log)))
                            .expect("somebody can")
                    })
                    .collect();
                let mut world = World::new(&start, &cannot);
                let mut ticks = 0;
                while !world.together() {
                    world.tick();
                    ticks += 1;
                    assert!(
                        ticks < TICKS * PATIENCE * 200,
                        "{cannot:?} from {start:?}: {:?}",
                        world.leaders
                    );
                }
            }
        }
    }

    /// Votes between replicas that are far apart, or that sync them to a disk, take longer than a
    /// log is left alone.
    #[test]
    fn an_election_in_progress_is_not_begun_again() {
        for election in 1..4 * TICKS {
            let mut world = World::new(&[1, 0, 0], &[]);
            world.election = election;
            for _ in 0..election + 2 {
                world.tick();
            }
            assert!(world.together(), "{election} ticks: {:?}", world.leaders);
        }
    }

    /// Raft forgets once per election time-out whom the leader has heard from, until they answer
    /// the next heartbeat. Patience that ends at just that moment, which it does every time or
    /// never, must not begin anew.
    #[test]
    fn no_replica_is_ready_when_patience_ends() {
        let mut mind = Colocation::new(1, 2, TICKS);
        let view = |tick: u32, log: u64| LogLeadership {
            leads: log == 0,
            leader: Some(1 + log),
            silent: false,
            candidate: false,
            ready: match log == 0 && !tick.is_multiple_of(TICKS) {
                true => vec![2, 3],
                false => Vec::new(),
            },
        };
        let ticks = 1..=TICKS * PATIENCE + 1;
        let given: Vec<Action> = ticks
            .flat_map(|tick| mind.decide(1, &[view(tick, 0), view(tick, 1)]))
            .collect();
        assert_eq!(given, [Action::Transfer { log: 0, to: 2 }]);
    }

    #[test]
    fn a_replica_that_leaves_attracts_nothing() {
        let mut mind = Colocation::new(1, 2, TICKS);
        let free = LogLeadership {
            leads: false,
            leader: None,
            silent: false,
            candidate: false,
            ready: Vec::new(),
        };
        let home = LogLeadership {
            leads: true,
            leader: Some(1),
            silent: false,
            candidate: false,
            ready: vec![2],
        };
        let views = [home, free];
        assert_eq!(
            mind.clone().decide(0, &views),
            [Action::Campaign { log: 1 }]
        );
        mind.leave();
        assert_eq!(mind.decide(0, &views), []);
    }
}

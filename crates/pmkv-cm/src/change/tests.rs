//! Drafts of what clusters reach by accident only.

use std::collections::BTreeSet;

use super::{Draft, Weights};
use crate::config::{Configuration, ManagerId, Member, ServerId, Standing};
use crate::message::Hello;

const DRAINED: ServerId = ServerId(3);

fn founded() -> Configuration {
    let member = |id| Member {
        id: ServerId(id),
        incarnation: id,
        session: 1,
        since: 1,
        standing: Standing::Live,
        drains: false,
        client: String::new(),
        peer: String::new(),
    };
    Configuration::founding(7, 6, 2, (1..=4).map(member).collect()).expect("sound")
}

fn next(base: &Configuration, change: impl FnOnce(&mut Draft<'_>)) -> Configuration {
    let weights = Weights::new();
    let mut draft = Draft::new(base, ManagerId(1), 1, &weights);
    change(&mut draft);
    let next = draft.finish(false).expect("a change");
    assert_eq!(next.check(), Ok(()));
    assert_eq!(Configuration::decode(&next.encode()), Ok(next.clone()));
    next
}

fn hello(id: ServerId) -> Hello {
    Hello {
        server: id,
        incarnation: id.0,
        session: 2,
        client: String::new(),
        peer: String::new(),
    }
}

fn standing(config: &Configuration) -> Option<Standing> {
    config.member(DRAINED).map(|it| it.standing)
}

/// Drained, and taken for failed before it was empty.
fn failed() -> Configuration {
    let drained = next(&founded(), |draft| draft.drain(DRAINED));
    let failed = next(&drained, |draft| draft.fail(&BTreeSet::from([DRAINED])));
    assert!(!failed.holds(DRAINED));
    assert_eq!(standing(&failed), Some(Standing::Down));
    failed
}

#[test]
fn a_draining_server_that_fails_drains_when_it_is_back() {
    let back = next(&failed(), |draft| draft.welcome(&hello(DRAINED)));
    assert_eq!(standing(&back), Some(Standing::Draining));
}

#[test]
fn a_draining_ends_with_the_operators_word() {
    let undrained = next(&failed(), |draft| draft.undrain(DRAINED));
    assert_eq!(standing(&undrained), None);
    let forgotten = next(&failed(), |draft| draft.forget(DRAINED));
    assert_eq!(standing(&forgotten), None);
}

/// Nothing is with it any more: it has left.
#[test]
fn a_drained_server_is_not_remembered() {
    let mut drained = next(&founded(), |draft| draft.drain(DRAINED));
    for shard in &mut drained.shards {
        shard.full.retain(|copy| copy.server != DRAINED);
        shard.primary = shard.full[0].server;
    }
    let left = next(&drained, |draft| draft.fail(&BTreeSet::from([DRAINED])));
    assert_eq!(standing(&left), None);
}

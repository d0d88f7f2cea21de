//! The manager's configuration in the engine's words.

use anyhow::{Context, Result};
use cyclone_fabric::Address;
use cyclone_pmkv::{Configuration, Placement, Server};
use cyclone_pmkv_cm as cm;
use cyclone_pmkv_cm::MigrationKind;

fn id(server: cm::ServerId) -> Result<u32> {
    u32::try_from(server.0).with_context(|| format!("{server} is beyond 32 bits"))
}

/// Where a member is reached: its address names its files of the shared-memory fabric.
fn server(member: &cm::Member) -> Result<Server> {
    Ok(Server {
        id: id(member.id)?,
        log: Address(format!("{}.ctl", member.peer).into_bytes()),
        peer: Address(format!("{}.peers.ctl", member.peer).into_bytes()),
    })
}

/// Members that have failed are not among the servers; a shard that only they hold keeps its
/// primary, which is no server.
pub(super) fn configuration(config: &cm::Configuration) -> Result<Configuration> {
    let term = u32::try_from(config.term).context("more terms than 32 bits count")?;
    let servers = config.up().map(server).collect::<Result<_>>()?;
    let placement = |(number, shard): (cm::ShardId, &cm::Shard)| -> Result<Placement> {
        let primary = shard.primary;
        let others = |copies: &[cm::Copy]| -> Result<Vec<u32>> {
            let others = copies.iter().map(|copy| copy.server);
            let others = others.filter(|&it| it != primary && config.is_up(it));
            others.map(id).collect()
        };
        let moves = config
            .migration(number)
            .filter(|it| it.kind == MigrationKind::Primary && it.target == primary);
        Ok(Placement {
            primary: id(primary)?,
            backups: others(&shard.full)?,
            joining: others(&shard.joining)?,
            source: moves.map(|it| id(it.source)).transpose()?,
        })
    };
    Ok(Configuration {
        term,
        servers,
        shards: config.numbered().map(placement).collect::<Result<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cyclone_pmkv_cm::{Copy, Member, Migration, ServerId, Standing};

    #[test]
    fn members_copies_and_moves() {
        let member = |id, standing| Member {
            id: ServerId(id),
            incarnation: 1,
            session: 1,
            since: 1,
            standing,
            drains: false,
            client: "127.0.0.1:1".into(),
            peer: format!("/x/s{id}"),
        };
        let members = vec![
            member(0, Standing::Live),
            member(1, Standing::Down),
            member(2, Standing::Draining),
        ];
        let mut config = cm::Configuration::founding(9, 3, 2, members).expect("a configuration");
        config.shards[0].joining.push(Copy {
            server: ServerId(2),
            since: 1,
        });
        config.shards[0].full.truncate(1);
        config.shards[0].primary = ServerId(2);
        config.migrations.push(Migration {
            shard: 0,
            kind: MigrationKind::Primary,
            source: ServerId(0),
            target: ServerId(2),
        });
        config.check().expect("sound");
        let engine = configuration(&config).expect("translated");
        let ids: Vec<u32> = engine.servers.iter().map(|it| it.id).collect();
        assert_eq!(ids, [0, 2]);
        assert_eq!(engine.servers[1].log.0, b"/x/s2.ctl");
        let moving = &engine.shards[0];
        assert_eq!((moving.primary, moving.source), (2, Some(0)));
        assert_eq!(
            (&moving.backups[..], &moving.joining[..]),
            (&[0][..], &[][..])
        );
        // Server 1 has failed: no server serves its shard, and none writes to it.
        assert_eq!(engine.shards[1].primary, 1);
        assert!(engine.shards.iter().all(|it| !it.backups.contains(&1)));
    }
}

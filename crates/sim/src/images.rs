//! Memory images that an earlier version of the formats wrote, checked in: a cluster must start
//! from them.
//!
//! ```text
//! image file   "CYIMAGE1"
//!              machines u32
//!              per machine: identity length u32, identity file,
//!                           region length u64, runs u32, per run: offset u64, length u32, bytes
//! ```
//! All numbers little-endian; what no run names is zero. The stores had flushed nothing: all state
//! is in the logs.

use anyhow::{Context, bail};
use cyclone_replica::identity;

use crate::history::Op;
use crate::plan::{Kind, Plan};
use crate::world::World;

const MAGIC: &[u8; 8] = b"CYIMAGE1";
/// The formats of the first version: superblock 1, ring 1, entries and commands 1.
const FIRST: &[u8] = include_bytes!("../images/first.img");
/// Keys that the earlier life wrote: `old:0` holds `value 0`, and so on.
pub const OLD_KEYS: u64 = 40;

/// The name of an old key.
pub fn old_key(number: u64) -> Vec<u8> {
    format!("old:{number}").into_bytes()
}

/// What an old key holds. Some values are long, so that some records lie in frames.
pub fn old_value(number: u64) -> Vec<u8> {
    let mut value = format!("value {number}").into_bytes();
    if number.is_multiple_of(8) {
        value.resize(3_000, b'=');
    }
    value
}

/// Puts the checked-in memory into the machines of a cluster that has not run yet.
pub(crate) fn restore(world: &mut World) -> anyhow::Result<()> {
    let mut reader = Reader(FIRST);
    if reader.bytes(8)? != MAGIC {
        bail!("not an image file");
    }
    let machines = reader.number(4)?;
    if machines != world.machines.len() as u64 {
        bail!("images of {machines} machines for {}", world.machines.len());
    }
    for machine in &mut world.machines {
        let length = reader.number(4)?;
        let text = std::str::from_utf8(reader.bytes(length)?)?;
        let identity = identity::parse(text, std::path::Path::new("the image"))?;
        let mut image = vec![0; usize::try_from(reader.number(8)?)?];
        for _ in 0..reader.number(4)? {
            let (at, length) = (reader.number(8)?, reader.number(4)?);
            let run = reader.bytes(length)?;
            let place = image.get_mut(at as usize..(at + length) as usize);
            place
                .context("a run outside the region")?
                .copy_from_slice(run);
        }
        machine.restore(&image, identity)?;
    }
    Ok(())
}

/// Lets a cluster without faults write the old keys, kills it, and answers its memory as an image
/// file.
pub fn make(root: &std::path::Path) -> anyhow::Result<Vec<u8>> {
    let mut plan = Kind::ALL
        .iter()
        .fold(Plan::draw(1), |plan, &kind| plan.without(kind));
    (plan.nodes, plan.nvm_bytes, plan.clients) = (3, 2 << 20, 0);
    plan.fit();
    let mut world = World::new(plan, root)?;
    world.run_until(3_000_000)?;
    let mut client = world.load.client()?;
    let number = client.number;
    for key in 0..OLD_KEYS {
        client.submit(old_key(key), Op::Set(old_value(key)), world.now_us);
        world.clients.insert(number, client);
        world.client_step(number)?;
        let until_us = world.now_us + 2_000_000;
        world.run_until(until_us)?;
        client = world.clients.remove(&number).context("the client")?;
        if client.pending() > 0 {
            bail!("old key {key} was not written");
        }
    }
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&(world.machines.len() as u32).to_le_bytes());
    for position in 0..world.machines.len() {
        world.stop(position, false);
        let (image, identity) = world.machines[position].remains().context("no memory")?;
        let identity = identity::text(&identity);
        file.extend_from_slice(&(identity.len() as u32).to_le_bytes());
        file.extend_from_slice(identity.as_bytes());
        file.extend_from_slice(&(image.len() as u64).to_le_bytes());
        let lines: Vec<usize> = (0..image.len() / 64)
            .filter(|line| {
                image[line * 64..line * 64 + 64]
                    .iter()
                    .any(|byte| *byte != 0)
            })
            .collect();
        let runs: Vec<&[usize]> = lines.chunk_by(|one, next| one + 1 == *next).collect();
        file.extend_from_slice(&(runs.len() as u32).to_le_bytes());
        for run in runs {
            let (at, length) = (run[0] * 64, run.len() * 64);
            file.extend_from_slice(&(at as u64).to_le_bytes());
            file.extend_from_slice(&(length as u32).to_le_bytes());
            file.extend_from_slice(&image[at..at + length]);
        }
    }
    Ok(file)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: u64) -> anyhow::Result<&'a [u8]> {
        let split = self.0.split_at_checked(count as usize);
        let (bytes, rest) = split.context("the image file ends early")?;
        self.0 = rest;
        Ok(bytes)
    }

    fn number(&mut self, width: u64) -> anyhow::Result<u64> {
        let mut word = [0; 8];
        word[..width as usize].copy_from_slice(self.bytes(width)?);
        Ok(u64::from_le_bytes(word))
    }
}

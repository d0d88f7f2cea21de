//! A store behind the packet port, without any log: what a write costs that is not persisted or
//! replicated, to be compared with one that is. Clients cannot tell the difference.

use std::sync::Arc;

use anyhow::{Context, Result};
use cyclone_packet::{Identity, Keys, Message, Outgoing, Peer, Port, PortConfig};
use cyclone_replica::{Config, now, open_store};
use cyclone_store::{EntryInput, Mode, StateMachine};
use cyclone_wire::client::{Request, Status, put_response, requests};
use cyclone_wire::reply::Reply;
use cyclone_wire::{batch, envelope};

use super::child::End;
use super::host::{enter, speak};
use super::{Place, config_of};

/// Commands of an entry, as in a node.
const BURST: usize = 32;

/// Runs a new store until the process ends.
pub fn run(place: &Place, transport: &str, interface: &str) -> Result<()> {
    speak();
    enter(&place.namespace)?;
    let config = config_of(place)?;
    let store = open_store(&config, &config.data.join("store"))?;
    let mut front = Front::open(&config, transport, interface, store)?;
    loop {
        front.step()?;
    }
}

/// The port and the store.
struct Front {
    port: Port,
    store: Arc<dyn StateMachine>,
    index: u64,
    inbox: Vec<Message>,
    /// Commands of the entry in the making: who asked, and the number of the request there.
    origins: Vec<(u64, u64)>,
    entry: batch::Writer,
    /// Answers to the last client that was answered.
    answer: Option<(u64, Vec<u8>)>,
}

impl Front {
    fn open(
        config: &Config,
        transport: &str,
        interface: &str,
        store: Arc<dyn StateMachine>,
    ) -> Result<Front> {
        let own = config.members.iter().find(|member| member.id == config.id);
        let address = own.context("not among the members")?.packet;
        let end = End::open(transport, address, interface, false)?;
        let keys = Keys {
            node: Some(config.node_key),
            client: config.client_key,
        };
        let boot = cyclone::cluster::random_key()?;
        let boot = *boot.first_chunk().context("32 bytes")?;
        let settings = PortConfig::new(Identity::Node(config.id), keys, boot);
        tracing::info!("packets by {}", end.driver.describe());
        Ok(Front {
            port: Port::new(end.driver, end.pool, settings)?,
            store,
            index: 0,
            inbox: Vec::new(),
            origins: Vec::new(),
            entry: batch::Writer::new(),
            answer: None,
        })
    }

    fn step(&mut self) -> Result<()> {
        let now = now();
        if self.port.poll(now.steady_us, &mut self.inbox)? == 0 {
            return Ok(());
        }
        for message in std::mem::take(&mut self.inbox) {
            let Peer::Client(client) = message.from else {
                continue;
            };
            let bytes = message.body.to_vec();
            let Some((&envelope::CLIENT_REQUEST, _)) = bytes.split_first() else {
                continue;
            };
            let mut asked = requests(bytes.len() - 1);
            while let Some(request) = asked.next(&bytes[1..]) {
                if let (id, Request::Command(at)) = request? {
                    self.origins.push((client, id));
                    self.entry
                        .push(|out| out.extend_from_slice(&bytes[1..][at]));
                }
                if self.origins.len() >= BURST {
                    self.apply(now.steady_us, now.wall_ms)?;
                }
            }
        }
        self.apply(now.steady_us, now.wall_ms)?;
        self.send(now.steady_us)
    }

    fn apply(&mut self, now_us: u64, wall_ms: u64) -> Result<()> {
        if self.origins.is_empty() {
            return Ok(());
        }
        let payload = std::mem::take(&mut self.entry).finish(wall_ms);
        self.index += 1;
        let entry = EntryInput {
            index: self.index,
            term: 1,
            payload: &payload,
            wants_replies: true,
        };
        let mut applied = self.store.apply(0, &[entry], Mode::Blocking)?;
        let replies = applied.replies.pop().context("no answers")?;
        for ((client, id), reply) in std::mem::take(&mut self.origins).into_iter().zip(replies) {
            self.tell(now_us, client, id, reply)?;
        }
        Ok(())
    }

    fn tell(&mut self, now_us: u64, client: u64, id: u64, reply: Reply) -> Result<()> {
        if self.answer.as_ref().is_some_and(|(to, _)| *to != client) {
            self.send(now_us)?;
        }
        let begin = || (client, vec![envelope::CLIENT_RESPONSE]);
        let (_, message) = self.answer.get_or_insert_with(begin);
        put_response(message, id, &Status::Done(reply));
        Ok(())
    }

    fn send(&mut self, now_us: u64) -> Result<()> {
        if let Some((client, message)) = self.answer.take() {
            let to = Peer::Client(client);
            let parts: [&[u8]; 1] = [&message];
            self.port.send(now_us, &[Outgoing { to, parts: &parts }])?;
        }
        Ok(())
    }
}

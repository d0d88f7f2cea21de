//! Transactions over group memory: all of a transaction's updates or none, at every member, in an
//! order that all agree on.
//!
//! ```text
//!   begin: locks in order of number → read, write (buffered) → commit:
//!   redo record: gWRITE, gFLUSH → gMEMCPY into the data area, gFLUSH → head: gWRITE, gFLUSH → unlock: gCAS
//! ```
//!
//! Which lock protects which bytes is the program's choice; it must be the same for all clients.
//! The weaker modes leave steps out of what a commit waits for; the steps are made up for by a
//! later [`Client::settle`], and the exclusive locks stay until then, so that clients who lock
//! never see less than is committed.

use std::collections::{BTreeMap, BTreeSet};

use super::io::Io;
use super::layout::{Layout, MAX_POSITION, SLOT_HEAD, SLOT_SEED};
use super::lock::{
    Holder, LockMode, LockPolicy, LockWord, MAX_EPOCH, check_returned, lock_exclusive, lock_shared,
    unlock_exclusive, unlock_operation, unlock_shared,
};
use super::log::{RedoLog, run_all};
use super::operation::{Answer, GroupError, GroupMemory, GroupOp, all_members};
use super::record::{LogName, Update};

/// What a commit's durability waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// A committed transaction survives the loss of power at all members.
    Critical,
    /// It survives as long as one member keeps its memory; it is flushed by a later settle. If all
    /// members lose power before, the last transactions are lost, and with
    /// [`LogProcessing::Critical`] perhaps half applied.
    Deferred,
}

/// When a committed transaction is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogProcessing {
    /// Before the commit returns.
    Critical,
    /// By a later settle: a reader without locks sees it eventually.
    Deferred,
}

/// How a client works.
//= hyperloop §7: weaker models leave durability or log processing out of the critical path
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientOptions {
    /// What a commit's durability waits for.
    pub durability: Durability,
    /// When a committed transaction is executed.
    pub processing: LogProcessing,
    /// How long to insist on a lock.
    pub lock: LockPolicy,
    /// Transactions that may wait for a settle; at least 1.
    pub max_unsettled: usize,
    /// How long one may wait, in microseconds, if [`Client::tick`] is called.
    pub settle_after_us: u64,
    /// The member to read from.
    pub read_member: usize,
}

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        ClientOptions {
            durability: Durability::Critical,
            processing: LogProcessing::Critical,
            lock: LockPolicy::default(),
            max_unsettled: 64,
            settle_after_us: 1000,
            read_member: 0,
        }
    }
}

/// One client of a group, in one of its epochs.
pub struct Client<M> {
    io: Io<M>,
    layout: Layout,
    holder: Holder,
    log: RedoLog,
    options: ClientOptions,
    /// Exclusive locks of transactions that are not settled.
    retained: BTreeSet<u32>,
    /// Locks of transactions that were dropped.
    dropped: BTreeMap<u32, LockMode>,
    unsettled: usize,
    unsettled_since_us: Option<u64>,
}

impl<M: GroupMemory> Client<M> {
    /// Takes a client's place in the group and begins a new epoch of it. Refused while another has
    /// it, or if its last user did not [detach](Client::detach): then
    /// [recover](super::recover_client) comes first.
    pub async fn attach(
        io: Io<M>,
        client: u32,
        options: ClientOptions,
    ) -> Result<Client<M>, GroupError> {
        let layout = Layout::of_group(&io).await?;
        layout.check_client(client)?;
        let members = io.members();
        if options.read_member >= members {
            return Err(GroupError::NoMember {
                member: options.read_member,
                members,
            });
        }
        let slot = layout.slot_at(client);
        let epoch = io.read_word(0, slot).await?;
        if !epoch.is_multiple_of(2) || epoch >= MAX_EPOCH {
            return Err(GroupError::InUse { client, epoch });
        }
        let all = all_members(members);
        let before = io.compare_swap(slot, epoch, epoch + 1, all).await?;
        if let Some(&other) = before.iter().find(|&&word| word != epoch) {
            return Err(GroupError::InUse {
                client,
                epoch: other,
            });
        }
        io.run(GroupOp::Flush).await?;
        let epoch = epoch + 1;
        let log = open_log(&io, layout, client, epoch).await?;
        Ok(Client {
            io,
            layout,
            holder: Holder {
                client,
                // At most MAX_EPOCH.
                epoch: epoch as u32,
            },
            log,
            options,
            retained: BTreeSet::new(),
            dropped: BTreeMap::new(),
            unsettled: 0,
            unsettled_since_us: None,
        })
    }

    /// The group's memory.
    pub fn io(&self) -> &Io<M> {
        &self.io
    }

    /// Where everything is.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// This client in its epoch.
    pub fn holder(&self) -> Holder {
        self.holder
    }

    /// Transactions committed and not settled.
    pub fn unsettled(&self) -> usize {
        self.unsettled
    }

    /// Begins a transaction that will write what the `exclusive` locks protect and read what either
    /// protects. Answers once all are held; if one stays with others, gives back what it took.
    pub async fn begin(
        &mut self,
        exclusive: &[u32],
        shared: &[u32],
    ) -> Result<Transaction<'_, M>, GroupError> {
        self.release_dropped().await?;
        let mut wanted = BTreeMap::new();
        wanted.extend(shared.iter().map(|&lock| (lock, LockMode::Shared)));
        wanted.extend(exclusive.iter().map(|&lock| (lock, LockMode::Exclusive)));
        if wanted.keys().any(|lock| self.retained.contains(lock)) {
            // What is executed can be read and written on under the lock that is still there; what
            // is not cannot.
            if self.options.processing == LogProcessing::Deferred {
                self.settle().await?;
            }
            wanted.retain(|lock, _| !self.retained.contains(lock));
        }
        let mut transaction = Transaction {
            client: self,
            held: BTreeMap::new(),
            updates: Vec::new(),
        };
        let Err(error) = transaction.lock(wanted).await else {
            return Ok(transaction);
        };
        transaction.release().await?;
        // The holder may be waiting for locks that stayed here only for want of a settle.
        if matches!(error, GroupError::Locked { .. }) {
            transaction.client.settle().await?;
        }
        Err(error)
    }

    /// Reads data without a lock: what it was at some moment, perhaps a part before and a part
    /// after a transaction.
    pub async fn peek(&self, offset: u64, len: u64) -> Result<Vec<u8>, GroupError> {
        let at = self.layout.data_range(offset, len)?;
        self.io.read(self.options.read_member, at, len).await
    }

    /// Flushes and executes what commits have left undone, and gives back the locks they kept.
    pub async fn settle(&mut self) -> Result<(), GroupError> {
        self.release_dropped().await?;
        if self.log.is_empty() && self.retained.is_empty() {
            return Ok(());
        }
        // A record is durable before its execution can be: otherwise a crash of all could leave
        // half of it.
        let mut operations = vec![GroupOp::Flush];
        operations.extend(self.log.execute());
        operations.extend(self.log.advance());
        run_all(&self.io, operations).await?;
        self.log.advanced();
        let locks = std::mem::take(&mut self.retained);
        (self.unsettled, self.unsettled_since_us) = (0, None);
        self.unlock_all(&locks).await
    }

    /// Settles if something has waited for long enough. `now_us` never goes back.
    pub async fn tick(&mut self, now_us: u64) -> Result<(), GroupError> {
        if self.unsettled == 0 && self.dropped.is_empty() {
            self.unsettled_since_us = None;
            return Ok(());
        }
        let since = *self.unsettled_since_us.get_or_insert(now_us);
        if now_us.saturating_sub(since) >= self.options.settle_after_us {
            self.settle().await?;
        }
        Ok(())
    }

    /// Settles and leaves the client's place to others.
    pub async fn detach(mut self) -> Result<Io<M>, GroupError> {
        self.settle().await?;
        let slot = self.layout.slot_at(self.holder.client);
        let epoch = u64::from(self.holder.epoch);
        let all = all_members(self.io.members());
        self.io.compare_swap(slot, epoch, epoch + 1, all).await?;
        self.io.run(GroupOp::Flush).await?;
        Ok(self.io)
    }

    async fn unlock_all(&self, locks: &BTreeSet<u32>) -> Result<(), GroupError> {
        let operations = self.unlock_operations(locks.iter())?;
        let answers = run_all(&self.io, operations).await?;
        self.check_unlocked(locks.iter(), &answers)
    }

    fn unlock_operations<'a>(
        &self,
        locks: impl Iterator<Item = &'a u32>,
    ) -> Result<Vec<GroupOp>, GroupError> {
        let members = self.io.members();
        locks
            .map(|&lock| unlock_operation(&self.layout, members, lock, self.holder))
            .collect()
    }

    fn check_unlocked<'a>(
        &self,
        locks: impl Iterator<Item = &'a u32>,
        answers: &[Answer],
    ) -> Result<(), GroupError> {
        let mine = LockWord::exclusive(self.holder);
        let all = all_members(self.io.members());
        for (&lock, answer) in locks.zip(answers) {
            if let Answer::Values(before) = answer {
                check_returned(lock, mine, all, before)?;
            }
        }
        Ok(())
    }

    async fn release_dropped(&mut self) -> Result<(), GroupError> {
        while let Some((lock, mode)) = self.dropped.pop_first() {
            self.release_one(lock, mode).await?;
        }
        Ok(())
    }

    async fn release_one(&self, lock: u32, mode: LockMode) -> Result<(), GroupError> {
        match mode {
            LockMode::Exclusive => {
                unlock_exclusive(&self.io, &self.layout, lock, self.holder).await
            }
            LockMode::Shared => {
                let member = self.options.read_member;
                unlock_shared(&self.io, &self.layout, lock, member, self.holder).await
            }
        }
    }
}

/// Opens the log where its heads are. An even epoch is given back only with an empty log, and
/// records of earlier epochs are none in this one.
async fn open_log<M: GroupMemory>(
    io: &Io<M>,
    layout: Layout,
    client: u32,
    epoch: u64,
) -> Result<RedoLog, GroupError> {
    let slot = layout.slot_at(client);
    let head = io.read_word(0, slot + SLOT_HEAD).await?;
    let seed = io.read_word(0, slot + SLOT_SEED).await?;
    for member in 0..io.members() {
        let same = head == io.read_word(member, slot + SLOT_HEAD).await?
            && seed == io.read_word(member, slot + SLOT_SEED).await?;
        if !same || !head.is_multiple_of(64) || head >= MAX_POSITION {
            return Err(GroupError::InUse { client, epoch });
        }
    }
    let name = LogName { seed, epoch };
    Ok(RedoLog::empty(layout, client, name, head))
}

/// An open transaction. Dropped without [`commit`](Transaction::commit) or
/// [`abort`](Transaction::abort) it changes nothing, and its locks stay until the client's next
/// call.
pub struct Transaction<'c, M: GroupMemory> {
    client: &'c mut Client<M>,
    held: BTreeMap<u32, LockMode>,
    updates: Vec<Update>,
}

impl<M: GroupMemory> Transaction<'_, M> {
    async fn lock(&mut self, wanted: BTreeMap<u32, LockMode>) -> Result<(), GroupError> {
        let Client {
            io,
            layout,
            holder,
            options,
            ..
        } = &*self.client;
        for (lock, mode) in wanted {
            match mode {
                LockMode::Exclusive => {
                    lock_exclusive(io, layout, lock, *holder, options.lock).await?;
                }
                LockMode::Shared => {
                    let member = options.read_member;
                    lock_shared(io, layout, lock, member, *holder, options.lock).await?;
                }
            }
            self.held.insert(lock, mode);
        }
        Ok(())
    }

    /// Reads data; this transaction's own writes are in it.
    pub async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, GroupError> {
        let mut bytes = self.client.peek(offset, len).await?;
        for update in &self.updates {
            let start = update.offset.max(offset);
            let end = (update.offset + update.bytes.len() as u64).min(offset + len);
            if start < end {
                let from = (start - update.offset) as usize..(end - update.offset) as usize;
                let to = (start - offset) as usize..(end - offset) as usize;
                bytes[to].copy_from_slice(&update.bytes[from]);
            }
        }
        Ok(bytes)
    }

    /// Writes data when the transaction commits. Later writes go over earlier ones.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), GroupError> {
        let len = bytes.len() as u64;
        self.client.layout.data_range(offset, len)?;
        self.updates.push(Update {
            offset,
            bytes: bytes.to_vec(),
        });
        Ok(())
    }

    /// Commits: all of the writes, or, if this fails with anything but [`GroupError::Broken`] or
    /// [`GroupError::LockLost`], none. After those two the outcome is whatever a recovery finds.
    pub async fn commit(mut self) -> Result<(), GroupError> {
        if self.updates.is_empty() {
            return self.release().await;
        }
        if let Err(error) = self.make_room().await {
            self.release().await?;
            return Err(error);
        }
        let updates = std::mem::take(&mut self.updates);
        let client = &mut *self.client;
        // Nothing is executed and no lock is given back before the record is everywhere: neither
        // may what one member shows be undone by its loss, nor may one that loses power keep half
        // of an execution that no log knows of.
        let durable = client.options.durability == Durability::Critical;
        client.log.append(&client.io, &updates, durable).await?;
        if !durable && client.options.processing == LogProcessing::Critical {
            run_all(&client.io, client.log.execute()).await?;
        }
        client.unsettled += 1;
        let options = client.options;
        if options.durability == Durability::Critical
            && options.processing == LogProcessing::Critical
        {
            return self.execute().await;
        }
        for (lock, mode) in std::mem::take(&mut self.held) {
            match mode {
                LockMode::Exclusive => drop(self.client.retained.insert(lock)),
                LockMode::Shared => self.client.release_one(lock, mode).await?,
            }
        }
        Ok(())
    }

    /// Gives the locks back; nothing was changed.
    pub async fn abort(mut self) -> Result<(), GroupError> {
        self.updates.clear();
        self.release().await
    }

    async fn make_room(&mut self) -> Result<(), GroupError> {
        let client = &mut *self.client;
        let full = !client.log.has_room(&self.updates)?;
        if full || client.unsettled >= client.options.max_unsettled.max(1) {
            // The retained locks may be among those this transaction stands on: they are kept.
            let retained = std::mem::take(&mut client.retained);
            for lock in retained {
                self.held.insert(lock, LockMode::Exclusive);
            }
            client.settle().await?;
        }
        Ok(())
    }

    /// Executes the record, moves the head and unlocks, in one go.
    async fn execute(&mut self) -> Result<(), GroupError> {
        let client = &mut *self.client;
        let held = std::mem::take(&mut self.held);
        let exclusive =
            |(lock, mode): (&u32, &LockMode)| (*mode == LockMode::Exclusive).then_some(*lock);
        let locks: BTreeSet<u32> = held.iter().filter_map(exclusive).collect();
        let mut operations = client.log.execute();
        operations.extend(client.log.advance());
        let unlocks_at = operations.len();
        operations.extend(client.unlock_operations(locks.iter())?);
        let answers = run_all(&client.io, operations).await?;
        client.log.advanced();
        client.unsettled = 0;
        client.check_unlocked(locks.iter(), &answers[unlocks_at.min(answers.len())..])?;
        for (lock, mode) in held {
            if mode == LockMode::Shared {
                client.release_one(lock, mode).await?;
            }
        }
        Ok(())
    }

    async fn release(&mut self) -> Result<(), GroupError> {
        while let Some((&lock, &mode)) = self.held.first_key_value() {
            self.client.release_one(lock, mode).await?;
            self.held.remove(&lock);
        }
        Ok(())
    }
}

impl<M: GroupMemory> Drop for Transaction<'_, M> {
    fn drop(&mut self) {
        self.client.dropped.append(&mut self.held);
    }
}

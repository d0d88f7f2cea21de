//! A bank in group memory over shared memory, between processes that are killed with SIGKILL:
//! clients in the middle of transactions, members under load. Whatever dies, no money is made or
//! lost, members end up alike, and what was reported to a client as committed stays.
//!
//! `CYCLONE_SEED=n` repeats the choices; which instruction a kill meets is the machine's.
//! `CYCLONE_KILLS=n` runs longer.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use cyclone_fabric::shm::{Memory, ShmConfig, ShmEndpoint};
use cyclone_fabric::{Address, MemoryKey, Token};
use cyclone_replication::group::{
    Client, ClientOptions, Durability, Group, GroupError, GroupMember, GroupOp, GroupOptions, Io,
    Layout, LayoutSpec, LogProcessing, block_on, recover_all, recover_client,
};

const MEMORY_BYTES: u64 = 128 << 10;
const ACCOUNTS: u64 = 8;
const START: u64 = 1_000_000;
/// Words that each client fills with the number of its last transfer: executing a transaction takes
/// a while.
const RECEIPTS: u64 = 150;
const CLIENTS: u32 = 3;
const OPERATOR: u32 = 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// A client's end when its group broke.
const BROKEN: i32 = 30;

const SPEC: LayoutSpec = LayoutSpec {
    group: 0xba2c,
    locks: ACCOUNTS as u32 + CLIENTS,
    clients: CLIENTS,
    log_bytes: 16 << 10,
};

struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let word = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ word >> 31) % bound
    }
}

fn number(name: &str, otherwise: u64) -> u64 {
    let value = std::env::var(name)
        .ok()
        .and_then(|value| value.parse().ok());
    value.unwrap_or(otherwise)
}

/// Not a test, but the other processes of the one below.
#[test]
#[ignore = "the other processes of the test in this file"]
fn other_process() {
    let Some(directory) = std::env::var_os("GROUP_DIRECTORY").map(PathBuf::from) else {
        return;
    };
    let name = std::env::var("GROUP_NAME").expect("name");
    let first = std::env::var("GROUP_FIRST").expect("first");
    match std::env::var("GROUP_ROLE").as_deref() {
        Ok("member") => be_member(&directory, &name, first == "kept"),
        Ok("client") => be_client(&directory, &name, &first),
        other => panic!("no role {other:?}"),
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Who reads may be gone; then this process is not wanted either.
    let said = writeln!(out, "{line}").and_then(|()| out.flush());
    if said.is_err() {
        std::process::exit(1);
    }
}

/// Registers and revokes as it is instructed, and sleeps otherwise: operations need nothing of it.
fn be_member(directory: &Path, name: &str, kept: bool) {
    let config = ShmConfig {
        memory: if kept { Memory::Kept } else { Memory::Zeroed },
        stalled_wait: Duration::from_secs(10),
        ..ShmConfig::new(MEMORY_BYTES)
    };
    let endpoint = ShmEndpoint::open(directory, name, config).expect("endpoint");
    let mut member = GroupMember::new(Box::new(endpoint), 0, MEMORY_BYTES, 40).expect("member");
    say(&format!("address {}", hex(&member.address().0)));
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["grant", client, token] => {
                let token = Token(token.parse().expect("token"));
                let key = member.grant(client.parse().expect("client"), token);
                say(&format!("key {}", hex(&key.expect("grant").encode())));
            }
            ["fence", client] => {
                member
                    .fence_off(client.parse().expect("client"))
                    .expect("fence");
                say("fenced");
            }
            ["fence"] => {
                member.fence_off_all().expect("fence");
                say("fenced");
            }
            _ => panic!("{line:?}"),
        }
    }
}

/// Transfers without end; says `ack n` behind the n-th. The first line it is given is its keys.
fn be_client(directory: &Path, name: &str, first: &str) {
    let number: u32 = first.parse().expect("client");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("keys");
    let fields: Vec<&str> = line.trim().split(' ').collect();
    let seed = fields[0].parse().expect("seed");
    let keys: Vec<(Address, MemoryKey)> = fields[1..].chunks(2).map(decode_key).collect();
    let processing = [LogProcessing::Critical, LogProcessing::Deferred][seed as usize % 2];
    let options = ClientOptions {
        durability: Durability::Critical,
        processing,
        read_member: seed as usize % keys.len(),
        max_unsettled: 5,
        ..ClientOptions::default()
    };
    let io = open(directory, name, &keys);
    let outcome = block_on(transfer_on(io, number, options, Dice(seed)));
    match outcome {
        Err(GroupError::Broken(_) | GroupError::Fabric(_)) => std::process::exit(BROKEN),
        other => panic!("client {number}: {other:?}"),
    }
}

async fn transfer_on(
    io: Io<Group>,
    number: u32,
    options: ClientOptions,
    mut dice: Dice,
) -> Result<(), GroupError> {
    let mut client = Client::attach(io, number, options).await?;
    say("attached");
    loop {
        match transfer(&mut client, number, &mut dice).await {
            Ok(count) => say(&format!("ack {count}")),
            Err(GroupError::Locked { .. }) => {}
            Err(other) => return Err(other),
        }
    }
}

/// Moves money between two accounts and counts itself; answers the count.
async fn transfer(
    client: &mut Client<Group>,
    number: u32,
    dice: &mut Dice,
) -> Result<u64, GroupError> {
    let from = dice.below(ACCOUNTS);
    let to = (from + 1 + dice.below(ACCOUNTS - 1)) % ACCOUNTS;
    let own = ACCOUNTS + u64::from(number);
    let locks = [from as u32, to as u32, own as u32];
    let mut transaction = client.begin(&locks, &[]).await?;
    let mut words = [0; 3];
    for (word, place) in words.iter_mut().zip([from, to, own]) {
        let bytes = transaction.read(place * 8, 8).await?;
        *word = u64::from_le_bytes(*bytes.first_chunk().expect("a word"));
    }
    let amount = dice.below(10).min(words[0]);
    let after = [words[0] - amount, words[1] + amount, words[2] + 1];
    for (word, place) in after.iter().zip([from, to, own]) {
        transaction.write(place * 8, &word.to_le_bytes())?;
    }
    for receipt in 0..RECEIPTS {
        transaction.write(receipt_at(number, receipt), &after[2].to_le_bytes())?;
    }
    transaction.commit().await?;
    Ok(after[2])
}

/// Where a client's receipt is in the data; every other word, so that no copy covers two.
fn receipt_at(client: u32, receipt: u64) -> u64 {
    1024 + (u64::from(client) * RECEIPTS + receipt) * 16
}

fn open(directory: &Path, name: &str, keys: &[(Address, MemoryKey)]) -> Io<Group> {
    let endpoint = ShmEndpoint::open(directory, name, ShmConfig::new(4096)).expect("endpoint");
    let group = Group::open(Box::new(endpoint), keys, GroupOptions::default());
    match group {
        Ok(group) => Io::new(group),
        Err(_) => std::process::exit(BROKEN),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = (0..text.len() / 2).map(|n| &text[n * 2..n * 2 + 2]);
    let byte = |digits| u8::from_str_radix(digits, 16).expect("hex");
    digits.map(byte).collect()
}

fn decode_key(fields: &[&str]) -> (Address, MemoryKey) {
    let key = unhex(fields[1]);
    let key = key.first_chunk().expect("a key");
    (Address(unhex(fields[0])), MemoryKey::decode(key))
}

/// Another process, killed when dropped, and the lines it says.
struct Other {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Other {
    fn start(directory: &Path, role: &str, name: &str, first: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--ignored", "--exact", "other_process", "--nocapture"])
            .env("GROUP_DIRECTORY", directory)
            .env("GROUP_ROLE", role)
            .env("GROUP_NAME", name)
            .env("GROUP_FIRST", first)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("another process");
        let input = child.stdin.take().expect("piped");
        let output = child.stdout.take().expect("piped");
        let (said, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if said.send(line).is_err() {
                    return;
                }
            }
        });
        Other {
            child,
            input,
            lines,
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("it listens");
    }

    /// The rest of the next line that begins so; the test harness says things too.
    fn hear(&self, begin: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).expect(begin);
            if let Some(rest) = line.strip_prefix(begin) {
                return rest.trim().to_owned();
            }
        }
    }

    fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("ended");
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Member {
    process: Other,
    name: String,
    address: String,
}

struct TransferClient {
    process: Other,
    /// The last transfer that was reported to it as committed.
    acknowledged: u64,
}

impl TransferClient {
    fn take(&mut self, line: &str) {
        if let Some(count) = line.strip_prefix("ack ") {
            self.acknowledged = count.parse().expect("a count");
        }
    }

    fn catch_up(&mut self) {
        while let Ok(line) = self.process.lines.try_recv() {
            self.take(&line);
        }
    }

    /// The same once it is dead and all it said has arrived.
    fn last_words(&mut self) -> u64 {
        while let Ok(line) = self.process.lines.recv_timeout(PATIENCE) {
            self.take(&line);
        }
        self.acknowledged
    }

    fn wait_for_progress(&mut self) {
        let (until, from) = (Instant::now() + PATIENCE, self.acknowledged);
        while self.acknowledged < from + 3 {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.process.lines.recv_timeout(left).expect("progress");
            self.take(&line);
        }
    }
}

struct Bank {
    directory: tempfile::TempDir,
    members: Vec<Member>,
    transfer_clients: Vec<TransferClient>,
    /// By client: what was reported to any of its lives.
    promised: [u64; CLIENTS as usize],
    dice: Dice,
    names: u32,
    replayed: u64,
    unlocked: u64,
}

impl Bank {
    fn name(&mut self, of: &str) -> String {
        self.names += 1;
        format!("{of}{}", self.names)
    }

    fn start_member(&self, name: &str, kept: bool) -> Member {
        let how = if kept { "kept" } else { "blank" };
        let process = Other::start(self.directory.path(), "member", name, how);
        let address = process.hear("address ");
        Member {
            process,
            name: name.to_owned(),
            address,
        }
    }

    /// A client's keys at all members, as it receives them.
    fn grant(&mut self, client: u32) -> String {
        let token = self.dice.below(u64::MAX);
        let mut keys = Vec::new();
        for member in &mut self.members {
            member.process.tell(&format!("grant {client} {token}"));
            keys.push(format!(
                "{} {}",
                member.address,
                member.process.hear("key ")
            ));
        }
        keys.join(" ")
    }

    fn fence(&mut self, whom: &str) {
        for member in &mut self.members {
            member.process.tell(&format!("fence{whom}"));
            member.process.hear("fenced");
        }
    }

    fn operator(&mut self) -> Io<Group> {
        let keys = self.grant(OPERATOR);
        let keys: Vec<&str> = keys.split(' ').collect();
        let keys: Vec<_> = keys.chunks(2).map(decode_key).collect();
        let name = self.name("operator");
        open(self.directory.path(), &name, &keys)
    }

    fn start_transfer_client(&mut self, client: u32) -> TransferClient {
        let keys = self.grant(client);
        let name = self.name("client");
        let mut process = Other::start(self.directory.path(), "client", &name, &client.to_string());
        let seed = self.dice.below(1 << 40);
        process.tell(&format!("{seed} {keys}"));
        process.hear("attached");
        TransferClient {
            process,
            acknowledged: self.promised[client as usize],
        }
    }

    fn open_for_business(&mut self) {
        for client in 0..CLIENTS {
            let client_process = self.start_transfer_client(client);
            self.transfer_clients.push(client_process);
        }
    }

    /// A client dies in the middle of whatever it does; the others go on while it is recovered.
    fn kill_a_client(&mut self) {
        let victim = self.dice.below(u64::from(CLIENTS)) as usize;
        self.transfer_clients[victim].process.kill();
        self.promised[victim] = self.transfer_clients[victim].last_words();
        self.fence(&format!(" {victim}"));
        let io = self.operator();
        let recovered = block_on(recover_client(&io, victim as u32)).expect("recovery");
        println!("client {victim} killed: {recovered:?}");
        self.replayed += recovered.replayed;
        self.unlocked += recovered.unlocked;
        let count = block_on(count_of(&io, victim as u32)).expect("read");
        let told = self.promised[victim];
        assert!(
            (told..=told + 1).contains(&count),
            "client {victim} received {told}, finds {count}"
        );
        self.transfer_clients[victim] = self.start_transfer_client(victim as u32);
    }

    /// A member dies, and with it the group; it comes back with its memory, or is left out, or a
    /// blank one takes its place.
    fn kill_a_member(&mut self) {
        let victim = self.dice.below(self.members.len() as u64) as usize;
        self.members[victim].process.kill();
        let fate = self.dice.below(3);
        for (client_process, client) in self.transfer_clients.iter_mut().zip(0..) {
            let end = client_process.process.child.wait().expect("ended");
            assert_eq!(end.code(), Some(BROKEN), "client {client}");
            self.promised[client] = client_process.last_words();
        }
        self.transfer_clients.clear();
        let name = self.members.remove(victim).name;
        let member = match fate {
            0 => Some(self.start_member(&name, true)),
            1 if self.members.len() > 1 => None,
            _ => {
                let name = self.name("member");
                Some(self.start_member(&name, false))
            }
        };
        let is_left_out = member.is_none();
        self.members.extend(member);
        self.recover_all(&format!("member {victim} killed, fate {fate}"));
        if is_left_out {
            self.open_for_business();
            self.transfer_clients[0].wait_for_progress();
            self.close();
            // It comes back with what it had when it died: too old to be believed.
            let member = self.start_member(&name, true);
            self.members.push(member);
            self.recover_all("and back");
        }
        self.open_for_business();
    }

    /// Ends all clients, in the middle of whatever they do.
    fn close(&mut self) {
        for (client_process, client) in self.transfer_clients.iter_mut().zip(0..) {
            client_process.process.kill();
            self.promised[client] = client_process.last_words();
        }
        self.transfer_clients.clear();
    }

    fn recover_all(&mut self, why: &str) {
        self.fence("");
        let io = self.operator();
        let recovered = block_on(recover_all(&io)).expect("recovery");
        println!("{why}: {recovered:?}");
        self.check();
    }

    /// No client is at work: all members are alike, and nothing is missing.
    fn check(&self) {
        let images: Vec<Vec<u8>> = self.members.iter().map(|m| self.image(&m.name)).collect();
        let layout = Layout::decode(&images[0], MEMORY_BYTES).expect("a layout");
        let data = |image: &[u8]| image[layout.data_at() as usize..].to_vec();
        let first = data(&images[0]);
        for (image, member) in images.iter().zip(&self.members) {
            assert!(data(image) == first, "{} differs", member.name);
            assert_eq!(Layout::decode(image, MEMORY_BYTES), Some(layout));
            let locks = &image[layout.locks_at() as usize..layout.log_at(0) as usize];
            assert!(locks.iter().all(|byte| *byte == 0), "a lock is left");
        }
        let words = first.as_chunks::<8>().0;
        let word = |n: u64| u64::from_le_bytes(words[n as usize]);
        assert_eq!((0..ACCOUNTS).map(word).sum::<u64>(), ACCOUNTS * START);
        for (client, &told) in (0..).zip(&self.promised) {
            let count = word(ACCOUNTS + u64::from(client));
            for receipt in 0..RECEIPTS {
                let found = word(receipt_at(client, receipt) / 8);
                assert_eq!(found, count, "a part of a transfer of client {client}");
            }
            assert!(
                (told..=told + 1).contains(&count),
                "client {client} received {told}, finds {count}"
            );
        }
    }

    fn image(&self, name: &str) -> Vec<u8> {
        let path = self.directory.path().join(format!("{name}.mem"));
        std::fs::read(path).expect("a member's memory")
    }
}

async fn count_of(io: &Io<Group>, client: u32) -> Result<u64, GroupError> {
    let layout = Layout::of_group(io).await?;
    let at = layout.data_range((ACCOUNTS + u64::from(client)) * 8, 8)?;
    io.read_word(0, at).await
}

fn bank(seed: u64) -> Bank {
    let shared = Path::new("/dev/shm");
    let directory = match shared.is_dir() {
        true => tempfile::tempdir_in(shared),
        false => tempfile::tempdir(),
    };
    let mut bank = Bank {
        directory: directory.expect("directory"),
        members: Vec::new(),
        transfer_clients: Vec::new(),
        promised: [0; CLIENTS as usize],
        dice: Dice(seed),
        names: 0,
        replayed: 0,
        unlocked: 0,
    };
    for _ in 0..3 {
        let name = bank.name("member");
        let member = bank.start_member(&name, false);
        bank.members.push(member);
    }
    let io = bank.operator();
    let balances: Vec<u8> = (0..ACCOUNTS).flat_map(|_| START.to_le_bytes()).collect();
    let seeds: Vec<u64> = (0..CLIENTS).map(|_| bank.dice.below(u64::MAX)).collect();
    block_on(async {
        let layout = Layout::format(&io, SPEC, &seeds).await?;
        io.post(io.writes(layout.data_at(), &balances)).await?;
        io.run(GroupOp::Flush).await
    })
    .expect("format");
    bank
}

#[test]
fn money_survives_the_death_of_clients_and_members() {
    let seed = number("CYCLONE_SEED", 1);
    let kills = number("CYCLONE_KILLS", 24);
    println!("CYCLONE_SEED={seed} CYCLONE_KILLS={kills}");
    let mut bank = bank(seed);
    bank.open_for_business();
    for n in 0..kills {
        for client_process in &mut bank.transfer_clients {
            client_process.catch_up();
        }
        let client = bank.dice.below(u64::from(CLIENTS)) as usize;
        bank.transfer_clients[client].wait_for_progress();
        std::thread::sleep(Duration::from_micros(bank.dice.below(3_000)));
        if n % 4 == 3 {
            bank.kill_a_member();
        } else {
            bank.kill_a_client();
        }
    }
    bank.close();
    bank.recover_all("closed");
    println!("transfers: {:?}", bank.promised);
    let (replayed, unlocked) = (bank.replayed, bank.unlocked);
    println!("{replayed} records replayed, {unlocked} locks broken");
    assert!(bank.promised.iter().sum::<u64>() > kills);
    assert!(
        unlocked > 0,
        "no process was killed in the middle of anything"
    );
}

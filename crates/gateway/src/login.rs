//! Users and their hashed passwords. Argon2 costs tens of milliseconds and of megabytes by
//! intention, so it is computed by one separate thread, which serves addresses in turn; a password
//! that was right once is recognised by a keyed digest, in the loop, from then on.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use argon2::password_hash::{PasswordHash, PasswordHasher as _, PasswordVerifier as _, SaltString};
use argon2::{Argon2, Params};
use cyclone_wire::resp::Protocol;
use hmac::{Hmac, KeyInit as _, Mac as _};
use mio::unix::pipe;
use mio::{Interest, Registry, Token};
use queue::{LoginRequest, Queue, Waiting};
use sha2::Sha256;

mod queue;

/// Most memory a stored hash may ask for, in KiB, and most rounds.
const MOST_MEMORY_KIB: u32 = 256 * 1024;
const MOST_ROUNDS: u32 = 32;
/// Longest password that is checked, in bytes.
const LONGEST: usize = 512;

/// Users by name, each with the hashes of the passwords that are accepted. All users may do
/// everything.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Users(BTreeMap<Vec<u8>, Vec<String>>);

impl fmt::Debug for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Users({})", self.0.len())
    }
}

/// What is wrong with a file of users.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UsersError {
    /// A line is not `NAME:HASH`.
    #[error("line {0}: expected NAME:HASH")]
    Line(usize),
    /// A hash is not one of Argon2 in PHC format.
    #[error("line {line}: {reason}")]
    Hash {
        /// The line, from 1.
        line: usize,
        /// What is wrong; never the hash itself.
        reason: String,
    },
}

fn check(hash: &str) -> Result<(), String> {
    let parsed = PasswordHash::new(hash).map_err(|error| format!("not a PHC hash: {error}"))?;
    if !["argon2id", "argon2i", "argon2d"].contains(&parsed.algorithm.as_str()) {
        return Err(format!(
            "algorithm {}: expected argon2id",
            parsed.algorithm.as_str()
        ));
    }
    let params = Params::try_from(&parsed).map_err(|error| error.to_string())?;
    if params.m_cost() > MOST_MEMORY_KIB || params.t_cost() > MOST_ROUNDS {
        return Err(format!(
            "m={},t={} is more than m={MOST_MEMORY_KIB},t={MOST_ROUNDS}",
            params.m_cost(),
            params.t_cost()
        ));
    }
    if parsed.hash.is_none() || parsed.salt.is_none() {
        return Err("salt or hash is missing".to_owned());
    }
    Ok(())
}

impl Users {
    /// Reads lines `NAME:HASH`; a name may occur again with another hash. Empty lines and lines
    /// from `#` on are skipped.
    ///
    /// # Errors
    /// The first line that is neither.
    pub fn parse(text: &str) -> Result<Users, UsersError> {
        let mut users = Users::default();
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.trim();
            if content.is_empty() || content.starts_with('#') {
                continue;
            }
            let (name, hash) = content
                .split_once(':')
                .filter(|(name, _)| !name.is_empty())
                .ok_or(UsersError::Line(line))?;
            check(hash).map_err(|reason| UsersError::Hash { line, reason })?;
            users
                .0
                .entry(name.as_bytes().to_vec())
                .or_default()
                .push(hash.to_owned());
        }
        Ok(users)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of the user's hashes is of this password. An unknown name costs as much as a
    /// known one, so that names cannot be found out by the time taken.
    fn verify(&self, user: &[u8], password: &[u8]) -> bool {
        let Some(some) = self.0.values().next() else {
            return false;
        };
        let known = self.0.get(user);
        let verified_digest = known.unwrap_or(some).iter().any(|hash| {
            PasswordHash::new(hash)
                .is_ok_and(|hash| Argon2::default().verify_password(password, &hash).is_ok())
        });
        verified_digest && known.is_some()
    }
}

/// Hashes a password for a file of users: Argon2id with a fresh salt.
///
/// # Errors
/// When the system gives no randomness, or the password is longer than 512 bytes.
pub fn hash_password(password: &[u8]) -> io::Result<String> {
    if password.len() > LONGEST {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a password has at most {LONGEST} bytes"),
        ));
    }
    let mut salt = [0; 16];
    fill(&mut salt)?;
    let failed = |error: argon2::password_hash::Error| io::Error::other(error.to_string());
    let salt = SaltString::encode_b64(&salt).map_err(failed)?;
    let hash = Argon2::default().hash_password(password, &salt);
    Ok(hash.map_err(failed)?.to_string())
}

fn fill(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty())?;
        bytes = &mut bytes[count..];
    }
    Ok(())
}

/// Compares without telling by the time taken where they differ.
pub(crate) fn same_secret(a: &[u8], b: &[u8]) -> bool {
    let longest = a.len().max(b.len());
    let mut differ = u8::from(a.len() != b.len());
    for index in 0..longest {
        differ |= a.get(index).unwrap_or(&0) ^ b.get(index).unwrap_or(&0);
    }
    std::hint::black_box(differ) == 0
}

/// Digests of logins that were right, under a key that only this process has.
#[derive(Clone)]
struct VerifiedLogins {
    key: [u8; 32],
    digests: Vec<[u8; 32]>,
}

impl VerifiedLogins {
    fn digest(&self, user: &[u8], password: &[u8]) -> [u8; 32] {
        // Any key length is taken by HMAC.
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(&self.key) else {
            return [0; 32];
        };
        mac.update(&(user.len() as u64).to_le_bytes());
        mac.update(user);
        mac.update(password);
        mac.finalize().into_bytes().into()
    }

    fn holds(&self, digest: &[u8; 32]) -> bool {
        self.digests
            .iter()
            .fold(false, |found, one| same_secret(one, digest) | found)
    }

    /// There are at most as many as there are hashes in the file.
    fn learn(&mut self, digest: [u8; 32]) {
        if !self.holds(&digest) {
            self.digests.push(digest);
        }
    }
}

/// What a connection waits for between AUTH (or HELLO) and its reply.
#[derive(Clone, Debug)]
pub(crate) struct PendingLogin {
    /// What it was asked under.
    pub(crate) ticket: u64,
    /// HELLO: the protocol and the name to be set.
    pub(crate) hello: Option<(Protocol, Option<Vec<u8>>)>,
    /// Who logs in.
    pub(crate) user: Vec<u8>,
    /// The client wants no reply.
    pub(crate) quiet: bool,
    /// Others go first.
    pub(crate) deferred: bool,
}

struct Answer {
    ticket: u64,
    verified_digest: Option<[u8; 32]>,
    /// By which users.
    generation: u64,
}

/// The users whose passwords are accepted; each exchange begins a generation.
struct CurrentUsers(Mutex<(u64, Arc<Users>)>);

impl CurrentUsers {
    fn get(&self) -> (u64, Arc<Users>) {
        let now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (now.0, Arc::clone(&now.1))
    }

    fn set(&self, generation: u64, users: Users) {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *now = (generation, Arc::new(users));
    }
}

/// What was found out about a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Right,
    Wrong,
    /// It was not checked: others that had fewer waiting needed its place.
    Displaced,
}

/// How a login that was handed in goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AskOutcome {
    /// Right: it was right before.
    Right,
    /// Certainly wrong.
    Wrong,
    /// The thread checks it; the answer comes under the ticket.
    Later,
    /// Too many wait.
    Busy,
}

/// The thread that computes Argon2, and what it has found out.
pub(crate) struct Logins {
    known: VerifiedLogins,
    current_users: Arc<CurrentUsers>,
    generation: u64,
    login_queue: Arc<Queue>,
    /// Tickets of those that lost their places.
    displaced: Vec<u64>,
    answers: Receiver<Answer>,
    bell: pipe::Receiver,
}

impl Logins {
    /// Starts the thread; it ends when this is dropped. Its answers make `token` readable.
    pub(crate) fn start(users: Users, registry: &Registry, token: Token) -> io::Result<Logins> {
        let mut key = [0; 32];
        fill(&mut key)?;
        let known = VerifiedLogins {
            key,
            digests: Vec::new(),
        };
        let (ring, mut bell) = pipe::new()?;
        registry.register(&mut bell, token, Interest::READABLE)?;
        let login_queue = Arc::new(Queue::default());
        let asked = Arc::clone(&login_queue);
        let (answered, answers) = sync_channel(queue::MOST);
        let own = known.clone();
        let current_users = Arc::new(CurrentUsers(Mutex::new((0, Arc::new(users)))));
        let users = Arc::clone(&current_users);
        std::thread::Builder::new()
            .name("cyclone-login".to_owned())
            .spawn(move || {
                // Without the thread no login may wait.
                let asked = CloseOnDrop(asked);
                answer(&users, own, &asked.0, &answered, ring);
            })?;
        Ok(Logins {
            known,
            current_users,
            generation: 0,
            login_queue,
            displaced: Vec::new(),
            answers,
            bell,
        })
    }

    /// Other users from now on: what was right is checked again. The login being checked may be
    /// decided by either.
    pub(crate) fn renew(&mut self, users: Users) {
        self.generation += 1;
        self.known.digests.clear();
        self.current_users.set(self.generation, users);
    }

    /// Asks whether a login is right.
    pub(crate) fn ask(
        &mut self,
        ticket: u64,
        peer: IpAddr,
        user: &[u8],
        password: &[u8],
    ) -> AskOutcome {
        if user.len() > LONGEST || password.len() > LONGEST {
            return AskOutcome::Wrong;
        }
        if self.known.holds(&self.known.digest(user, password)) {
            return AskOutcome::Right;
        }
        let question = LoginRequest {
            ticket,
            user: user.to_vec(),
            password: password.to_vec(),
        };
        match self
            .login_queue
            .change(|waiting| waiting.push(peer, question))
        {
            Err(_) => AskOutcome::Busy,
            Ok(displaced) => {
                self.displaced.extend(displaced);
                AskOutcome::Later
            }
        }
    }

    /// No client waits for the answer any more.
    pub(crate) fn forget(&mut self, ticket: u64, peer: IpAddr) {
        self.login_queue
            .change(|waiting| waiting.take(ticket, peer));
    }

    /// The client has sent its last byte, and most likely has gone: others come first.
    pub(crate) fn defer(&mut self, ticket: u64, peer: IpAddr) {
        self.login_queue
            .change(|waiting| waiting.defer(ticket, peer));
    }

    /// Whether there is an answer that no bell has rung for.
    pub(crate) fn has_answers(&self) -> bool {
        !self.displaced.is_empty()
    }

    /// The next answer, and the ticket it belongs to.
    pub(crate) fn next_answer(&mut self) -> Option<(u64, Verdict)> {
        if let Some(ticket) = self.displaced.pop() {
            return Some((ticket, Verdict::Displaced));
        }
        let answer = self.answers.try_recv().ok()?;
        if let Some(digest) = answer.verified_digest
            && answer.generation == self.generation
        {
            self.known.learn(digest);
        }
        let verdict = match answer.verified_digest {
            Some(_) => Verdict::Right,
            None => Verdict::Wrong,
        };
        Some((answer.ticket, verdict))
    }

    /// Hears the bell, before answers are fetched.
    pub(crate) fn drain_completions(&mut self) {
        let mut bytes = [0; 256];
        while matches!(self.bell.read(&mut bytes), Ok(count) if count > 0) {}
    }
}

impl Drop for Logins {
    fn drop(&mut self) {
        self.login_queue.change(Waiting::close);
    }
}

/// Closes the queue however the thread ends.
struct CloseOnDrop(Arc<Queue>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.change(Waiting::close);
    }
}

fn answer(
    current_users: &CurrentUsers,
    mut known: VerifiedLogins,
    asked: &Queue,
    answered: &SyncSender<Answer>,
    mut bell: pipe::Sender,
) {
    let mut last = 0;
    while let Some(question) = asked.next() {
        let (generation, users) = current_users.get();
        if generation != last {
            last = generation;
            known.digests.clear();
        }
        let digest = known.digest(&question.user, &question.password);
        // Many clients with one password may have come at once.
        let verified_digest =
            known.holds(&digest) || users.verify(&question.user, &question.password);
        if verified_digest {
            known.learn(digest);
        }
        let answer = Answer {
            ticket: question.ticket,
            verified_digest: verified_digest.then_some(digest),
            generation,
        };
        if answered.send(answer).is_err() {
            return;
        }
        // A full pipe rings already.
        let _ = bell.write(&[1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cheap on purpose.
    fn hash(password: &[u8]) -> String {
        let params = Params::new(8, 1, 1, None).unwrap();
        let argon2 = Argon2::new(argon2::Algorithm::Argon2id, argon2::Version::V0x13, params);
        let salt = SaltString::encode_b64(b"some salt").unwrap();
        argon2.hash_password(password, &salt).unwrap().to_string()
    }

    #[test]
    fn users_are_read_line_by_line() {
        let (first, second) = (hash(b"one"), hash(b"two"));
        let text = format!("# people\n\nada:{first}\n  ada:{second}\ndefault:{second}\n");
        let users = Users::parse(&text).unwrap();
        for (user, password, verified_digest) in [
            ("ada", "one", true),
            ("ada", "two", true),
            ("default", "two", true),
            ("default", "one", false),
            ("bob", "one", false),
            ("ada", "", false),
        ] {
            assert_eq!(
                users.verify(user.as_bytes(), password.as_bytes()),
                verified_digest,
                "{user} {password}"
            );
        }
        assert_eq!(format!("{users:?}"), "Users(2)");
    }

    #[test]
    fn bad_lines_are_named_and_secrets_are_not() {
        assert_eq!(Users::parse("\nada"), Err(UsersError::Line(2)));
        assert_eq!(Users::parse(":x"), Err(UsersError::Line(1)));
        for bad in [
            "hunter2",
            "$scrypt$ln=1,r=8,p=1$c2FsdHNhbHQ$c2FsdHNhbHQ",
            "$argon2id$v=19$m=999999999,t=1,p=1$c2FsdHNhbHQ$c2FsdHNhbHQ",
            "$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ",
        ] {
            let error = Users::parse(&format!("ada:{bad}")).unwrap_err();
            assert!(matches!(error, UsersError::Hash { line: 1, .. }), "{bad}");
            assert!(!error.to_string().contains("hunter2"));
        }
    }

    #[test]
    fn a_fresh_hash_is_accepted() {
        let users = Users::parse(&format!("ada:{}", hash_password(b"secret").unwrap())).unwrap();
        assert!(users.verify(b"ada", b"secret"));
        assert!(!users.verify(b"ada", b"Secret"));
        assert!(hash_password(&[b'x'; LONGEST + 1]).is_err());
    }
}

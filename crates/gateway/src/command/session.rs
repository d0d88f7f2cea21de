//! Commands about the connection itself.

use cyclone_wire::resp::{Protocol, encode, parse_i64};

use super::table::Id;
use super::{Context, Flow, NOT_INTEGER};
use crate::backend::{Backend, Route};
use crate::connection::{DEFAULT_USER, ReplyMode, Session};
use crate::gateway::Stats;
use crate::info::REDIS_VERSION;
use crate::login::{AskOutcome, PendingLogin, Verdict, same_secret};

const WRONG_PASSWORD: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const TOO_MANY_LOGINS: &str = "TRYAGAIN too many logins at a time, retry later";

const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";
/// Longest name of a client or its library, and longest version, in bytes: a connection keeps them.
pub(super) const MAX_NAME_BYTES: usize = 512;

pub(super) fn run(context: &mut Context<'_, '_>, id: Id) -> Flow {
    let args = context.args;
    match id {
        Id::Ping => match args.len() {
            1 => encode::simple(context.out, "PONG"),
            2 => encode::bulk(context.out, args.at(1)),
            _ => return context.wrong_arity("ping"),
        },
        Id::Echo => encode::bulk(context.out, args.at(1)),
        Id::Auth => return auth(context),
        Id::Hello => return hello(context),
        Id::Select => {
            return match parse_i64(args.at(1)) {
                Some(0) => context.ok(),
                Some(_) => context.error("ERR SELECT is not allowed in cluster mode"),
                None => context.error(NOT_INTEGER),
            };
        }
        Id::Quit => {
            context.session.closing = true;
            return context.ok();
        }
        Id::Reset => {
            let session = &mut *context.session;
            session.protocol = Protocol::Resp2;
            // Only who gives up a login has a new time to log in.
            if session.authenticated {
                session.unauthenticated_since_us = context.now_us;
            }
            session.authenticated = context.shared.config.is_open();
            session.name.clear();
            session.user = DEFAULT_USER.to_vec();
            // Where its own reply is to be skipped it is, as in Redis.
            if session.reply_mode == ReplyMode::Off {
                session.reply_set = Some(ReplyMode::On);
            }
            session.readonly = false;
            session.read_mode = None;
            session.holds_scans = false;
            session.no_evict = false;
            session.no_touch = false;
            super::transaction::forget(session);
            encode::simple(context.out, "RESET");
        }
        Id::ReadOnly | Id::ReadWrite => {
            context.session.readonly = id == Id::ReadOnly;
            return context.ok();
        }
        _ => return context.ok(),
    }
    Flow::Replied
}

/// What became of a login.
enum Login {
    Right,
    /// Its refusal has been answered.
    Refused,
    Later,
}

/// Tries to log in.
fn log_in(context: &mut Context<'_, '_>, user: &[u8], password: &[u8]) -> Login {
    let config = &context.shared.config;
    let known = config
        .passwords
        .iter()
        .fold(false, |known, one| same_secret(one, password) | known);
    if user == DEFAULT_USER && (known || config.is_open()) {
        context.session.authenticated = true;
        context.session.user = user.to_vec();
        context.shared.stats.logins += 1;
        return Login::Right;
    }
    let (ticket, peer) = (context.session.next_ticket(), context.session.peer.ip());
    let asked = match &mut context.shared.logins {
        Some(logins) => logins.ask(ticket, peer, user, password),
        None => AskOutcome::Wrong,
    };
    match asked {
        AskOutcome::Right => {
            context.session.authenticated = true;
            context.session.user = user.to_vec();
            context.shared.stats.logins += 1;
            Login::Right
        }
        AskOutcome::Later => Login::Later,
        AskOutcome::Wrong => {
            context.shared.stats.logins_refused += 1;
            context.error(WRONG_PASSWORD);
            Login::Refused
        }
        AskOutcome::Busy => {
            context.shared.stats.logins_busy += 1;
            context.error(TOO_MANY_LOGINS);
            Login::Refused
        }
    }
}

/// Answers a login that the thread has checked.
pub(crate) fn finish(
    stats: &mut Stats,
    session: &mut Session,
    pending_login: PendingLogin,
    verdict: Verdict,
    backend: &dyn Backend,
) {
    let before = session.out.len();
    match verdict {
        Verdict::Right => {
            stats.logins += 1;
            session.authenticated = true;
            session.user = pending_login.user;
            match pending_login.hello {
                None => encode::ok(&mut session.out),
                Some((protocol, name)) => {
                    let mut out = std::mem::take(&mut session.out);
                    greet(&mut out, session, protocol, name, backend);
                    session.out = out;
                }
            }
        }
        Verdict::Wrong => {
            stats.logins_refused += 1;
            encode::error(&mut session.out, WRONG_PASSWORD);
        }
        Verdict::Displaced => {
            stats.logins_busy += 1;
            encode::error(&mut session.out, TOO_MANY_LOGINS);
        }
    }
    if pending_login.quiet {
        session.out.truncate(before);
    }
}

/// AUTH [user] password
fn auth(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let (user, password) = match args.len() {
        2 if context.shared.config.is_open() => {
            return context.error(
                "ERR AUTH <password> called without any password configured for the default user. Are you sure your \
                 configuration is correct?",
            );
        }
        2 => (b"default".as_slice(), args.at(1)),
        3 => (args.at(1), args.at(2)),
        _ => return context.error(super::SYNTAX),
    };
    match log_in(context, user, password) {
        Login::Right => context.ok(),
        Login::Refused => Flow::Replied,
        Login::Later => defer_to_login_thread(context, user, None),
    }
}

/// The reply waits for the login thread; so does what the client sends meanwhile.
fn defer_to_login_thread(
    context: &mut Context<'_, '_>,
    user: &[u8],
    hello: Option<(Protocol, Option<Vec<u8>>)>,
) -> Flow {
    context.session.pending_login = Some(PendingLogin {
        ticket: context.session.next_ticket(),
        hello,
        user: user.to_vec(),
        quiet: false,
        deferred: false,
    });
    Flow::AwaitsLogin
}

/// Printable, without spaces: what names may consist of.
pub(super) fn is_plain(name: &[u8]) -> bool {
    name.iter().all(|byte| (b'!'..=b'~').contains(byte))
}

/// Whether an argument may be the client's name; otherwise an error has been answered.
pub(super) fn is_name(context: &mut Context<'_, '_>, at: usize) -> bool {
    let name = context.args.at(at);
    if !is_plain(name) {
        context.error(BAD_NAME);
        return false;
    }
    context.fits(name, "client name", MAX_NAME_BYTES)
}

/// HELLO [version [AUTH user password] [SETNAME name]]
fn hello(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let mut protocol = context.session.protocol;
    if args.len() > 1 {
        protocol = match parse_i64(args.at(1)) {
            Some(2) => Protocol::Resp2,
            Some(3) => Protocol::Resp3,
            Some(_) => return context.error("NOPROTO unsupported protocol version"),
            None => return context.error("ERR Protocol version is not an integer or out of range"),
        };
    }
    let (mut login, mut name) = (None, None);
    let mut at = 2;
    while at < args.len() {
        if context.is(at, "auth") && at + 2 < args.len() {
            login = Some((args.at(at + 1), args.at(at + 2)));
            at += 3;
        } else if context.is(at, "setname") && at + 1 < args.len() {
            if !is_name(context, at + 1) {
                return Flow::Replied;
            }
            name = Some(args.at(at + 1));
            at += 2;
        } else {
            let mut text = b"ERR Syntax error in HELLO option '".to_vec();
            text.extend_from_slice(args.at(at));
            text.push(b'\'');
            return context.error(text);
        }
    }
    if let Some((user, password)) = login {
        match log_in(context, user, password) {
            Login::Right => {}
            Login::Refused => return Flow::Replied,
            Login::Later => {
                return defer_to_login_thread(
                    context,
                    user,
                    Some((protocol, name.map(<[u8]>::to_vec))),
                );
            }
        }
    }
    if !context.session.authenticated {
        return context.error(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
             <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the \
             same time",
        );
    }
    let name = name.map(<[u8]>::to_vec);
    greet(
        context.out,
        context.session,
        protocol,
        name,
        context.backend,
    );
    Flow::Replied
}

/// HELLO's reply.
fn greet(
    out: &mut Vec<u8>,
    session: &mut Session,
    protocol: Protocol,
    name: Option<Vec<u8>>,
    backend: &dyn Backend,
) {
    if let Some(name) = name {
        session.name = name;
    }
    session.protocol = protocol;
    let role = if backend.route(0) == Route::Local {
        "master"
    } else {
        "replica"
    };
    encode::map(out, protocol, 7);
    for (field, value) in [("server", "redis"), ("version", REDIS_VERSION)] {
        encode::bulk(out, field);
        encode::bulk(out, value);
    }
    encode::bulk(out, "proto");
    encode::int(out, if protocol == Protocol::Resp3 { 3 } else { 2 });
    encode::bulk(out, "id");
    encode::int(out, session.id as i64);
    for (field, value) in [("mode", "cluster"), ("role", role)] {
        encode::bulk(out, field);
        encode::bulk(out, value);
    }
    encode::bulk(out, "modules");
    encode::array(out, 0);
}

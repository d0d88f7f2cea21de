//! Commands about the connection itself.

use cyclone_wire::resp::{Protocol, encode, parse_i64};

use super::table::Id;
use super::{Context, Flow, NOT_INTEGER};
use crate::backend::Route;
use crate::connection::ReplyMode;
use crate::info::REDIS_VERSION;

pub(super) const BAD_NAME: &str =
    "ERR Client names cannot contain spaces, newlines or special characters.";

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
            session.authenticated = context.shared.config.passwords.is_empty();
            session.name.clear();
            session.reply_mode = ReplyMode::On;
            session.readonly = false;
            session.read_mode = None;
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

/// Compares without telling by the time taken where they differ.
fn same_secret(a: &[u8], b: &[u8]) -> bool {
    let longest = a.len().max(b.len());
    let mut differ = u8::from(a.len() != b.len());
    for index in 0..longest {
        differ |= a.get(index).unwrap_or(&0) ^ b.get(index).unwrap_or(&0);
    }
    std::hint::black_box(differ) == 0
}

/// Tries to log in; answers whether it worked.
fn log_in(context: &mut Context<'_, '_>, user: &[u8], password: &[u8]) -> bool {
    let passwords = &context.shared.config.passwords;
    let known = passwords
        .iter()
        .fold(false, |known, one| same_secret(one, password) | known);
    let good = user == b"default" && (known || passwords.is_empty());
    if good {
        context.session.authenticated = true;
    } else {
        context.error("WRONGPASS invalid username-password pair or user is disabled.");
    }
    good
}

/// AUTH [user] password
fn auth(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let (user, password) = match args.len() {
        2 if context.shared.config.passwords.is_empty() => {
            return context.error(
                "ERR AUTH <password> called without any password configured for the default user. Are you sure your \
                 configuration is correct?",
            );
        }
        2 => (b"default".as_slice(), args.at(1)),
        3 => (args.at(1), args.at(2)),
        _ => return context.error(super::SYNTAX),
    };
    if log_in(context, user, password) {
        context.ok()
    } else {
        Flow::Replied
    }
}

/// Printable, without spaces: what names may consist of.
pub(super) fn is_plain(name: &[u8]) -> bool {
    name.iter().all(|byte| (b'!'..=b'~').contains(byte))
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
            if !is_plain(args.at(at + 1)) {
                return context.error(BAD_NAME);
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
    if let Some((user, password)) = login
        && !log_in(context, user, password)
    {
        return Flow::Replied;
    }
    if !context.session.authenticated {
        return context.error(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH \
             <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the \
             same time",
        );
    }
    if let Some(name) = name {
        context.session.name = name.to_vec();
    }
    context.session.protocol = protocol;
    let role = if context.backend.route(0) == Route::Local {
        "master"
    } else {
        "replica"
    };
    let out = &mut *context.out;
    encode::map(out, protocol, 7);
    for (field, value) in [("server", "redis"), ("version", REDIS_VERSION)] {
        encode::bulk(out, field);
        encode::bulk(out, value);
    }
    encode::bulk(out, "proto");
    encode::int(out, if protocol == Protocol::Resp3 { 3 } else { 2 });
    encode::bulk(out, "id");
    encode::int(out, context.session.id as i64);
    for (field, value) in [("mode", "cluster"), ("role", role)] {
        encode::bulk(out, field);
        encode::bulk(out, value);
    }
    encode::bulk(out, "modules");
    encode::array(out, 0);
    Flow::Replied
}

//! CLIENT.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use cyclone_wire::client::ReadMode;
use cyclone_wire::resp::{Protocol, encode, parse_i64};

use super::session::{MAX_NAME_BYTES, is_name, is_plain};
use super::transaction::Multi;
use super::{Context, Flow, SYNTAX, help};
use crate::connection::{ReplyMode, Session};

pub(super) fn run(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let sub = args.at(1).to_ascii_lowercase();
    match sub.as_slice() {
        b"id" => encode::int(context.out, context.session.id as i64),
        b"getname" => match context.session.name.as_slice() {
            [] => encode::null(context.out, context.session.protocol),
            name => encode::bulk(context.out, name),
        },
        b"setname" => {
            if !is_name(context, 2) {
                return Flow::Replied;
            }
            context.session.name = args.at(2).to_vec();
            return context.ok();
        }
        b"setinfo" => return set_info(context),
        b"no-evict" | b"no-touch" => {
            let on = context.is(2, "on");
            if !on && !context.is(2, "off") {
                return context.error(SYNTAX);
            }
            if sub == b"no-evict" {
                context.session.no_evict = on;
            } else {
                context.session.no_touch = on;
            }
            return context.ok();
        }
        b"reply" => {
            let mode = if context.is(2, "on") {
                ReplyMode::On
            } else if context.is(2, "off") {
                ReplyMode::Off
            } else if context.is(2, "skip") {
                ReplyMode::SkipNext
            } else {
                return context.error(SYNTAX);
            };
            let session = &mut *context.session;
            let before = session.reply_set.unwrap_or(session.reply_mode);
            // Silence outlasts a request for one skip.
            if before != ReplyMode::Off || mode != ReplyMode::SkipNext {
                session.reply_set = Some(mode);
            }
            if mode == ReplyMode::On {
                return context.ok();
            }
        }
        b"readmode" => return read_mode(context),
        b"scanmode" => return scan_mode(context),
        b"info" => {
            let mut text = String::new();
            line(
                &mut text,
                context.session,
                context.now_us,
                context.request_bytes,
            );
            encode::text(context.out, context.session.protocol, &text);
        }
        b"list" => return list(context),
        b"help" => return help::run(context, "CLIENT"),
        _ => return context.unknown_subcommand("CLIENT"),
    }
    Flow::Replied
}

/// CLIENT READMODE [INDEX | LOG | LEASE | WEAK | DEFAULT], our own: how this connection's reads are
/// answered. Without a mode it answers the one in force.
fn read_mode(context: &mut Context<'_, '_>) -> Flow {
    const MODES: [(&str, ReadMode); 4] = [
        ("index", ReadMode::Index),
        ("log", ReadMode::Log),
        ("lease", ReadMode::Lease),
        ("weak", ReadMode::Weak),
    ];
    match context.args.len() {
        2 => {
            let now = context.session.read_mode;
            let now = now.unwrap_or(context.shared.config.read_mode);
            let name = MODES.iter().find(|(_, mode)| *mode == now);
            encode::bulk(context.out, name.map_or("index", |(name, _)| *name));
            Flow::Replied
        }
        3 => {
            let chosen = MODES.iter().find(|(name, _)| context.is(2, name));
            if chosen.is_none() && !context.is(2, "default") {
                return context.error(SYNTAX);
            }
            context.session.read_mode = chosen.map(|(_, mode)| *mode);
            context.ok()
        }
        _ => context.wrong_arity("client|readmode"),
    }
}

/// CLIENT SCANMODE [LIVE | SNAPSHOT], our own: whether the scans that this connection begins show
/// one moment. Without a mode it answers the one in force.
fn scan_mode(context: &mut Context<'_, '_>) -> Flow {
    match context.args.len() {
        2 => {
            let holds = context.session.holds_scans;
            encode::bulk(context.out, if holds { "snapshot" } else { "live" });
            Flow::Replied
        }
        3 => {
            let holds = context.is(2, "snapshot");
            if !holds && !context.is(2, "live") {
                return context.error(SYNTAX);
            }
            context.session.holds_scans = holds;
            context.ok()
        }
        _ => context.wrong_arity("client|scanmode"),
    }
}

fn set_info(context: &mut Context<'_, '_>) -> Flow {
    let value = context.args.at(3);
    let names_library = context.is(2, "lib-name");
    let name = if names_library {
        "lib-name"
    } else if context.is(2, "lib-ver") {
        "lib-ver"
    } else {
        let mut text = b"ERR Unrecognized option '".to_vec();
        text.extend_from_slice(context.args.at(2));
        text.push(b'\'');
        return context.error(text);
    };
    if !is_plain(value) {
        return context.error(format!(
            "ERR {name} cannot contain spaces, newlines or special characters."
        ));
    }
    if !context.fits(value, name, MAX_NAME_BYTES) {
        return Flow::Replied;
    }
    match names_library {
        true => context.session.lib_name = value.to_vec(),
        false => context.session.lib_version = value.to_vec(),
    }
    context.ok()
}

/// CLIENT LIST [TYPE normal|...] [ID id ...]
fn list(context: &mut Context<'_, '_>) -> Flow {
    let args = context.args;
    let mut only: Option<BTreeSet<u64>> = None;
    let mut none = false;
    if args.len() == 4 && context.is(2, "type") {
        none = ["master", "replica", "slave", "pubsub"]
            .iter()
            .any(|kind| context.is(3, kind));
        if !none && !context.is(3, "normal") {
            let mut text = b"ERR Unknown client type '".to_vec();
            text.extend_from_slice(args.at(3));
            text.push(b'\'');
            return context.error(text);
        }
    } else if args.len() > 3 && context.is(2, "id") {
        let ids: Option<BTreeSet<u64>> = args
            .from(3)
            .map(|id| parse_i64(id).and_then(|id| u64::try_from(id).ok()))
            .collect();
        match ids {
            Some(ids) => only = Some(ids),
            None => return context.error("ERR Invalid client ID"),
        }
    } else if args.len() != 2 {
        return context.error(SYNTAX);
    }
    let mut text = String::new();
    let others = context.others.iter().map(|connection| &connection.session);
    let mut sessions: Vec<&Session> = others.chain([&*context.session]).collect();
    sessions.retain(|session| !none && only.as_ref().is_none_or(|ids| ids.contains(&session.id)));
    sessions.sort_by_key(|session| session.id);
    for session in sessions {
        let running = match session.id == context.session.id {
            true => context.request_bytes,
            false => 0,
        };
        line(&mut text, session, context.now_us, running);
    }
    encode::text(context.out, context.session.protocol, &text);
    Flow::Replied
}

/// One line of CLIENT LIST, in Redis's order of fields. `running` are the bytes of a request that
/// is not among the pending ones.
fn line(text: &mut String, session: &Session, now_us: u64, running: usize) {
    let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let seconds = |since_us| now_us.saturating_sub(since_us) / 1_000_000;
    let queued = session.multi.as_deref();
    let buffers = session.buffers();
    let arguments = session.request_bytes + running;
    let held = queued.map_or(0, Multi::held);
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "id={} addr={} laddr={} fd={} name={} age={} idle={} flags={} db=0 sub=0 psub=0 ssub=0 multi={} qbuf={arguments} \
         qbuf-free=0 argv-mem={arguments} multi-mem={held} rbs={} rbp={} obl={} oll={} omem={} tot-mem={} events={} \
         cmd={} user={} redir=-1 resp={} lib-name={} lib-ver={}",
        session.id,
        session.peer,
        session.local,
        session.fd,
        name(&session.name),
        seconds(session.created_us),
        seconds(session.active_us),
        flags(session),
        queued.map_or(-1, |multi| multi.count as i64),
        buffers.allocated,
        buffers.allocated,
        buffers.encoded,
        buffers.waiting,
        buffers.held,
        size_of::<Session>() + arguments + held + buffers.allocated + buffers.held,
        if buffers.encoded > 0 { "rw" } else { "r" },
        session.last_command,
        name(&session.user),
        if session.protocol == Protocol::Resp3 {
            3
        } else {
            2
        },
        name(&session.lib_name),
        name(&session.lib_version),
    );
}

/// One letter for each state that a client is in.
fn flags(session: &Session) -> String {
    let all = [
        (session.multi.is_some(), 'x'),
        (session.waiting.is_some(), 'b'),
        (session.closing, 'c'),
        (session.readonly, 'r'),
        (session.no_evict, 'e'),
        (session.no_touch, 'T'),
    ];
    let flags: String = all
        .into_iter()
        .filter_map(|(is, letter)| is.then_some(letter))
        .collect();
    if flags.is_empty() {
        "N".to_owned()
    } else {
        flags
    }
}

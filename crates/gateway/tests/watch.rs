//! WATCHes that fail, and as many keys as a batch can expect something of.

mod common;

use common::{Client, Server, config, request};
use cyclone_gateway::Route;

/// Keys and operations of a batch.
const MOST: usize = 65_536;
const ABORTED: &str = "-EXECABORT Transaction discarded because WATCH failed.\r\n";

fn watch(count: usize) -> Vec<u8> {
    let mut args = vec![&b"WATCH"[..]];
    args.resize(1 + count, b"k");
    request(&args)
}

#[track_caller]
fn transaction(c: &mut Client, reply: &str) {
    c.ask(
        "MULTI\r\nSET foo 1\r\nEXEC",
        &format!("+OK\r\n+QUEUED\r\n{reply}"),
    );
}

const DONE: &str = "*1\r\n+OK\r\n";

/// During an election a WATCH is refused, and by the time of EXEC somebody leads again.
#[test]
fn exec_aborts_where_a_watch_was_refused() {
    let server = Server::plain();
    let mut c = server.client();
    let elsewhere = Route::Moved {
        addr: "10.0.0.2:7002".to_owned(),
    };
    for (route, reply) in [
        (Route::NoLeader, "-CLUSTERDOWN The cluster is down\r\n"),
        (elsewhere, "-MOVED 12182 10.0.0.2:7002\r\n"),
    ] {
        server.backend().route = route;
        c.ask("WATCH foo", reply);
        server.backend().route = Route::Local;
        // One that succeeds does not make up for it.
        c.ask("WATCH bar", "+OK\r\n");
        transaction(&mut c, ABORTED);
        // The next one has nothing to do with it.
        transaction(&mut c, DONE);
    }
    server.backend().many_owners = true;
    c.ask(
        "WATCH foo bar",
        "-CROSSSLOT Keys in request don't hash to the same slot\r\n",
    );
    server.backend().many_owners = false;
    transaction(&mut c, ABORTED);
    c.send(watch(MOST + 1));
    c.expect("-ERR 65537 keys are more than the limit of 65536 for 'watch' command\r\n");
    transaction(&mut c, ABORTED);
}

#[test]
fn exec_aborts_where_a_watch_was_too_large() {
    let mut config = config();
    (
        config.max_key_bytes,
        config.max_value_bytes,
        config.max_query_buffer,
    ) = (10, 1000, 4000);
    let server = Server::start(config);
    let mut c = server.client();
    c.send(request(&[b"WATCH", &[b'k'; 11]]));
    c.expect("-ERR key of 11 bytes is longer than the limit of 10 bytes\r\n");
    transaction(&mut c, ABORTED);
    c.send(request(&[b"watch", b"k", &[b'k'; 1001]]));
    c.expect("-ERR argument of 1001 bytes is longer than the limit of 1000 bytes\r\n");
    transaction(&mut c, ABORTED);
    c.send(watch(1000));
    c.expect("-ERR request is longer than the limit of 4000 bytes\r\n");
    transaction(&mut c, ABORTED);
    // Of other commands it does not matter.
    c.send(request(&[b"SET", b"WATCH", &[b'v'; 1001]]));
    c.expect("-ERR argument of 1001 bytes is longer than the limit of 1000 bytes\r\n");
    transaction(&mut c, DONE);
}

#[test]
fn a_refused_watch_is_forgotten_with_the_others() {
    let server = Server::plain();
    let mut c = server.client();
    for (forget, reply) in [
        ("UNWATCH", "+OK\r\n"),
        ("MULTI\r\nDISCARD", "+OK\r\n+OK\r\n"),
        ("RESET", "+RESET\r\n"),
    ] {
        server.backend().route = Route::NoLeader;
        c.ask("WATCH foo", "-CLUSTERDOWN The cluster is down\r\n");
        server.backend().route = Route::Local;
        c.ask(forget, reply);
        transaction(&mut c, DONE);
    }
    // Within a transaction it never is a WATCH.
    c.ask(
        "MULTI\r\nWATCH foo\r\nSET foo 1\r\nEXEC",
        "+OK\r\n-ERR WATCH inside MULTI is not allowed\r\n+QUEUED\r\n*1\r\n+OK\r\n",
    );
}

/// Two WATCHes of as many keys as a batch takes, the second before the first is answered: the entry
/// could not be read when it is applied.
#[test]
fn keys_of_watches_in_progress_count() {
    let server = Server::plain();
    let mut c = server.client();
    server.backend().hold = true;
    c.send(watch(MOST));
    c.send(watch(MOST));
    server.until("both have come", |server| server.stats().commands == 2);
    server.backend().hold = false;
    c.expect("+OK\r\n-ERR too many keys are watched\r\n");
    transaction(&mut c, ABORTED);
    // One that fails later counts no more either.
    server.backend().fail = Some(cyclone_gateway::Outcome::Busy);
    c.send(watch(MOST));
    c.expect("-TRYAGAIN overloaded, retry later\r\n");
    server.backend().fail = None;
    transaction(&mut c, ABORTED);
    // As many as fit are all right.
    server.backend().hold = true;
    c.send(watch(40_000));
    c.send(watch(MOST - 40_000));
    server.until("both have come", |server| {
        server.stats().commands == 2 + 3 + 1 + 3 + 2
    });
    server.backend().hold = false;
    c.expect("+OK\r\n+OK\r\n");
    c.send(watch(1));
    c.expect("-ERR too many keys are watched\r\n");
    c.ask("UNWATCH", "+OK\r\n");
    c.send(watch(MOST));
    c.expect("+OK\r\n");
    transaction(&mut c, DONE);
}

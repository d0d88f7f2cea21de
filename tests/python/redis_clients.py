#!/usr/bin/env python3
"""Unmodified Redis clients against a cluster: redis-py's Redis and RedisCluster, RESP2 and RESP3.

    redis_clients.py HOST:PORT [HOST:PORT...] [--password PASSWORD]

The ports are those of the nodes, in any order. All keys are removed. The exit status is 1 when an answer is not the
one Redis would give; a real Redis with all slots (cluster-enabled) passes too.
"""

import argparse
import sys
import threading
import time
import traceback

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import MovedError, RedisError, ResponseError

MIB = 1024 * 1024
failures = 0
checks = 0


def same(what, got, wanted):
    """One check: reports a difference and goes on."""
    global failures, checks
    checks += 1
    if got != wanted or type(got) is not type(wanted):
        failures += 1
        print(f"FAIL {what}: got {got!r:.200}, wanted {wanted!r:.200}")


def true(what, condition, detail=""):
    same(f"{what} {detail!r:.200}" if not condition else what, bool(condition), True)


def refused(what, text, call):
    """The call must fail with exactly this error text."""
    try:
        same(what, call(), ResponseError(text))
    except RedisError as error:
        same(what, str(error), text)


def raw(r, *words):
    """Sends a command as it is and gives the answer as it is."""
    connection = r.connection_pool.get_connection()
    try:
        connection.send_command(*words)
        return connection.read_response()
    finally:
        r.connection_pool.release(connection)


def node_client(address, options, protocol=2):
    """A client of one node. Nothing here takes long, so that no answer within 20 s means there is none."""
    host, port = address
    return redis.Redis(host=host, port=port, protocol=protocol, password=options.password, socket_timeout=20)


def connection_commands(r, protocol, options):
    same("PING", r.ping(), True)
    same("PING message", raw(r, "PING", "hi"), b"hi")
    same("ECHO", r.echo("hello"), b"hello")
    same("SELECT 0", r.select(0), True)
    hello = raw(r, "HELLO", protocol)
    fields = hello if isinstance(hello, dict) else dict(zip(hello[::2], hello[1::2]))
    same("HELLO form", isinstance(hello, dict), protocol == 3)
    same("HELLO proto", fields[b"proto"], protocol)
    true("HELLO role", fields[b"role"] in (b"master", b"replica"), fields)
    refused("HELLO 9", "NOPROTO unsupported protocol version", lambda: raw(r, "HELLO", "9"))
    if not options.password:
        refused(
            "AUTH",
            "AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?",
            lambda: raw(r, "AUTH", "x"),
        )
    same("CLIENT SETNAME", r.client_setname("tester"), True)
    where = r.get_connection_kwargs()
    fresh = node_client((where["host"], where["port"]), options, protocol)
    with fresh.client() as one:
        same("CLIENT SETNAME, same connection", one.client_setname("tester"), True)
        true("CLIENT GETNAME", one.client_getname() in ("tester", b"tester"))
        true("CLIENT ID", one.client_id() > 0)
        # Back to RESP2 and no name: this connection must not return to the pool.
        true("RESET", one.execute_command("RESET") in ("RESET", b"RESET"))
        one.connection.disconnect()
    same("QUIT", fresh.execute_command("QUIT") in (True, b"OK"), True)
    fresh.close()
    true("COMMAND COUNT", r.command_count() > 20)
    true("COMMAND", b"get" in {name.encode() if isinstance(name, str) else name for name in r.command()})
    true("INFO", "redis_version" in r.info(), r.info())
    true("INFO server", "tcp_port" in r.info("server"))
    true("CONFIG GET", isinstance(r.config_get("maxmemory"), dict))
    refused("unknown command", "unknown command 'NOSUCH', with args beginning with: 'a' 'b' ",
            lambda: raw(r, "NOSUCH", "a", "b"))
    refused("arity", "wrong number of arguments for 'get' command", lambda: raw(r, "GET"))
    refused("arity of a container's command", "wrong number of arguments for 'client|setname' command",
            lambda: raw(r, "CLIENT", "SETNAME"))


def string_commands(r):
    same("SET", r.set("{t}a", "1"), True)
    same("GET", r.get("{t}a"), b"1")
    same("GET absent", r.get("{t}none"), None)
    same("SET NX, there", r.set("{t}a", "2", nx=True), None)
    same("SET NX, absent", r.set("{t}nx", "2", nx=True), True)
    same("SET XX, absent", r.set("{t}xx", "2", xx=True), None)
    same("SET XX, there", r.set("{t}a", "3", xx=True), True)
    same("SET GET", r.set("{t}a", "4", get=True), b"3")
    same("SET GET, absent", r.set("{t}g", "4", get=True), None)
    same("SET NX GET, there", r.set("{t}g", "5", nx=True, get=True), b"4")
    same("SET NX GET kept it", r.get("{t}g"), b"4")
    refused("SET NX XX", "syntax error", lambda: raw(r, "SET", "{t}a", "1", "NX", "XX"))
    refused("SET junk", "syntax error", lambda: raw(r, "SET", "{t}a", "1", "JUNK"))
    same("SETNX, there", r.setnx("{t}a", "9"), False)
    same("SETNX, absent", r.setnx("{t}b", "9"), True)
    same("GETSET", r.getset("{t}b", "10"), b"9")
    same("GETSET, absent", r.getset("{t}c", "x"), None)
    same("GETDEL", r.getdel("{t}c"), b"x")
    same("GETDEL, absent", r.getdel("{t}c"), None)
    same("MGET", r.mget("{t}a", "{t}none", "{t}b"), [b"4", None, b"10"])
    same("EXISTS counts twice", r.exists("{t}a", "{t}a", "{t}none"), 2)
    same("TYPE", r.type("{t}a"), b"string")
    same("TYPE, absent", r.type("{t}none"), b"none")
    same("STRLEN", r.strlen("{t}b"), 2)
    same("STRLEN, absent", r.strlen("{t}none"), 0)
    same("APPEND", r.append("{t}b", "xyz"), 5)
    same("APPEND, absent", r.append("{t}ap", "xyz"), 3)
    same("GETRANGE", r.getrange("{t}b", 1, 3), b"0xy")
    same("GETRANGE, from the end", r.getrange("{t}b", -3, -1), b"xyz")
    same("GETRANGE, beyond", r.getrange("{t}b", 3, 100), b"yz")
    same("GETRANGE, nothing", r.getrange("{t}b", 4, 2), b"")
    same("GETRANGE, absent", r.getrange("{t}none", 0, -1), b"")
    same("SETRANGE", r.setrange("{t}b", 1, "ZZ"), 5)
    same("SETRANGE result", r.get("{t}b"), b"1ZZyz")
    same("SETRANGE pads", r.setrange("{t}pad", 3, "x"), 4)
    same("SETRANGE padded", r.get("{t}pad"), b"\0\0\0x")
    same("SETRANGE empty, absent", r.setrange("{t}none", 5, ""), 0)
    refused("SETRANGE negative", "offset is out of range", lambda: r.setrange("{t}b", -1, "x"))
    same("DEL", r.delete("{t}ap", "{t}pad", "{t}none", "{t}ap"), 2)
    same("UNLINK", r.unlink("{t}nx", "{t}none"), 1)
    binary = bytes(range(256)) + b"\r\n$5\r\n"
    same("SET binary", r.set(b"{t}" + binary, binary), True)
    same("GET binary", r.get(b"{t}" + binary), binary)
    same("SET empty", r.set("{t}empty", ""), True)
    same("GET empty", r.get("{t}empty"), b"")


def number_commands(r):
    same("INCR, absent", r.incr("{t}n"), 1)
    same("INCRBY", r.incrby("{t}n", 41), 42)
    same("DECR", r.decr("{t}n"), 41)
    same("DECRBY", r.decrby("{t}n", 50), -9)
    same("GET number", r.get("{t}n"), b"-9")
    r.set("{t}s", "abc")
    wrong = "value is not an integer or out of range"
    refused("INCR of text", wrong, lambda: r.incr("{t}s"))
    refused("INCRBY text", wrong, lambda: raw(r, "INCRBY", "{t}n", "1.5"))
    r.set("{t}s", " 1")
    refused("INCR of a blank and 1", wrong, lambda: r.incr("{t}s"))
    r.set("{t}max", str(2**63 - 1))
    refused("INCR overflow", "increment or decrement would overflow", lambda: r.incr("{t}max"))
    same("INCR overflow changed nothing", r.get("{t}max"), str(2**63 - 1).encode())
    r.set("{t}max", str(2**63))
    refused("INCR beyond 64 bits", wrong, lambda: r.incr("{t}max"))
    refused("DECRBY minimum", "decrement would overflow", lambda: raw(r, "DECRBY", "{t}n", str(-(2**63))))
    same("INCRBYFLOAT", float(raw(r, "INCRBYFLOAT", "{t}f", "10.5")), 10.5)
    same("INCRBYFLOAT text", raw(r, "INCRBYFLOAT", "{t}f", "0.1"), b"10.6")
    same("INCRBYFLOAT whole", raw(r, "INCRBYFLOAT", "{t}f", "-5.6"), b"5")
    same("INCRBYFLOAT exponent", raw(r, "INCRBYFLOAT", "{t}f", "5.0e3"), b"5005")
    r.set("{t}s", "abc")
    refused("INCRBYFLOAT of text", "value is not a valid float", lambda: raw(r, "INCRBYFLOAT", "{t}s", "1"))
    refused("INCRBYFLOAT by text", "value is not a valid float", lambda: raw(r, "INCRBYFLOAT", "{t}f", "x"))
    refused("INCRBYFLOAT infinite", "increment would produce NaN or Infinity",
            lambda: raw(r, "INCRBYFLOAT", "{t}f", "+inf"))


def keyspace_commands(r):
    r.flushall()
    same("DBSIZE, empty", r.dbsize(), 0)
    same("SCAN, empty", list(r.scan_iter()), [])
    names = sorted(f"key:{i}".encode() for i in range(500))
    with r.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.set(name, b"v")
        pipe.set("other", "v")
        same("pipelined SETs", pipe.execute(), [True] * 501)
    same("DBSIZE", r.dbsize(), 501)
    same("SCAN finds all", sorted(set(r.scan_iter(count=37))), sorted(names + [b"other"]))
    same("SCAN MATCH", sorted(set(r.scan_iter(match="key:1?", count=100))),
         sorted(f"key:1{i}".encode() for i in range(10)))
    same("SCAN MATCH set", sorted(set(r.scan_iter(match="[m-p]t*"))), [b"other"])
    same("KEYS", sorted(r.keys("key:*")), names)
    same("KEYS all", len(r.keys("*")), 501)
    refused("SCAN cursor", "invalid cursor", lambda: raw(r, "SCAN", "x"))
    refused("SCAN COUNT 0", "syntax error", lambda: raw(r, "SCAN", "0", "COUNT", "0"))
    same("FLUSHALL", r.flushall(), True)
    same("DBSIZE after FLUSHALL", r.dbsize(), 0)
    true("WAIT", r.wait(0, 100) >= 0)


def pipelines(r):
    with r.pipeline(transaction=False) as pipe:
        for i in range(2_000):
            pipe.set("{p}k", i).get("{p}k").incr("{p}n")
        answers = pipe.execute()
    same("pipeline reads its own writes", answers[1::3], [str(i).encode() for i in range(2_000)])
    same("pipeline increments once each", answers[2::3], list(range(1, 2_001)))
    with r.pipeline(transaction=False) as pipe:
        pipe.set("{p}s", "x").incr("{p}s").get("{p}s")
        answers = pipe.execute(raise_on_error=False)
    same("error inside a pipeline", [answers[0], str(answers[1]), answers[2]],
         [True, "Command # 2 (INCR {p}s) of pipeline caused error: value is not an integer or out of range", b"x"]
         if "Command #" in str(answers[1]) else [True, "value is not an integer or out of range", b"x"])


def expiry(r):
    before = r.dbsize()
    same("SET PX", r.set("{e}k", "v", px=1_000), True)
    true("PTTL", 0 < r.pttl("{e}k") <= 1_000, r.pttl("{e}k"))
    time.sleep(1.005)
    same("GET after its time", r.get("{e}k"), None)
    same("EXISTS after its time", r.exists("{e}k"), 0)
    same("SET NX after its time", r.set("{e}k", "w", nx=True), True)
    same("EXPIRE", r.expire("{e}k", 100), True)
    same("EXPIRE NX", r.expire("{e}k", 200, nx=True), False)
    same("EXPIRE GT", r.expire("{e}k", 200, gt=True), True)
    same("TTL", r.ttl("{e}k"), 200)
    same("SET KEEPTTL", r.set("{e}k", "x", keepttl=True), True)
    same("TTL kept", r.ttl("{e}k"), 200)
    same("INCR keeps", (r.set("{e}n", 1, ex=50), r.incr("{e}n"), r.ttl("{e}n")), (True, 2, 50))
    same("PERSIST", r.persist("{e}k"), True)
    same("TTL without", r.ttl("{e}k"), -1)
    same("GETEX", r.getex("{e}k", px=100_000), b"x")
    same("SETEX", r.setex("{e}s", 10, "y"), True)
    same("PSETEX", r.psetex("{e}s", 10_000, "y"), True)
    same("PEXPIREAT in the past removes", (r.pexpireat("{e}s", 1), r.get("{e}s")), (True, None))
    # More than one sweep takes: all are gone from the store in the end.
    with r.pipeline(transaction=False) as pipe:
        for i in range(1_000):
            pipe.set(f"{{e}}{i}", i, px=50)
        pipe.execute()
    r.delete("{e}k", "{e}n")
    deadline = time.monotonic() + 10
    while r.dbsize() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    same("all are gone", r.dbsize(), before)


def transactions(r):
    same("MSET", r.mset({"{t}a": 1, "{t}b": 2}), True)
    same("MSETNX refused", r.msetnx({"{t}b": 3, "{t}c": 4}), False)
    same("MGET", r.mget("{t}a", "{t}b", "{t}c"), [b"1", b"2", None])
    with r.pipeline(transaction=True) as pipe:
        pipe.set("{t}a", 5).incr("{t}a").get("{t}a").expire("{t}a", 100).ttl("{t}a")
        same("MULTI", pipe.execute(), [True, 6, b"6", True, 100])
    with r.pipeline(transaction=True) as pipe:
        pipe.watch("{t}a")
        r.set("{t}a", 7)
        pipe.multi()
        pipe.set("{t}b", "never")
        try:
            same("WATCH", pipe.execute(), "WatchError")
        except redis.WatchError:
            same("nothing of it was done", r.get("{t}b"), b"2")
    with r.pipeline(transaction=True) as pipe:
        pipe.execute_command("NOSUCH")
        pipe.set("{t}b", "never")
        try:
            same("EXECABORT", pipe.execute(), "error")
        except ResponseError:
            same("nothing of that either", r.get("{t}b"), b"2")

    def add(pipe):
        old = int(pipe.get("{t}n") or 0)
        pipe.multi()
        pipe.set("{t}n", old + 1)

    import threading

    def adder():
        with redis.Redis(connection_pool=r.connection_pool) as own:
            for _ in range(50):
                own.transaction(add, "{t}n")

    threads = [threading.Thread(target=adder) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same("optimistic additions", r.get("{t}n"), b"200")
    keys = {f"{{t}}{i}": "v" * 3_000 for i in range(1_200)}
    same("MSET of 3.6 MB", r.mset(keys), True)
    same("DEL of many", r.delete(*keys), 1_200)
    same("UNLINK", r.unlink("{t}a", "{t}b", "{t}n", "{t}none"), 3)


def read_modes(r):
    connection = r.connection_pool.get_connection()
    try:
        def ask(*words):
            connection.send_command(*words)
            return connection.read_response()

        for mode in ("index", "log", "lease", "weak", "default"):
            same(f"READMODE {mode}", ask("CLIENT", "READMODE", mode), b"OK")
            for i in range(20):
                same(f"INCR, {mode}", ask("SET", "{r}k", f"{mode}{i}"), b"OK")
                same(f"GET, {mode}", ask("GET", "{r}k"), f"{mode}{i}".encode())
        same("READMODE", ask("CLIENT", "READMODE"), b"index")
    finally:
        r.connection_pool.release(connection)
    r.delete("{r}k")


def limits(r):
    """What no entry can hold is refused, and nothing waits behind it."""
    long = {f"long:{i}": b"v" * 3_000 for i in range(2_000)}
    text = "2000 keys with 6065788 bytes are beyond the limits of 65536 and 4194304 bytes"
    for _ in range(3):
        refused("MSET of 6 MB", text, lambda: r.mset(long))
        same("SET behind it", r.set("long:0", "short"), True)
    same("EXISTS", r.exists(*list(long)[:10]), 1)
    same("DEL", r.delete("long:0"), 1)


def held_scans(r, writer):
    """SCAN over a snapshot: tokens that move between slots all the while are found exactly once each."""
    tokens = 200
    homes = ["{scan:%d}" % n for n in range(8)]
    for n in range(tokens):
        r.set(f"{homes[0]}{n}", "x")
    moving, broken = True, []

    def move():
        at, n = [0] * tokens, 0
        try:
            while moving:
                n = (n + 61) % tokens
                old, at[n] = homes[at[n]], (at[n] + 1) % len(homes)
                with writer.pipeline(transaction=True) as pipeline:
                    pipeline.delete(f"{old}{n}").set(f"{homes[at[n]]}{n}", "x").execute()
        except Exception as error:
            broken.append(error)

    connection = r.connection_pool.get_connection()

    def ask(*words):
        connection.send_command(*words)
        return connection.read_response()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        same("SCANMODE, at first", ask("CLIENT", "SCANMODE"), b"live")
        same("SCANMODE SNAPSHOT", ask("CLIENT", "SCANMODE", "SNAPSHOT"), b"OK")
        same("SCANMODE, then", ask("CLIENT", "SCANMODE"), b"snapshot")
        for _ in range(10):
            cursor, found = "0", []
            while True:
                cursor, page = ask("SCAN", cursor, "MATCH", "{scan:*", "COUNT", "7")
                found += [int(key.split(b"}")[1]) for key in page]
                if cursor == b"0":
                    break
            same("SCAN of a snapshot", sorted(found), list(range(tokens)))
        cursor, _ = ask("SCAN", "0", "COUNT", "5")
        held = r.info("cyclone")["cyclone_scan_snapshots"]
        true("scans that hold a snapshot", held == 1, held)
        gone = "the snapshot of this cursor is gone (another leader, or not used for 60 s): begin again with cursor 0"
        refused("SCAN with another's cursor", gone, lambda: ask("SCAN", str(int(cursor) + 1)))
        same("SCANMODE LIVE", ask("CLIENT", "SCANMODE", "live"), b"OK")
        refused("SCANMODE, wrong", "syntax error", lambda: ask("CLIENT", "SCANMODE", "frozen"))
        # A cursor says itself what it belongs to.
        true("SCAN goes on", len(ask("SCAN", cursor, "COUNT", "5")[1]) >= 5)
    finally:
        moving = False
        mover.join()
        r.connection_pool.release(connection)
    same("the mover", broken, [])
    r.flushall()


def large_values(r):
    for length in (1_000, 4_095, 4_096, 60_000, 65_536, 300_000, MIB - 1, MIB):
        value = bytes((i * 31 + length) % 251 for i in range(1_000)) * (length // 1_000 + 1)
        value = value[:length]
        same(f"SET of {length} bytes", r.set("{large}k", value), True)
        true(f"GET of {length} bytes", r.get("{large}k") == value)
        same(f"STRLEN of {length} bytes", r.strlen("{large}k"), length)
    same("GETRANGE of a large value", r.getrange("{large}k", MIB - 10, -1), value[-10:])
    with r.pipeline(transaction=False) as pipe:
        for i in range(8):
            pipe.set(f"{{large}}{i}", value)
        same("pipelined large SETs", pipe.execute(), [True] * 8)
    true("MGET of large values", r.mget([f"{{large}}{i}" for i in range(8)]) == [value] * 8)
    r.delete("{large}k", *[f"{{large}}{i}" for i in range(8)])


def cluster_commands(r):
    same("CLUSTER KEYSLOT", r.execute_command("CLUSTER KEYSLOT", "foo"), 12182)
    same("CLUSTER KEYSLOT, tag", r.execute_command("CLUSTER KEYSLOT", "x{foo}y"), 12182)
    same("CLUSTER KEYSLOT, empty tag", r.execute_command("CLUSTER KEYSLOT", "{}foo"), 9500)
    slots = raw(r, "CLUSTER", "SLOTS")
    covered = sorted((row[0], row[1]) for row in slots)
    true("CLUSTER SLOTS covers all", covered[0][0] == 0 and covered[-1][1] == 16383, slots)
    me = raw(r, "CLUSTER", "MYID")
    true("CLUSTER MYID", len(me) == 40 and not me.strip(b"0123456789abcdef"), me)
    nodes = raw(r, "CLUSTER", "NODES").decode().strip().split("\n")
    same("CLUSTER NODES says who is asked", [n.split()[0].encode() for n in nodes if "myself" in n], [me])
    true("CLUSTER SHARDS", len(raw(r, "CLUSTER", "SHARDS")) >= 1)
    info = dict(line.split(":") for line in raw(r, "CLUSTER", "INFO").decode().split())
    same("CLUSTER INFO state", info["cluster_state"], "ok")
    same("CLUSTER INFO slots", info["cluster_slots_assigned"], "16384")


def find_leader(addresses, options):
    """The first node that takes a write; waits for an election."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for host, port in addresses:
            try:
                node_client((host, port), options).set("{t}probe", "1")
                return host, port
            except (ResponseError, redis.ConnectionError):
                continue
        time.sleep(0.1)
    sys.exit("no node takes writes")


def redirects(addresses, leader, options):
    """A follower sends clients to the leader, and a cluster client that starts there finds its way."""
    for host, port in addresses:
        if (host, port) != leader:
            follower = node_client((host, port), options)
            try:
                same(f"SET on follower {port}", follower.set("foo", "1"), "MOVED")
            except MovedError as error:
                same("MOVED slot", error.slot_id, 12182)
                same("MOVED port", error.port, leader[1])
            same("follower answers PING", follower.ping(), True)
        for protocol in (2, 3):
            client = RedisCluster(startup_nodes=[ClusterNode(host, port)], protocol=protocol,
                                  password=options.password, socket_timeout=20)
            with client:
                cluster_client(client, f"via {port}, RESP{protocol}")


def cluster_client(client, name):
    client.flushall(target_nodes=RedisCluster.PRIMARIES)
    keys = [f"cluster:{i}" for i in range(200)]
    for key in keys:
        same(f"{name}: SET", client.set(key, key), True)
    same(f"{name}: GET", [client.get(key) for key in keys], [key.encode() for key in keys])
    same(f"{name}: INCR", [client.incr("counter") for _ in range(20)], list(range(1, 21)))
    pipe = client.pipeline()
    for key in keys:
        pipe.get(key)
    same(f"{name}: pipeline", pipe.execute(), [key.encode() for key in keys])
    same(f"{name}: MGET", client.mget_nonatomic(keys), [key.encode() for key in keys])
    same(f"{name}: SCAN", len(set(client.scan_iter(match="cluster:*"))), 200)
    same(f"{name}: DBSIZE", client.dbsize(target_nodes=RedisCluster.PRIMARIES), 201)
    large = b"x" * MIB
    same(f"{name}: SET of 1 MiB", client.set("large", large), True)
    true(f"{name}: GET of 1 MiB", client.get("large") == large)
    same(f"{name}: DEL", client.delete(*keys), 200)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("address", nargs="+", help="host:port of a node")
    parser.add_argument("--password")
    options = parser.parse_args()
    addresses = []
    for address in options.address:
        host, _, port = address.rpartition(":")
        addresses.append((host, int(port)))
    leader = find_leader(addresses, options)
    print(f"leader at {leader[0]}:{leader[1]}, redis-py {redis.__version__}")
    steps = [
        ("strings", string_commands),
        ("numbers", number_commands),
        ("key space", keyspace_commands),
        ("pipelines", pipelines),
        ("expiry", expiry),
        ("transactions", transactions),
        ("large values", large_values),
        ("cluster", cluster_commands),
    ]
    for protocol in (2, 3):
        with node_client(leader, options, protocol) as r:
            r.flushall()
            run(f"RESP{protocol}: connection", lambda: connection_commands(r, protocol, options))
            for name, step in steps:
                run(f"RESP{protocol}: {name}", lambda step=step: step(r))
    if "cyclone_id" in node_client(leader, options).info("cyclone"):
        run("read modes", lambda: read_modes(node_client(leader, options)))
        run("limits", lambda: limits(node_client(leader, options)))
        both = lambda: (node_client(leader, options), node_client(leader, options))
        run("scans of a snapshot", lambda: held_scans(*both()))
    run("redirects", lambda: redirects(addresses, leader, options))
    print(f"{checks - failures} passed, {failures} failed")
    sys.exit(1 if failures else 0)


def run(name, step):
    """Runs a group of checks; an unexpected error fails the group and not the run."""
    global failures, checks
    before, start = failures, time.monotonic()
    try:
        step()
    except Exception:
        failures += 1
        checks += 1
        traceback.print_exc(file=sys.stdout)
    print(f"{'ok  ' if failures == before else 'FAIL'} {name} ({time.monotonic() - start:.1f} s)")


if __name__ == "__main__":
    main()

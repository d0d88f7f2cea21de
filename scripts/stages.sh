#!/usr/bin/env bash
# Where the CPU time of one replicated write goes: a plan with one variant and one point runs under perf, and its CPU time per operation is
# divided by what was seen at work. No counters are needed, so it works in virtual machines.
# It looks from when the run says that it measures, so the plan has to measure for longer than the look. Whatever else runs counts too.
# usage: scripts/stages.sh PROGRAM scripts/stages.toml [SECONDS TO SKIP] [SECONDS TO LOOK]
set -euo pipefail
program=$(realpath "$1")
plan=$2
skip=${3:-1}
look=${4:-4}
command -v perf >/dev/null || { echo "perf is missing (apt-get install linux-perf)" >&2; exit 1; }
directory=$(mktemp -d)
running=
# Its servers end with it.
trap '[ -z "$running" ] || kill "$running" 2>/dev/null || true; rm -rf "$directory"' EXIT
"$program" bench run "$plan" --out "$directory" >"$directory/out" 2>"$directory/err" &
running=$!
# Keys are written first, and the machine is waited for until it rests.
until grep -q 'ops/s' "$directory/err"; do
    kill -0 "$running" 2>/dev/null || { tail -n 3 "$directory/err" >&2; exit 1; }
    sleep 0.1
done
sleep "$skip"
perf record -a -F 1999 -o "$directory/data" sleep "$look" >/dev/null 2>"$directory/perf" || { cat "$directory/perf" >&2; exit 1; }
wait "$running" || { tail -n 3 "$directory/err" >&2; exit 1; }
line=$(grep -E ' [0-9]+ +[0-9]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+$' "$directory/out" | tail -n 1)
running=
cost=$(awk '{ print $NF }' <<<"$line")
echo "$line"
grep -E 'the machine was quiet|not to be believed' "$directory/out"
perf report -i "$directory/data" --no-children --sort comm,dso,sym --stdio -g none 2>/dev/null | awk -v cost="$cost" '
    /^ *[0-9.]+%/ && !/swapper|perf/ {
        share = $1 + 0
        part = "other"
        if ($2 == "rocksdb:high") part = "RocksDB: flushes"
        else if ($2 == "rocksdb:low") part = "RocksDB: compactions"
        else if ($2 == "store-writer") part = "RocksDB: taking tables over"
        else if (/\[k\]/) part = "kernel: sockets, scheduling"
        else if (/rocksdb::/) part = "RocksDB: called by the event loop"
        else if (match($0, /cyclone_[a-z]+/)) part = "crate " substr($0, RSTART + 8, RLENGTH - 8)
        else if (/raft::/) part = "raft-rs"
        else if (/mem(cpy|move|set|cmp)/) part = "copying, comparing"
        else if (/mi_|malloc|free|consolidate|unlink_chunk/) part = "allocator"
        else if (/polyval|aes|[Gg]hash|gcm/) part = "packet protection"
        else if (/hash|BTree|btree/) part = "hash tables and trees"
        else if (/vdso|clock|recv|send|epoll|syscall/) part = "system calls, clocks"
        sum[part] += share; total += share
    }
    END {
        for (part in sum) printf "%7.2f us  %s\n", cost * sum[part] / total, part | "sort -rn"
    }'

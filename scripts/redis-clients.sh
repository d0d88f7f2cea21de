#!/usr/bin/env bash
# Unmodified Redis clients (redis-cli, redis-benchmark, redis-py and its cluster client) against a real cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-target/release/cyclone}

python=$(scripts/python-env.sh)
work=$(mktemp -d)
cleanup() {
    if [ -f "$work/pids" ]; then
        read -r -a pids <"$work/pids"
        kill "${pids[@]}" 2>/dev/null || true
        for pid in "${pids[@]}"; do
            while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
        done
        rm -rf "$(cat "$work/regions")"
    fi
    rm -rf "$work"
}
trap cleanup EXIT

"$bin" cluster start --directory "$work/cluster" --first-port 7301 >"$work/cluster.json"
"$python" - "$work" <<'PY'
import json, sys
work = sys.argv[1]
cluster = json.load(open(f"{work}/cluster.json"))
open(f"{work}/pids", "w").write(" ".join(str(node["pid"]) for node in cluster["nodes"]) + "\n")
open(f"{work}/regions", "w").write(cluster["regions"])
open(f"{work}/ports", "w").write(" ".join(str(node["redis"].split(":")[1]) for node in cluster["nodes"]) + "\n")
open(f"{work}/leader", "w").write(next(n["redis"].split(":")[1] for n in cluster["nodes"] if n["leads"]))
PY
read -r -a ports <"$work/ports"
leader=$(cat "$work/leader")
follower=$(printf '%s\n' "${ports[@]}" | grep -v "^$leader$" | head -1)

echo "redis-cli"
[ "$(redis-cli -p "$leader" set greeting hello)" = OK ]
[ "$(redis-cli -c -p "$follower" get greeting)" = hello ]
redis-cli -p "$follower" get greeting | grep -q "^MOVED .* 127.0.0.1:$leader$"
redis-cli -p "$leader" nosuchcommand 2>&1 | grep -q "^ERR unknown command 'nosuchcommand'"

echo "redis-benchmark"
redis-benchmark -p "$leader" -t set,get,incr -c 50 -P 16 -n 100000 -q

echo "redis-py"
"$python" tests/python/redis_clients.py "127.0.0.1:$leader" "127.0.0.1:$follower"
echo "unmodified clients: ok"

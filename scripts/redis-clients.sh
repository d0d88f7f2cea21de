#!/usr/bin/env bash
# Unmodified Redis clients (redis-cli, redis-benchmark, redis-py and its cluster client) against a real cluster.
#
#   redis-clients.sh [CYCLONE]   the program (default target/release/cyclone)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-target/release/cyclone}

for tool in redis-cli redis-benchmark; do
    command -v "$tool" >/dev/null || { echo "redis-clients: $tool is missing" >&2; exit 1; }
done
python=$(scripts/python-env.sh)
source scripts/test-cluster.sh

# Answers must be exactly these; what came instead is shown.
same() {
    if [ "$2" != "$3" ]; then
        echo "redis-clients: $1: got '$2', wanted '$3'" >&2
        exit 1
    fi
}

# Calm: one leader throughout, also on a busy machine. Failovers are the kill test's business.
start_cluster --first-port 7301 --election-ms 2000 --logs 4
mapfile -t nodes < <(describe "node['redis'] for node in cluster['nodes']")
leader=$(describe "node['redis'].split(':')[1] for node in cluster['nodes'] if node['leads']")
follower=$(describe "[node['redis'].split(':')[1] for node in cluster['nodes'] if not node['leads']][:1]")

echo "redis-cli"
same "set" "$(redis-cli -p "$leader" set greeting hello)" OK
same "get, sent on by a follower" "$(redis-cli -c -p "$follower" get greeting)" hello
slot=$(redis-cli -p "$follower" cluster keyslot greeting)
same "get at a follower" "$(redis-cli -p "$follower" get greeting)" "MOVED $slot 127.0.0.1:$leader"
same "unknown command" "$(redis-cli -p "$leader" nosuchcommand)" "ERR unknown command 'nosuchcommand', with args beginning with: "

echo "redis-benchmark"
redis-benchmark -p "$leader" -t set,get,incr -c 50 -P 16 -n 100000 -q
# redis-benchmark takes an error for an answer like any other: only the counter tells that each INCR was done, once.
same "redis-benchmark's counter" "$(redis-cli -p "$leader" get counter:__rand_int__)" 100000
same "redis-benchmark's value" "$(redis-cli -p "$leader" strlen key:__rand_int__)" 3

echo "redis-py"
"$python" tests/python/redis_clients.py "${nodes[@]}"
echo "unmodified clients: ok"

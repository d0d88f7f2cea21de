#!/usr/bin/env bash
# Fresh random input for so many minutes (10): everything that reads bytes from others (packets, fragments, commands, the Redis
# protocol, records in memory that others write), and the logs, pools and engines against their models. `make test` runs the same
# tests with few cases each.
# A failure prints the smallest input found, and the seed in a file beside the test (proptest-regressions).
set -euo pipefail

minutes=${1:-10}
crates=(wire packet consensus gateway replication fabric pmkv pmkv-cm pmem wal store)
# Parts of the tests' names.
names=(any_ garbage no_bytes nearly_right damaged hostile parse survived scan attributes fragments what_parses
    come_back come_apart engines_ retried_ bad_bytes like_a_vector keeps_count images_hold ropes_ accepts_exactly agrees_with
    parts_cut checksums prefix mutated written noticed header)

flags=()
for crate in "${crates[@]}"; do flags+=(-p "cyclone-$crate"); done
build() { cargo test --release --locked --no-fail-fast "${flags[@]}" "$@"; }
build --no-run
dpdk=()
if pkg-config --exists libdpdk 2>/dev/null; then dpdk=(-p cyclone-packet --features dpdk --lib); fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
end=$((SECONDS + 60 * minutes))
round=0
while [ $SECONDS -lt $end ]; do
    round=$((round + 1))
    # Longer each time, so that the first failure comes soon.
    export PROPTEST_CASES=$((1000 * (round < 20 ? round : 20)))
    echo "fuzz: round $round, $PROPTEST_CASES cases of each, $((end - SECONDS)) s left"
    build -q -- "${names[@]}" >"$log" 2>&1 || { cat "$log"; exit 1; }
    if [ ${#dpdk[@]} -gt 0 ]; then cargo test --release --locked -q "${dpdk[@]}" -- "${names[@]}"; fi
done
echo "fuzz: nothing found in $round rounds"

#!/usr/bin/env bash
# Fresh random input for so many minutes (10): every property test of every crate: whatever reads bytes from others, and logs, pools and
# engines against their models. `make test` runs the same tests with few cases each.
# A property test is recognised by its arguments: plain tests have none. One that is not among the tests that were built is an error.
# A failure prints the smallest input found, and the seed in a file beside the test (proptest-regressions).
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:-10}
# As `make build` builds them.
tests=(--release --locked --workspace --features libfabric --tests)
# These open stores on the disk in each case: they get a fortieth of the cases.
slow=(engines_do_what_the_model_does retried_commands_count_once bad_bytes_are_answered engines_expire_as_the_model_does)

# Names of the property tests in files.
properties() {
    awk '/#\[test\]/ { test = 1; next }
        test && match($0, /^ *fn [a-z0-9_]+\(/) {
            name = substr($0, RSTART, RLENGTH); rest = substr($0, RSTART + RLENGTH)
            if (rest !~ /^\)/) { sub(/^ *fn /, "", name); sub(/\($/, "", name); print name }
            test = 0
        }' "$@" | sort -u
}

# Whole paths, from `cargo test -- --list`, of the tests with these names.
paths() {
    awk 'NR == FNR { wanted[$1]; next }
        sub(/: test$/, "") { name = $0; sub(/.*::/, "", name); if (name in wanted) print }' "$1" "$2"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mapfile -t files < <(grep -rl --include='*.rs' 'proptest! *{' crates)
has_dpdk=true
if ! pkg-config --exists libdpdk 2>/dev/null; then
    has_dpdk=false
    echo "fuzz: without DPDK's tests: the system has no libdpdk"
    mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -v '/dpdk/')
fi
for file in "${files[@]}"; do
    properties "$file" >"$work/of-file"
    [ -s "$work/of-file" ] || { echo "fuzz: no property test is seen in $file" >&2; exit 1; }
    cat "$work/of-file" >>"$work/names"
done

cargo test "${tests[@]}" -- --list >"$work/list"
paths "$work/names" "$work/list" >"$work/paths"
: >"$work/paths-dpdk"
if $has_dpdk; then
    dpdk=(--release --locked -p cyclone-packet --features dpdk --lib)
    cargo test "${dpdk[@]}" -- --list >"$work/list-dpdk"
    # Of DPDK's own files: the others are among the tests above.
    paths "$work/names" "$work/list-dpdk" | grep '^dpdk::' >"$work/paths-dpdk"
fi
# Each as often as there are files with one of that name.
missing=$(awk 'FILENAME ~ /names$/ { wanted[$1]++; next } { sub(/.*::/, ""); built[$0]++ }
    END { for (name in wanted) if (built[name] < wanted[name]) print name }' "$work/names" "$work/paths" "$work/paths-dpdk")
[ -z "$missing" ] || { echo "fuzz: these were not built:" $missing >&2; exit 1; }
printf '%s\n' "${slow[@]}" >"$work/slow"
paths "$work/slow" <(sed 's/$/: test/' "$work/paths") | sort -u >"$work/paths-slow"
mapfile -t found_slow <"$work/paths-slow"
mapfile -t found < <(sort -u "$work/paths" | comm -23 - "$work/paths-slow")
mapfile -t found_dpdk < <(sort -u "$work/paths-dpdk")
echo "fuzz: $(wc -l <"$work/names") property tests in ${#files[@]} files"

# Only says something where a test fails.
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }; }
end=$((SECONDS + 60 * minutes))
round=0
while [ $SECONDS -lt $end ]; do
    round=$((round + 1))
    # Longer each time, so that the first failure comes soon.
    cases=$((1000 * (round < 20 ? round : 20)))
    echo "fuzz: round $round, $cases cases of each, $((end - SECONDS)) s left"
    export PROPTEST_CASES=$cases
    quietly cargo test --no-fail-fast -q "${tests[@]}" -- --exact "${found[@]}"
    if [ ${#found_dpdk[@]} -gt 0 ]; then quietly cargo test -q "${dpdk[@]}" -- --exact "${found_dpdk[@]}"; fi
    PROPTEST_CASES=$((cases / 40)) quietly cargo test --no-fail-fast -q "${tests[@]}" -- --exact "${found_slow[@]}"
done
echo "fuzz: nothing found in $round rounds"

#!/usr/bin/env bash
# Redis' own tests (Debian's source package) against a real cluster; tests/redis-suite/expected.txt says which units
# run, and which tests fail for which reason.
#
#   redis-suite.sh [CYCLONE [UNIT...]]   the program (default target/release/cyclone); these units alone
#   CYCLONE_CACHE=DIR                    where the package is kept (default ~/.cache/cyclone)
#   CYCLONE_SUITE_LOGS=DIR               where the suite's output of each unit is kept; without it nowhere
#   CYCLONE_SUITE_PORT=PORT              the server to test, in place of a new cluster
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-target/release/cyclone}
shift || true
python=$(command -v python3) || { echo "redis-suite: python3 is missing" >&2; exit 1; }
command -v tclsh >/dev/null || { echo "redis-suite: tclsh is missing" >&2; exit 1; }
source scripts/test-cluster.sh

# The version that expected.txt was written for. Debian's repairs change its tests seldom, and not their names.
version=7.0.15
archive=${CYCLONE_CACHE:-$HOME/.cache/cyclone}/redis_$version.orig.tar.gz
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# Fetches the package's archive by apt, with separate lists: the system's remain as they are.
fetch() {
    local apt=$work/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$(dirname "$archive")"
    printf 'deb-src [signed-by=%s] http://deb.debian.org/%s bookworm%s main\n' \
        "$keyring" debian "" "$keyring" debian-security -security >"$apt/sources.list"
    local options=(-qq -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User="$(id -un)")
    apt-get "${options[@]}" update
    (cd "$apt" && apt-get "${options[@]}" source --download-only redis)
    mv "$apt/redis_$version.orig.tar.gz" "$archive"
}
[ -s "$archive" ] || fetch

suite=$work/suite
mkdir -p "$suite/src"
tar -xzf "$archive" -C "$suite" --strip-components=1 --wildcards '*/tests'
ln -s "$(command -v redis-cli)" "$suite/src/redis-cli"
# Behind the procedures that the overlay replaces.
sed -i '/^# parse arguments/i source $::env(CYCLONE_SUITE_OVERLAY)' "$suite/tests/test_helper.tcl"
grep -q CYCLONE_SUITE_OVERLAY "$suite/tests/test_helper.tcl"

port=${CYCLONE_SUITE_PORT:-}
if [ -z "$port" ]; then
    # One leader throughout, also on a busy machine.
    start_cluster --first-port 7401 --election-ms 2000
    port=$(describe "node['redis'].split(':')[1] for node in cluster['nodes'] if node['leads']")
fi
"$python" tests/redis-suite/run.py "$suite" "$port" "$work" "$@"

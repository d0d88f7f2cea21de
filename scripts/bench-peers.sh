#!/usr/bin/env bash
# Provides the etcd server and the load generator that `cyclone bench put --peers` measures beside Cyclone. Starts nothing and installs
# nothing system-wide. Progress goes to standard error; the last line of standard output is the path of the binary.
#
#   CYCLONE_ETCD=PATH      use this etcd
#   CYCLONE_CACHE=DIR      where the binary is kept (default ~/.cache/cyclone)
#   CYCLONE_ETCD_FROM=...  "go" or "apt" to insist on one source; default: go if Go is there, else apt
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "bench-peers: $*" >&2; }
version() { "$1" --version | sed -n 's/^etcd Version: //p'; }
finish() { # finish BINARY HOW: puts server and load generator where the benchmark looks for them
    say "etcd $(version "$1") at $1 ($2)"
    command -v go >/dev/null || { say "the load generator (bench-peers/etcdload) needs Go"; exit 1; }
    mkdir -p "$peers"
    ln -sfn "$(realpath "$1")" "$peers/etcd"
    (cd bench-peers/etcdload && GOFLAGS=-mod=readonly go build -trimpath -o "$peers/etcdload" .) >&2
    echo "$1"
    exit 0
}

peers=${XDG_CACHE_HOME:-$HOME/.cache}/cyclone/peers
[ -z "${CYCLONE_ETCD:-}" ] || finish "$CYCLONE_ETCD" "given by CYCLONE_ETCD"

cache=${CYCLONE_CACHE:-$HOME/.cache/cyclone}/peers
from=${CYCLONE_ETCD_FROM:-}
if [ -z "$from" ]; then
    if command -v go >/dev/null; then from=go; else from=apt; fi
fi

case $from in
go)
    pinned=$(sed -n 's/.*go\.etcd\.io\/etcd\/server\/v3 v//p' bench-peers/etcd/go.mod | head -1)
    binary=$cache/etcd-go-$pinned/etcd
    [ -x "$binary" ] && finish "$binary" "built before"
    say "building etcd $pinned with $(go version | cut -d' ' -f3) from the Go module proxy (about a minute)"
    mkdir -p "$(dirname "$binary")"
    (cd bench-peers/etcd && GOFLAGS=-mod=readonly go build -trimpath -o "$binary.new" .) >&2
    mv "$binary.new" "$binary"
    finish "$binary" "built from bench-peers/etcd"
    ;;
apt)
    binary=$cache/etcd-apt/usr/bin/etcd
    [ -x "$binary" ] && finish "$binary" "unpacked before"
    command -v apt-get >/dev/null || { say "needs Go or apt-get, or CYCLONE_ETCD=path of an etcd"; exit 1; }
    # Unpacked, not installed: the package would start a service on etcd's own ports.
    say "unpacking the distribution's package etcd-server"
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    if ! (cd "$download" && apt-get -qq download etcd-server) >&2; then
        say "no such package known; updating the package lists"
        sudo=()
        [ "$(id -u)" -eq 0 ] || sudo=(sudo)
        "${sudo[@]}" apt-get update -qq >&2
        (cd "$download" && apt-get -qq download etcd-server) >&2
    fi
    mkdir -p "$cache/etcd-apt"
    dpkg-deb -x "$download"/etcd-server_*.deb "$cache/etcd-apt"
    finish "$binary" "from $(basename "$download"/etcd-server_*.deb)"
    ;;
*)
    say "CYCLONE_ETCD_FROM is \"$from\"; it must be go or apt"
    exit 1
    ;;
esac

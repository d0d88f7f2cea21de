#!/usr/bin/env bash
# Provides what `cyclone bench run` and `cyclone bench put --peers` measure beside Cyclone: etcd, dragonboat (built with Go from the module
# proxy) and Redis (the distribution's package, unpacked), and their load generators. Starts nothing and installs nothing
# system-wide. Progress goes to standard error; the last line of standard output is the path of the etcd binary.
#
#   CYCLONE_ETCD=PATH      use this etcd
#   CYCLONE_REDIS=PATH     use this redis-server
#   CYCLONE_CACHE=DIR      where binaries are kept (default ~/.cache/cyclone)
#   CYCLONE_ETCD_FROM=...  "go" or "apt" to insist on one source; default: go if Go is there, else apt
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "bench-peers: $*" >&2; }
# Where the benchmarks look.
peers=${XDG_CACHE_HOME:-$HOME/.cache}/cyclone/peers
cache=${CYCLONE_CACHE:-$HOME/.cache/cyclone}/peers
mkdir -p "$peers"

offer() { # offer NAME BINARY HOW: puts a server where the benchmarks look for it
    ln -sfn "$(realpath "$2")" "$peers/$1"
    say "$1 at $2 ($3)"
}

unpack() { # unpack PACKAGE DIRECTORY: a package of the distribution, unpacked; installed it would start a service
    command -v apt-get >/dev/null || { say "$1 needs apt-get, or its own path (see the head of this script)"; return 1; }
    say "unpacking the distribution's package $1"
    local download
    download=$(mktemp -d)
    if ! (cd "$download" && apt-get -qq download "$1") >&2; then
        say "no such package known; updating the package lists"
        local sudo=()
        [ "$(id -u)" -eq 0 ] || sudo=(sudo)
        "${sudo[@]}" apt-get update -qq >&2
        (cd "$download" && apt-get -qq download "$1") >&2
    fi
    mkdir -p "$2"
    dpkg-deb -x "$download/$1"_*.deb "$2"
    rm -rf "$download"
}

etcd_server() {
    if [ -n "${CYCLONE_ETCD:-}" ]; then
        offer etcd "$CYCLONE_ETCD" "given by CYCLONE_ETCD"
        return
    fi
    local from=${CYCLONE_ETCD_FROM:-} binary
    if [ -z "$from" ]; then
        if command -v go >/dev/null; then from=go; else from=apt; fi
    fi
    case $from in
    go)
        local pinned
        pinned=$(sed -n 's/.*go\.etcd\.io\/etcd\/server\/v3 v//p' bench-peers/etcd/go.mod | head -1)
        binary=$cache/etcd-go-$pinned/etcd
        if [ ! -x "$binary" ]; then
            say "building etcd $pinned with $(go version | cut -d' ' -f3) from the Go module proxy (about a minute)"
            build etcd "$binary"
        fi
        offer etcd "$binary" "built from bench-peers/etcd"
        ;;
    apt)
        binary=$cache/etcd-apt/usr/bin/etcd
        [ -x "$binary" ] || unpack etcd-server "$cache/etcd-apt"
        offer etcd "$binary" "from the package etcd-server"
        ;;
    *)
        say "CYCLONE_ETCD_FROM is \"$from\"; it must be go or apt"
        exit 1
        ;;
    esac
}

build() { # build DIRECTORY BINARY: a program of bench-peers
    mkdir -p "$(dirname "$2")"
    (cd "bench-peers/$1" && GOFLAGS="-mod=readonly -buildvcs=false" go build -trimpath -o "$2.new" .) >&2
    mv "$2.new" "$2"
}

redis_server() {
    if [ -n "${CYCLONE_REDIS:-}" ]; then
        offer redis-server "$CYCLONE_REDIS" "given by CYCLONE_REDIS"
    elif command -v redis-server >/dev/null; then
        offer redis-server "$(command -v redis-server)" "installed"
    else
        local binary=$cache/redis-apt/usr/bin/redis-check-rdb
        # The server comes with the tools' package; its own only starts the service.
        [ -x "$binary" ] || unpack redis-tools "$cache/redis-apt"
        offer redis-server "$binary" "from the package redis-tools"
    fi
}

redis_server
if ! command -v go >/dev/null; then
    etcd_server
    say "dragonboat and the load generators need Go: only Redis and the server of etcd are there"
    exit 1
fi
say "building the load generators and dragonboat from the Go module proxy (a few minutes the first time)"
build etcdload "$peers/etcdload"
build dragonboat "$peers/dragonboatload"
etcd_server
readlink -f "$peers/etcd"

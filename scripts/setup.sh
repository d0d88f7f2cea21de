#!/usr/bin/env bash
# Installs the operating system's packages that the build needs, and with `tests` those that the tests need; skips what is there.
# usage: scripts/setup.sh [tests]
set -euo pipefail

case "${1:-}" in
    "" | tests) ;;
    *) echo "setup: unknown: $1; usage: scripts/setup.sh [tests]" >&2; exit 2 ;;
esac
command -v cargo >/dev/null || { echo "setup: Rust is missing; see https://rustup.rs (1.95 or newer)" >&2; exit 1; }

missing=()
need() { # need PACKAGE PROBE...
    local package=$1; shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'install ok installed'; }
need g++ command -v g++
need clang command -v clang
need libclang-dev installed libclang-dev
need libfabric-dev installed libfabric-dev
need pkg-config command -v pkg-config
# The README's first steps.
need redis-tools command -v redis-cli
if [ "${1:-}" = tests ]; then
    need libfabric-bin command -v fi_info
    # The packet driver of the feature dpdk.
    need libdpdk-dev installed libdpdk-dev
    need golang-go command -v go
    need iproute2 command -v ip
    need util-linux command -v taskset
    need python3-venv installed python3-venv
    need openssl command -v openssl
    # The judge of our replies.
    need redis-server command -v redis-server
    # Redis' own tests (make redis-suite), and by which key their package is checked.
    need tcl command -v tclsh
    need debian-archive-keyring test -e /usr/share/keyrings/debian-archive-keyring.gpg
    # The configuration manager's stores (features etcd and zookeeper); etcd's client generates code with protoc.
    need etcd-server command -v etcd
    need zookeeper installed zookeeper
    need default-jre-headless command -v java
    need protobuf-compiler command -v protoc
    need libprotobuf-dev installed libprotobuf-dev
fi

[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "setup: please install: ${missing[*]}" >&2
    exit 1
fi
sudo=()
[ "$(id -u)" -eq 0 ] || sudo=(sudo)
echo "setup: installing ${missing[*]}"
# Debian starts what it installs as a service, unless this says no: no service is wanted on this machine.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap '"${sudo[@]}" rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" >/dev/null
    "${sudo[@]}" chmod +x "$policy"
fi
"${sudo[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null

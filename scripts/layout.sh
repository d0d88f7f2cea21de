#!/usr/bin/env bash
# The layout check: a crate may depend only on crates of lower rooms (the picture in ARCHITECTURE.md), and on those
# that only tests use as a dev-dependency alone.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo metadata --format-version 1 --no-deps --locked | python3 -c '
import json, sys

# Rooms from the bottom up; a crate sees only rooms below its own.
ROOMS = [
    {"cyclone-allocator", "cyclone-pmem", "cyclone-test-support", "cyclone-wire"},
    {"cyclone-wal", "cyclone-packet", "cyclone-fabric"},
    {"cyclone-consensus", "cyclone-store", "cyclone-replication"},
    {"cyclone-pmkv-cm"},
    {"cyclone-replica", "cyclone-pmkv"},
    {"cyclone-client", "cyclone-gateway", "cyclone-bench"},
    {"cyclone-node", "cyclone-sim", "cyclone-one-sided-bench"},
    {"cyclone-pmkv-node"},
    {"cyclone"},
    {"cyclone-bench-cli"},
]
# Only dev-dependencies: no program contains them.
OF_TESTS = {"cyclone-test-support"}
room_of = {name: level for level, names in enumerate(ROOMS) for name in names}
bad = 0
for package in json.load(sys.stdin)["packages"]:
    name = package["name"]
    if name not in room_of:
        print(f"layout: crate {name} stands in no room; add it to scripts/layout.sh and ARCHITECTURE.md")
        bad += 1
        continue
    for dependency in package["dependencies"]:
        target = dependency["name"]
        if target in OF_TESTS and dependency["kind"] != "dev":
            print(f"layout: {name} may have {target} as a dev-dependency only")
            bad += 1
            continue
        if dependency["kind"] == "dev" and room_of.get(target, 99) <= room_of[name]:
            continue
        if target.startswith("cyclone") and room_of.get(target, 99) >= room_of[name]:
            print(f"layout: {name} must not depend on {target}: arrows point down only")
            bad += 1
print("layout: ok" if not bad else f"layout: {bad} arrows point the wrong way")
sys.exit(bool(bad))
'

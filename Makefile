# Cyclone. `make demo` and `make test` set up what is missing, build, and run.
SHELL := /bin/bash
.DELETE_ON_ERROR:

# On CI the build cache lives outside the checkout, so that RocksDB is compiled once per machine.
ifdef CI
export CARGO_TARGET_DIR ?= $(HOME)/.cache/cyclone/target
endif
TARGET := $(or $(CARGO_TARGET_DIR),target)
# libfabric: the one-sided family also over libfabric, whose package `setup` installs.
WORKSPACE := --release --locked --workspace --features libfabric
BIN := $(TARGET)/release/cyclone
SEEDS ?= 300
HOURS ?= 8
# What needs more of the system or of other projects (DPDK, etcd, ZooKeeper) is built once for all its tests, in a separate directory and
# without RocksDB, which would be compiled twice.
MORE := --release --locked --target-dir $(TARGET)/more -p cyclone -p cyclone-node -p cyclone-pmkv-node \
	-p cyclone-bench-cli -p cyclone-packet -p cyclone-pmkv-cm \
	--no-default-features --features cyclone/dpdk,cyclone/etcd,cyclone/zookeeper,cyclone-bench-cli/dpdk
# The simulator alone has no RocksDB in it: it can be built for speed.
# The unit tests of everything below the program, without RocksDB.
CHECK := --release --locked --target-dir $(TARGET)/more --no-default-features --lib -p cyclone-allocator -p cyclone-pmem \
	-p cyclone-wire -p cyclone-wal -p cyclone-packet -p cyclone-consensus -p cyclone-store -p cyclone-replica -p cyclone-gateway \
	-p cyclone-client -p cyclone-pmkv -p cyclone-test-support
FAST := --profile sim --locked -p cyclone-sim
SIM := $(TARGET)/sim/cyclone-sim

.PHONY: check images stores figures bench-net bench-net-dpdk fuzz dpdk sim soak soak-log soak-pmkv mutants simulate demo test bench \
	bench-peers redis-suite clean setup setup-tests build fmt lint layout unit system deny

demo: build
	$(BIN) demo

build: setup
	cargo build $(WORKSPACE)

setup:
	@scripts/setup.sh

setup-tests:
	@scripts/setup.sh tests

test: setup-tests fmt lint layout unit stores dpdk simulate system
	@echo "all tests passed"

fmt:
	cargo fmt --all --check

# For the edit cycle: formatting, lints, layout, and the unit tests that need no RocksDB.
check: fmt layout
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings
	cargo test $(CHECK)

lint:
	cargo clippy $(WORKSPACE) --all-targets -- -D warnings
	cargo clippy --release --locked -p cyclone-fabric -p cyclone-replication --all-targets -- -D warnings
	cargo clippy --release --locked -p cyclone-sim --features planted --all-targets -- -D warnings
	cargo clippy $(MORE) --all-targets -- -D warnings

layout:
	@scripts/layout.sh
	@scripts/examples.sh
	@python3 scripts/columns.py
	@python3 scripts/words.py
	@python3 scripts/cycles.py

# Unit, integration and documentation tests; the crash and fault tests print their seeds.
unit:
	cargo build $(WORKSPACE)
	cargo test $(WORKSPACE)
	scripts/go-tests.sh

# Real etcd and ZooKeeper: as stores, and under servers that are killed, as they are themselves.
stores:
	cargo test $(MORE) --test stores
	cargo test $(MORE) --test pmkv_kill -- under

# The DPDK driver and a cluster over it: shared memory and veth pairs, no huge pages.
dpdk:
	cargo build $(MORE)
	cargo test $(MORE) --lib --test dpdk --test dpdk_cluster

# About a minute of fresh seeds, with what the tests were built with; the fixed ones are among the tests above.
simulate:
	$(TARGET)/release/cyclone-sim run --seeds 1000000 --seconds 60

# SEEDS=n fresh seeds of the simulated cluster.
sim: setup
	cargo build $(FAST)
	$(SIM) run --seeds $(SEEDS)

# HOURS=h of fresh seeds, one process per CPU. One that finds a failure prints it and stops; the others go on, and the
# whole fails in the end.
soak: setup
	cargo build $(FAST)
	seq $$(nproc) | xargs -P 0 -I{} $(SIM) run --seeds 1000000000 --seconds $$(( $(HOURS) * 3600 ))

# MINUTES=m of inputs that coverage leads to for everything that reads bytes from the network, then as many of random input for the property
# tests of every crate.
fuzz: MINUTES ?= 10
fuzz: setup-tests
	scripts/fuzz-guided.sh $(MINUTES)
	scripts/fuzz.sh $(MINUTES)

# MINUTES=m of skewed overwrites of the log-structured store at 80% full: space, memory and latency per minute.
soak-pmkv: MINUTES ?= 30
soak-pmkv: build
	$(BIN) bench pmkv --part soak --minutes $(MINUTES)

# MINUTES=m of writes at full speed over a small log, memory and flash: space, memory and stalls per minute.
soak-log: MINUTES ?= 30
soak-log: build
	$(BIN) bench soak-log --minutes $(MINUTES)

# Plants one bug after another and asks whether the simulator notices.
mutants: setup
	cargo build $(FAST) --features planted --target-dir $(TARGET)/planted
	$(TARGET)/planted/sim/cyclone-sim mutants

# Writes the images of a release's formats by that release's PROGRAM, for the test target `images`.
PROGRAM ?= $(BIN)
images:
	CYCLONE_IMAGES_PROGRAM=$(abspath $(PROGRAM)) cargo test $(WORKSPACE) --test images -- --ignored write_images

# Unmodified Redis clients against a real cluster.
system:
	scripts/redis-clients.sh $(BIN)

# Redis' own tests (Debian's source package) against a real cluster; tests/redis-suite/expected.txt lists those that fail, with reasons.
redis-suite: setup-tests build
	scripts/redis-suite.sh $(BIN) $(UNITS)

bench: build
	$(BIN) bench put

# Needs root: makes network namespaces and removes them. DPDK over shared memory between the machines stands beside the other drivers where
# the system has it; then $(BIN) has it in it until the next build.
bench-net: setup-tests
	@if pkg-config --exists libdpdk; then \
		cargo build $(WORKSPACE),dpdk; \
	else \
		echo "bench-net: without DPDK: the system has no libdpdk" && cargo build $(WORKSPACE); \
	fi
	$(BIN) bench net --out $(TARGET)/bench-net

bench-net-dpdk: bench-net

# Installs etcd, dragonboat and Redis (nothing system-wide), then measures them beside us.
bench-peers: setup-tests build
	scripts/bench-peers.sh
	$(BIN) bench figures --figure peers $(if $(QUICK),--quick --minutes 10) --out $(TARGET)/bench-peers

# The figures of docs/figures (cyclone fig. 1 and 8 to 20, rowan fig. 9 and 16, YCSB, peers): about four
# hours; QUICK=1 takes about a quarter of an hour. Goes on with what was ended early: a result of the same
# plan and source stays.
figures: setup-tests build
	scripts/bench-peers.sh || echo "some peers are missing: their lines are skipped"
	$(BIN) bench figures --missing $(if $(QUICK),--quick --minutes 60 --out $(TARGET)/figures-quick)

# Licences and advisories of every dependency (needs cargo-deny).
deny:
	cargo deny --locked check

clean:
	cargo clean

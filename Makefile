# Cyclone. `make demo` and `make test` set up what is missing, build, and run.
SHELL := /bin/bash
.DELETE_ON_ERROR:

# On CI the build cache lives outside the checkout, so that RocksDB is compiled once per machine.
ifdef CI
export CARGO_TARGET_DIR ?= $(HOME)/.cache/cyclone/target
endif
TARGET := $(or $(CARGO_TARGET_DIR),target)
CARGO_BUILD := cargo build --release --locked --workspace
BIN := $(TARGET)/release/cyclone
SEEDS ?= 20

.PHONY: demo test bench bench-peers clean setup build fmt lint layout unit system deny

demo: build
	$(BIN) demo

build: setup
	$(CARGO_BUILD)

setup:
	@scripts/setup.sh

test: setup fmt lint layout unit system
	@echo "all tests passed"

fmt:
	cargo fmt --all --check

lint:
	cargo clippy --release --locked --workspace --all-targets -- -D warnings

layout:
	@scripts/layout.sh

# Unit, integration and documentation tests; the crash and fault tests print their seeds.
unit:
	$(CARGO_BUILD)
	cargo test --release --locked --workspace

# Unmodified Redis clients against a real cluster.
system:
	scripts/redis-clients.sh $(BIN)

bench: build
	$(BIN) bench put

bench-peers: build
	scripts/bench-peers.sh
	$(BIN) bench put --peers

# Licences and advisories of every dependency (needs cargo-deny).
deny:
	cargo deny --locked check

clean:
	cargo clean

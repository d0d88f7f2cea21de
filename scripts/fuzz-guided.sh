#!/usr/bin/env bash
# Inputs sought by coverage (libFuzzer) for so many minutes (10), the same time for each target of fuzz/: what finds its way into code that
# no earlier input reached is kept, and changed further. What was kept goes on next time, below the build directory.
# A failure prints the file with the input, and how to run it again.
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:-10}
host=$(rustc -vV | sed -n 's/^host: //p')
work=${CARGO_TARGET_DIR:-target}/fuzz
# Coverage by the stable compiler: a counter for each edge, and the operands of comparisons. Only for the target, not for build scripts.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Ctarget-cpu=x86-64-v3 -Ctarget-feature=+pclmulqdq"
RUSTFLAGS=$(tr -s ' \n' ' ' <<<"$RUSTFLAGS")
cargo build --release --locked --manifest-path fuzz/Cargo.toml --target-dir "$work" --target "$host"

mapfile -t targets < <(sed -n 's/^path = "targets\/\(.*\)\.rs"$/\1/p' fuzz/Cargo.toml)
seconds=$((60 * minutes / ${#targets[@]}))
for target in "${targets[@]}"; do
    corpus=$work/corpus/$target
    mkdir -p "$corpus"
    echo "fuzz: $target for $seconds s, from $(find "$corpus" -type f | wc -l) inputs kept"
    program=$work/$host/release/$target
    if ! "$program" "$corpus" -max_total_time="$seconds" -max_len=4096 -use_value_profile=1 -timeout=10 \
        -artifact_prefix="$work/$target-" -print_final_stats=1 -verbosity=0 >"$work/$target.log" 2>&1; then
        tail -n 40 "$work/$target.log"
        echo "fuzz: $target failed; again: $program FILE" >&2
        exit 1
    fi
    grep -E "number_of_executed_units|new_units_added" "$work/$target.log"
done
echo "fuzz: nothing found in ${#targets[@]} targets"

# Sourced by scripts that test a real cluster: starts one, and ends it with the script.
#
#   bin     the program
#   python  a Python 3 interpreter
#   work    a directory of the script's own, removed at its end; here a new one

work=$(mktemp -d)
script=$(basename "$0" .sh)

# Prints one field of the cluster's description; several values on separate lines.
describe() {
    "$python" -c "import json, sys; cluster = json.load(open(sys.argv[1])); print(*($1), sep='\n')" "$work/cluster.json"
}

# start_cluster OPTION...  writes the description of a new cluster
start_cluster() {
    "$bin" cluster start --directory "$work/cluster" "$@" >"$work/cluster.json"
}

cleanup() {
    local status=$? pids=() regions
    # Empty when the start failed: then it has ended its nodes itself.
    if [ -s "$work/cluster.json" ]; then
        mapfile -t pids < <(describe "node['pid'] for node in cluster['nodes']")
        regions=$(describe "[cluster['regions']]")
        kill "${pids[@]}" 2>/dev/null || true
        local patience=100
        for pid in "${pids[@]}"; do
            while kill -0 "$pid" 2>/dev/null; do
                sleep 0.05
                patience=$((patience - 1))
                if [ "$patience" -eq 0 ]; then kill -9 "${pids[@]}" 2>/dev/null || true; fi
            done
        done
        rm -rf "$regions"
    fi
    if [ "$status" -ne 0 ]; then
        echo "$script: failed with status $status" >&2
        tail -n 5 "$work"/cluster/node*.log >&2 || true
    fi
    rm -rf "$work"
}
trap cleanup EXIT
# So that a signal is acted on only when the running command has ended, and the description of the cluster is there.
trap 'exit 130' INT
trap 'exit 143' TERM

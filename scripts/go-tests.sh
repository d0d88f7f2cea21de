#!/usr/bin/env bash
# Tests of the peers' load generator in Go: its standard library is all they need. Skipped where Go is missing or older than the module wants.
set -euo pipefail
cd "$(dirname "$0")/../bench-peers/load"

wanted=$(awk '$1 == "go" { print $2 }' go.mod)
have=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//') || true
if [ -z "$have" ] || [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" != "$wanted" ]; then
    echo "go tests: skipped, they need Go $wanted (here: ${have:-none})"
    exit 0
fi
GOTOOLCHAIN=local GOPROXY=off GOFLAGS=-mod=readonly go test ./...

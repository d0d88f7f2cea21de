#!/usr/bin/env bash
# Makes a Python environment with the pinned Redis client, once, outside the checkout. Prints its interpreter.
#
#   CYCLONE_CACHE=DIR  where it is kept (default ~/.cache/cyclone)
set -euo pipefail

redis_version=7.0.1
venv=${CYCLONE_CACHE:-$HOME/.cache/cyclone}/python-redis-$redis_version
if ! "$venv/bin/python" -c "import redis; assert redis.__version__ == '$redis_version'" >/dev/null 2>&1; then
    echo "python-env: installing redis $redis_version into $venv" >&2
    rm -rf "$venv"
    mkdir -p "$(dirname "$venv")"
    python3 -m venv "$venv" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "redis==$redis_version" >&2
fi
echo "$venv/bin/python"

#!/usr/bin/env bash
# Sets everything up and runs all checks. Arguments are passed to pytest: launch/test.sh -k plan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh checks
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
shellcheck -x launch/*.sh launch/slurm/*.sh .ci/run
exec python -m pytest -q "$@"

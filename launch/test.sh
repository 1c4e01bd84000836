#!/usr/bin/env bash
# Sets everything up and runs all checks. Arguments are passed to pytest: launch/test.sh -k plan
# launch/test.sh --recording [COMMIT] tells whether this checkout computes what that commit did.
# launch/test.sh --megatron 0.19.2 runs parity, resuming, pipelines and flags in both training loops
# with that megatron-core, in an environment of its own.
# launch/test.sh --mutants 50 tests the tests instead. CONTRIBUTING.md says more of all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

# Two at a time, file by file, since files have fixtures that take long; tests/conftest.py orders them.
pytest_flags=(-q -n 2 --dist loadfile --no-loadscope-reorder)
if [ "${1:-}" = --megatron ]; then
    version=${2:-}
    version_of_megatron "$version"
    launch/setup.sh megatron "$version"
    export PATH="$PWD/.venv-megatron-$version/bin:$PATH" OMP_NUM_THREADS=1 PYTHONPATH=$PWD
    exec python -m pytest "${pytest_flags[@]}" tests/training tests/megatron_patches "${@:3}"
fi
launch/setup.sh checks
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
case ${1:-} in
    --recording) exec python tests/recording since "${@:2}" ;;
    --mutants) PYTHONPATH=tests exec python -m mutation "$@" ;;
esac
ruff check .
ruff format --check .
mypy
shellcheck -x launch/*.sh launch/slurm/*.sh .ci/run
exec python -m pytest "${pytest_flags[@]}" "$@"

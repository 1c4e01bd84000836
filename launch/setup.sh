#!/usr/bin/env bash
# Makes .venv with everything that training and benchmarks need; quick when it is there.
# launch/setup.sh checks: with what the checks need, too, such as a CUDA compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_version=2.13.0
stamp=.venv/set-up-for
wanted="$torch_version $(cksum <pyproject.toml) $(pwd)"
case "$(cat "$stamp" 2>/dev/null || true)" in
    "$wanted checks") exit 0 ;;
    "$wanted ") [ "${1:-}" = checks ] || exit 0 ;;
esac
echo "setting up .venv (once; some minutes)" >&2
python3 -m venv .venv
# Twice quiet: errors alone, no warnings.
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet --quiet)
# torch first and pinned: no later step may replace it by another build.
"${pip[@]}" install "torch==$torch_version" numpy
echo "torch==$torch_version" >.venv/constraints.txt
extras=megatron,plot
[ "${1:-}" != checks ] || extras=megatron,dev,cuda-compile
"${pip[@]}" install --constraint .venv/constraints.txt --editable ".[$extras]"
echo "$wanted ${1:-}" >"$stamp"

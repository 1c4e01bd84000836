#!/usr/bin/env bash
# Makes .venv with everything that training, tests and benchmarks need; quick when it is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_version=2.13.0
stamp=.venv/set-up-for
wanted="$torch_version $(cksum <pyproject.toml) $(pwd)"
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi
echo "setting up .venv (once; some minutes)" >&2
python3 -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
# torch first and pinned: no later step may replace it by another build.
"${pip[@]}" install "torch==$torch_version" numpy
echo "torch==$torch_version" >.venv/constraints.txt
"${pip[@]}" install --constraint .venv/constraints.txt --editable '.[megatron,dev,cuda-compile]'
echo "$wanted" >"$stamp"

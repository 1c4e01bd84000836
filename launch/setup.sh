#!/usr/bin/env bash
# Makes .venv with everything that training and benchmarks need; quick when it is there.
# launch/setup.sh checks: with what the checks need, too, such as a CUDA compiler.
# launch/setup.sh megatron VERSION: makes an environment of its own to test with that megatron-core,
#     kept for all checkouts of this user, and links it as .venv-megatron-VERSION.
# PYTHON=FILE: the interpreter. Default: the newest one that suits megatron-core.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

torch_version=2.13.0

# make_environment FOLDER STAMP PYTHON EXTRAS REQUIREMENTS...: with torch before all else.
make_environment() {
    local folder=$1 stamp=$2 python=$3 extras=$4
    shift 4
    echo "setting up $folder with $("$python" --version), $python (once; some minutes)" >&2
    "$python" -m venv --clear "$folder"
    # Twice quiet: errors alone, no warnings.
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet --quiet)
    # torch first and pinned: no later step may replace it by another build.
    "${pip[@]}" install "torch==$torch_version" numpy
    echo "torch==$torch_version" >"$folder/constraints.txt"
    "${pip[@]}" install --constraint "$folder/constraints.txt" "$@" ".[$extras]"
    echo "$stamp" >"$folder/set-up-for"
}

if [ "${1:-}" = megatron ]; then
    version=${2:-}
    version_of_megatron "$version"
    python=$(find_python "$version") || exit 2
    stamp="$torch_version $(cksum <pyproject.toml) megatron-core $version"
    folder=${XDG_CACHE_HOME:-$HOME/.cache}/distca/megatron-$version-python$(python_version "$python")
    if [ "$(cat "$folder/set-up-for" 2>/dev/null || true)" != "$stamp" ]; then
        mkdir -p "$(dirname "$folder")"
        make_environment "$folder" "$stamp" "$python" megatron,dev \
            "megatron-core==$version"
        # Other checkouts use it, too: what is tested is imported from where it lies.
        "$folder/bin/python" -m pip --disable-pip-version-check --quiet uninstall --yes distca
    fi
    ln -sfn "$folder" ".venv-megatron-$version"
    exit 0
fi

case ${1:-} in
    '' | checks) ;;
    *) die "launch/setup.sh takes no $1: give nothing, checks, or megatron VERSION" ;;
esac
wanted="$torch_version $(cksum <pyproject.toml) $(pwd) ${PYTHON:-}"
case "$(cat .venv/set-up-for 2>/dev/null || true)" in
    "$wanted checks") exit 0 ;;
    "$wanted ") [ "${1:-}" = checks ] || exit 0 ;;
esac
extras=megatron,plot,serve
[ "${1:-}" != checks ] || extras=megatron,dev,cuda-compile
python=$(find_python) || exit 2
make_environment .venv "$wanted ${1:-}" "$python" "$extras" --editable

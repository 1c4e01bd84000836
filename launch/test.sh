#!/usr/bin/env bash
# Sets everything up and runs all checks. With arguments pytest alone runs: launch/test.sh -k plan
# launch/test.sh --full, without other arguments, runs all checks, and all tests at their stated size, also
# with Python 3.11, with vLLM and with other trainers. It takes hours. A summary is printed at the end.
# launch/test.sh --recording [COMMIT] tells whether this checkout computes what that commit did.
# launch/test.sh --megatron 0.18.2 runs the tests of training with that megatron-core, in an
# environment of its own.
# launch/test.sh --python 3.11 runs the tests of all that needs no Megatron with that Python.
# launch/test.sh --vllm runs the tests of vLLM's connector, in an environment of its own (Python 3.11).
# launch/test.sh --trainers runs the tests of adapters for other trainers, likewise.
# launch/test.sh --mutants 50 tests the tests instead. CONTRIBUTING.md says more of all.
# What stands behind -- goes to pytest as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh

# Two at a time, file by file, since files have fixtures that take long; tests/conftest.py orders them.
pytest_flags=(-q -n 2 --dist loadfile --no-loadscope-reorder)
# test_in ENVIRONMENT ARGUMENTS...: pytest in an environment without the project itself.
test_in() {
    export PATH="$PWD/$1/bin:$PATH" OMP_NUM_THREADS=1 PYTHONPATH=$PWD
    shift
    exec python -m pytest "${pytest_flags[@]}" "$@"
}
linters() {
    ruff check . && ruff format --check . && mypy && shellcheck -x launch/*.sh launch/slurm/*.sh .ci/run
}
# All tests at their stated size, in each environment that there can be, and a line for each.
everything() {
    local each log lines=() failed=0
    log=$(mktemp)
    linters || failed=1
    lines+=("ruff, mypy and shellcheck: $([ $failed = 0 ] && echo passed || echo failed)")
    for each in '' '--python 3.11' --vllm --trainers; do
        if [ -n "$each" ] && ! find_python 3.11 &>/dev/null; then
            lines+=("launch/test.sh $each --full: not run, since there is no Python 3.11 here")
            continue
        fi
        # shellcheck disable=SC2086 # a flag and its value
        launch/test.sh $each --full -rs 2>&1 | tee "$log" || failed=1
        lines+=("launch/test.sh${each:+ $each} --full: $(grep -E ' in [0-9.]+s' "$log" | tail -n 1)")
    done
    rm "$log"
    printf '%s\n' '' "summary of $(git rev-parse --short HEAD 2>/dev/null || echo this checkout):" "${lines[@]}"
    return $failed
}
# Before set-up, which takes minutes: flags that neither these tests nor pytest have.
known=' --full --no-ping-pong --transport --collect-only --co --lf --last-failed --ff --failed-first --nf --sw
 --stepwise --stepwise-skip --maxfail --exitfirst --durations --durations-min --tb --showlocals --deselect
 --ignore --ignore-glob --pdb --trace --fixtures --markers --setup-show --setup-plan --capture --color
 --junitxml --verbose --quiet --log-level --log-cli-level --log-file --basetemp --cache-clear --cache-show
 --dist --numprocesses --import-mode --strict-markers --version '
mode=${1:-}
case $mode in
    --help | -h) ;;
    --mutants)
        [[ ${2:-} =~ ^[0-9]+$ ]] || die "--mutants takes a number of mutants, not '${2:-}'"
        ;;
    --recording)
        [ $# -lt 2 ] || git rev-parse -q --verify "$2^{commit}" &>/dev/null ||
            die "--recording: there is no commit $2"
        ;;
    *)
        words=()
        while [ $# -gt 0 ] && [ "$1" != -- ]; do
            word=$1
            case $word in
                --megatron | --python | --vllm | --trainers) [ ${#words[@]} = 0 ] || die "$word must come first" ;;
                --*)
                    [[ $known == *[[:space:]]"${word%%=*}"[[:space:]]* ]] ||
                        die "unknown flag $word: launch/test.sh --help lists its own. Another one of pytest" \
                            "goes behind --: launch/test.sh -- $word"
                    ;;
                tests/*) [ -e "${word%%::*}" ] || die "there is no ${word%%::*}" ;;
            esac
            words+=("$word")
            shift
        done
        # pytest would take what stands behind -- for files.
        set -- "${words[@]}" "${@:2}"
        ;;
esac
case $mode in
    --help | -h)
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' launch/test.sh
        exit
        ;;
    --megatron)
        version_of_megatron "${2:-}"
        launch/setup.sh megatron "$2"
        test_in ".venv-megatron-$2" tests/training tests/megatron_patches "${@:3}"
        ;;
    --python)
        version_of_python "${2:-}"
        launch/setup.sh python "$2"
        test_in ".venv-python-$2" tests/{plan,cost,documents,schedule,simulate,attention} \
            tests/inference/test_exactness.py "${@:3}"
        ;;
    --vllm)
        launch/setup.sh vllm
        test_in .venv-vllm tests/with_vllm tests/prefill/test_{transfers,{prefill,tensor_parallel}_ranks}.py "${@:2}"
        ;;
    --trainers)
        launch/setup.sh trainers
        test_in .venv-trainers tests/examples/test_{{torchtitan,veomni,automodel,ms_swift,verl}_adapter,refusing_adapters}.py \
            tests/library/test_{verl,split_rows}.py "${@:2}"
        ;;
esac
# Some of the tests need no CUDA compiler, whose packages are large; those that do are skipped.
whole=false
case " $* " in
    ' --full ') whole=true && launch/setup.sh checks ;;
    *" -k "* | *" tests/"*) launch/setup.sh tests ;;
    *) launch/setup.sh checks ;;
esac
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
case $mode in
    --recording) exec python tests/recording since "${@:2}" ;;
    --mutants) PYTHONPATH=tests exec python -m mutation "$@" ;;
esac
if $whole; then
    everything
    exit
fi
[ $# != 0 ] || linters
exec python -m pytest "${pytest_flags[@]}" "$@"

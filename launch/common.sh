# shellcheck shell=bash
# shellcheck disable=SC2034 # its variables are used by the scripts that source it
# What launch/local.sh and launch/slurm/*.sh share; they source it from the repository's root.

# The newest megatron-core that the checks were run with.
newest_megatron=0.19.2

die() {
    echo "error: $*" >&2
    exit 2
}

# python_version PYTHON: its minor version, such as 3.12; fails where PYTHON does not run.
python_version() {
    "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# find_python [MEGATRON_CORE]: PYTHON, or else the newest interpreter on PATH that suits. For a given
# version of megatron-core those of version managers, too: its environment is not the default one.
find_python() {
    local versions=(3.13 3.12 3.11) candidates=() version name python
    case ${1:-} in
        '') ;;
        0.16.*) ;;
        *) versions=(3.13 3.12) ;;
    esac
    for version in "${versions[@]}"; do
        candidates+=("python$version")
        [ -z "${1:-}" ] || candidates+=("$HOME/.pyenv/versions/$version"*/bin/python
            "$HOME/.local/share/uv/python/cpython-$version"*/bin/python
            "$HOME/"{miniconda3,miniforge3,anaconda3}/envs/*/bin/"python$version"
            "/opt/python/$version"*/bin/python)
    done
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for python in "${candidates[@]}" ${PYTHON:-python3}; do
        # A version manager's stand-in may be there for a version that is not.
        name=$(python_version "$python") || continue
        case " ${versions[*]} " in *" $name "*) command -v "$python" && return ;; esac
    done
    echo "error: no Python of ${versions[*]} with venv and pip runs here${PYTHON:+ as $PYTHON}:" \
        "install one, or give PYTHON=FILE" >&2
    return 1
}

# The launcher's own options, wherever they stand. Sets these variables, and `flags`: all others,
# which are pretrain_gpt.py's.
dry_run=false model=llama-8b python=.venv/bin/python processes=auto
from='' container='' mounts='' interface='' port='' output=sweep
parse_launcher_options() {
    local option
    flags=()
    while [ $# -gt 0 ]; do
        case $1 in
            --dry-run) dry_run=true ;;
            --model | --python | --processes | --from | --container | --mounts | --interface | \
                --port | --output)
                [ $# -ge 2 ] || die "$1 needs a value"
                printf -v "${1#--}" %s "$2"
                shift
                ;;
            --model=* | --python=* | --processes=* | --from=* | --container=* | --mounts=* | \
                --interface=* | --port=* | --output=*)
                option=${1%%=*}
                printf -v "${option#--}" %s "${1#*=}"
                ;;
            --help)
                sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" | grep -v '^SBATCH\|^!'
                exit 0
                ;;
            *) flags+=("$1") ;;
        esac
        shift
    done
}

# value_of FLAG DEFAULT ARGUMENTS...: what argparse will take, the last one given.
value_of() {
    local flag=$1 value=$2
    shift 2
    while [ $# -gt 1 ]; do
        case $1 in
            "$flag") value=$2 ;;
            "$flag="*) value=${1#*=} ;;
        esac
        shift
    done
    case ${1-} in "$flag="*) value=${1#*=} ;; esac
    echo "$value"
}

# Megatron's flags for the sizes of distca/cost/model_sizes.py, as Llama 3 has the rest.
# Sets `model_flags`.
choose_model() {
    local layers hidden ffn heads groups
    case $model in
        llama-8b) read -r layers hidden ffn heads groups <<<"32 4096 14336 32 8" ;;
        llama-34b) read -r layers hidden ffn heads groups <<<"48 8192 22016 64 16" ;;
        llama-70b) read -r layers hidden ffn heads groups <<<"80 8192 28672 64 8" ;;
        *) die "no --model $model: give llama-8b, llama-34b or llama-70b (flags of your own may follow)" ;;
    esac
    model_flags=(
        --num-layers "$layers" --hidden-size "$hidden" --ffn-hidden-size "$ffn"
        --num-attention-heads "$heads" --group-query-attention --num-query-groups "$groups"
        --normalization RMSNorm --swiglu --disable-bias-linear
        --position-embedding-type rope --rotary-base 500000
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    )
    # So that GPUs of 80 GB hold the larger ones.
    [ "$model" = llama-8b ] || model_flags+=(
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    )
}

# How a run trains, whatever its sizes. The user's own flags come after these and win.
training_flags=(
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --train-iters 10000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200 --weight-decay 0.1
    --tokenizer-type HuggingFaceTokenizer --log-interval 10
)

# Kernels allocate by the size of their tasks, which varies: pieces that torch's allocator can join.
# Megatron-LM reads this older one of the variable's two names, and torch takes it before the other.
allocator=PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-${PYTORCH_ALLOC_CONF:-expandable_segments:True}}

# Prints a command so that a shell reads it as it is.
print_command() {
    printf '%q ' "$@"
    echo
}

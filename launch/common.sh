# shellcheck shell=bash
# shellcheck disable=SC2034 # its variables are used by the scripts that source it
# What launch/local.sh and launch/slurm/*.sh share; they source it from the repository's root.

# The newest megatron-core that the checks were run with, and the versions of Python that train with it.
newest_megatron=0.19.2
training_pythons='3.13 3.12'

die() {
    echo "error: $*" >&2
    exit 2
}

# python_version PYTHON: its minor version, such as 3.12; fails where PYTHON does not run.
python_version() {
    "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# version_of_megatron TEXT: ends the script unless it is one.
version_of_megatron() {
    [[ $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
        die "'$1' is no version of megatron-core: give one such as $newest_megatron"
}

# version_of_python TEXT: ends the script unless it is one that the project runs with.
version_of_python() {
    [[ " $training_pythons 3.11 " == *" $1 "* ]] ||
        die "'$1' is no version of Python that DistCA is tested with: give 3.11, 3.12 or 3.13"
}

# find_python VERSIONS...: PYTHON, or else an interpreter of the first of these versions that is on PATH
# or in the folder of a version manager.
find_python() {
    local versions=("$@") candidates=() version name python
    for version in "${versions[@]}"; do
        candidates+=("python$version"
            "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python
            "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version"*/bin/python
            "${CONDA_PREFIX:-$HOME/miniconda3}/bin/python$version"
            "$HOME/"{miniconda3,miniforge3,anaconda3}/{,envs/*/}"bin/python$version"
            "$HOME/.asdf/installs/python/$version"*/bin/python
            "$HOME/.local/share/mise/installs/python/$version"*/bin/python
            "/opt/python/$version"*/bin/python)
    done
    candidates+=(python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for python in "${candidates[@]}"; do
        # A version manager's stand-in may be there for a version that is not.
        name=$(python_version "$python") || continue
        case " ${versions[*]} " in *" $name "*) command -v "$python" && return ;; esac
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "error: $PYTHON is no Python of ${versions[*]} that runs, with venv and pip" >&2
    else
        echo "error: no Python of ${versions[*]} with venv and pip is on PATH or in a version manager:" \
            "install one (uv python install $1, pyenv install $1, conda create -n python$1" \
            "python=$1), or give PYTHON=FILE" >&2
    fi
    return 1
}

# seconds_as_text SECONDS: such as 1:05.
seconds_as_text() {
    printf '%d:%02d' $(($1 / 60)) $(($1 % 60))
}

# telling PROCESS COMMAND...: waits for a child, which ends with the script, and says every ten seconds
# what COMMAND prints. Its status is the child's.
telling() {
    local process=$1 begun=$SECONDS
    shift
    # shellcheck disable=SC2064 # this process, not a later one
    trap "kill $process 2>/dev/null || true" EXIT
    while ! timeout 9 tail -s 0.1 --pid="$process" -f /dev/null; do
        echo "  $(seconds_as_text $((SECONDS - begun))), $("$@")" >&2
    done
    trap - EXIT
    wait "$process"
}

# passing_on SECONDS WHAT: copies lines. Whenever none has come for as many seconds it says on standard
# error how long WHAT, such as "training", has run.
passing_on() {
    local line begun=$SECONDS part=
    while true; do
        if IFS= read -r -t "$1" line; then
            printf '%s\n' "$part$line"
            part=
        elif [ $? -gt 128 ]; then
            # No whole line in time.
            part+=$line
            echo "  $(seconds_as_text $((SECONDS - begun))), $2" >&2
        else
            printf '%s' "$part$line"
            return
        fi
    done
}

# whole_number NAME VALUE: ends the script unless the value is a whole number of at least 1.
whole_number() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 $2: give a number of at least 1"
}

# The launcher's own options, wherever they stand; the first argument names those that the script
# has beside --dry-run and --help. Sets these variables, and `flags`: all others, which are
# pretrain_gpt.py's.
dry_run=false model=llama-8b python=.venv/bin/python processes=auto
from='' container='' mounts='' interface='' port='' output=sweep
prolog='' logs=logs retries=3
parse_launcher_options() {
    local option value taken=" $1 " script=$0
    read -ra launcher_options <<<"dry-run help $1"
    shift
    # It may have been started from another folder than the repository's root.
    [ -f "$script" ] || script=launch/${0##*/}
    flags=()
    while [ $# -gt 0 ]; do
        option=${1%%=*}
        case $1 in
            --dry-run) dry_run=true ;;
            --help)
                sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script" | grep -v '^SBATCH\|^!'
                exit 0
                ;;
            --*=*) value=${1#*=} ;;&
            --*)
                if [[ $taken != *" ${option#--} "* ]]; then
                    flags+=("$1")
                else
                    if [ "$option" = "$1" ]; then
                        [ $# -ge 2 ] || die "$1 needs a value"
                        value=$2
                        shift
                    fi
                    printf -v "${option#--}" %s "$value"
                fi
                ;;
            *) flags+=("$1") ;;
        esac
        shift
    done
    [ -z "$port" ] || whole_number --port "$port"
}

# check_flags SCRIPT: ends the launcher at a flag that neither pretraining nor this Python script has.
# Two tables name all of Megatron-LM's, some by a pattern such as moe-*.
check_flags() {
    local known patterns pattern word name near
    local tables=(megatron_patches/flags/refused.py megatron_patches/flags/followed.py)
    known=" $(grep -oh -- '[a-z0-9][a-z0-9_-]*' "${tables[@]}" megatron_patches/flags/distca.py "$1" | tr '\n' ' ')"
    mapfile -t patterns < <(grep -oh -- '[a-z0-9][a-z0-9-]*-\*' "${tables[@]}")
    for word in "${flags[@]}"; do
        case ${word%%=*} in
            --nodes)
                die "--nodes is a flag of sbatch: give it before the script's name (in a dry run set" \
                    "SLURM_JOB_NUM_NODES)"
                ;;
            --ntasks | --ntasks-per-node | --partition | --account | --time | --job-name | --exclusive)
                die "${word%%=*} is a flag of sbatch: give it before the script's name" ;;
        esac
    done
    [ ${#flags[@]} = 0 ] || [[ ${flags[0]} == --* ]] || die "${flags[0]} belongs to no flag"
    for word in "${flags[@]}"; do
        name=${word%%=*}
        [[ $name == --* && $known != *" ${name#--} "* && $known != *" ${name#--no-} "* &&
            $known != *" ${name#--disable-} "* ]] || continue
        for pattern in "${patterns[@]}"; do
            # shellcheck disable=SC2053 # a pattern
            [[ ${name#--} != $pattern && ${name#--no-} != $pattern &&
                ${name#--disable-} != $pattern ]] || continue 2
        done
        # Words without a hyphen may be of a comment. A flag that is near is a help, no need.
        near=$(tr ' ' '\n' <<<"$known" | grep -- - | python3 -c 'if True:
            import difflib, sys
            known = [*sys.argv[2:], *sys.stdin.read().split()]
            print(*difflib.get_close_matches(sys.argv[1], known, 1, 0.75))
        ' "${name#--}" "${launcher_options[@]}" 2>/dev/null || true)
        die "there is no $name${near:+ (is --$near meant?)}: --help lists the launcher's flags, docs/reference.md DistCA's"
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

# The models of distca/cost/model_sizes.py that exist, a row each: layers, hidden size, width of the MLP or
# of an expert, heads, key-value heads, elements of a head, rotary base; tensor and pipeline size and
# tokens of a rank with which GPUs of 80 GB hold it on Slurm; experts, those of a token, and ranks that
# share the experts.
models='llama-8b         32  4096 14336  32  8 128  500000 8  2 65536
llama-34b        48  8192 22016  64 16 128  500000 8  2 65536
llama-70b        80  8192 28672  64  8 128  500000 8  2 65536
llama-405b      126 16384 53248 128  8 128  500000 8 18 32768
llama-3.1-8b     32  4096 14336  32  8 128  500000 8  2 65536
llama-3.1-70b    80  8192 28672  64  8 128  500000 8  2 65536
llama-3.1-405b  126 16384 53248 128  8 128  500000 8 18 32768
llama-3.2-1b     16  2048  8192  32  8  64  500000 8  2 65536
llama-3.2-3b     28  3072  8192  24  8 128  500000 8  2 65536
qwen3-8b         36  4096 12288  32  8 128 1000000 8  2 65536
qwen3-32b        64  5120 25600  64  8 128 1000000 8  2 65536
mixtral-8x7b     32  4096 14336  32  8 128 1000000 8  2 65536   8 2  8
qwen3-30b-a3b    48  2048   768  32  4 128 1000000 4  2 65536 128 8  8
qwen3-235b-a22b  94  4096  1536  64  4 128 1000000 4  2 32768 128 8 32'

# Sets Megatron's `model_flags`, `model_tensor`, `model_stages`, `model_tokens` and `model_experts` (empty: it
# has none) of `model`, and `small` to true if GPUs of 80 GB hold it without recomputation.
choose_model() {
    local name names=() layers hidden ffn heads groups channels rotary chosen sharing more=()
    while read -r name layers hidden ffn heads groups channels rotary model_tensor model_stages model_tokens \
        model_experts chosen sharing; do
        names+=("$name")
        [ "$name" != "$model" ] || break
    done <<<"$models"
    [ -n "$model" ] && [ "$name" = "$model" ] ||
        die "no --model $model: give one of ${names[*]}. For others give Megatron's flags of the sizes" \
            "after any of these: they win"
    case $model in
        # Their output layer shares the embedding's weights.
        llama-3.2-*) ;;
        *) more+=(--untie-embeddings-and-output-weights) ;;
    esac
    case $model in qwen3-*) more+=(--qk-layernorm --norm-epsilon 1e-6) ;; esac
    small=false
    case $model in *-1b | *-3b | *-8b) small=true ;; esac
    # So that GPUs of 80 GB hold the larger ones.
    $small || more+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
    [ -z "$model_experts" ] || more+=(
        --num-experts "$model_experts" --moe-router-topk "$chosen" --moe-ffn-hidden-size "$ffn"
        --expert-model-parallel-size "$sharing" --expert-tensor-parallel-size 1
        --moe-token-dispatcher-type alltoall
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    )
    model_flags=(
        --num-layers "$layers" --hidden-size "$hidden" --ffn-hidden-size "$ffn"
        --num-attention-heads "$heads" --group-query-attention --num-query-groups "$groups"
        --kv-channels "$channels"
        --normalization RMSNorm --swiglu --disable-bias-linear
        --position-embedding-type rope --rotary-base "$rotary"
        --attention-dropout 0 --hidden-dropout 0 "${more[@]}"
    )
    # Its folder says what the model is.
    [ -z "$(value_of --from-hf '' "${flags[@]}")" ] || model_flags=()
}

# How a run trains, whatever its sizes. The user's own flags come after these and win.
training_flags=(
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --train-iters 10000 --save-interval 500 --eval-interval 500 --eval-iters 10
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

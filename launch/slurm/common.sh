# shellcheck shell=bash
# What the scripts in launch/slurm share; they source it from the repository's root.

source launch/common.sh

# A script's own #SBATCH option.
sbatch_option() {
    sed -n "s/^#SBATCH --$1=//p" "$0"
}

# Runs the user's --prolog in this shell: srun hands its modules and variables on to the ranks.
run_prolog() {
    [ -n "$prolog" ] || return 0
    [ -r "$prolog" ] || die "--prolog $prolog: there is no such file"
    prolog=$(realpath "$prolog")
    ! $dry_run || print_command source "$prolog"
    # Scripts of modules read variables that are not set.
    set +u
    # shellcheck disable=SC1090 # the user's
    source "$prolog" || die "--prolog $prolog ended with status $?"
    set -u
}

# Sets how many `ranks` there are, where they meet, in `environment`, how srun starts them, in `start`,
# and how it starts Python once, in `start_one`. Without Slurm (a dry run) the script's own #SBATCH
# options tell.
describe_job() {
    local first_node=localhost in_container=()
    if ! $dry_run && [ -z "${SLURM_JOB_ID-}" ]; then
        die "start it with sbatch, or look at it with --dry-run"
    fi
    [[ $retries =~ ^(0|[1-9][0-9]*)$ ]] || die "--retries $retries: give a number of at least 0"
    run_prolog
    ranks_per_node=${SLURM_NTASKS_PER_NODE:-$(sbatch_option ntasks-per-node)}
    whole_number SLURM_NTASKS_PER_NODE "$ranks_per_node"
    nodes=${SLURM_JOB_NUM_NODES:-$(sbatch_option nodes)}
    whole_number SLURM_JOB_NUM_NODES "$nodes"
    # Slurm sets SLURM_NTASKS only where --ntasks was given.
    ranks=${SLURM_NTASKS:-$((ranks_per_node * nodes))}
    whole_number SLURM_NTASKS "$ranks"
    [ -z "${SLURM_JOB_ID-}" ] || whole_number SLURM_JOB_ID "$SLURM_JOB_ID"
    if [ -n "${SLURM_JOB_NODELIST-}" ]; then
        first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    fi
    environment=(
        # torchrun's names, which torch.distributed reads.
        MASTER_ADDR="$first_node"
        MASTER_PORT="${port:-$((20000 + ${SLURM_JOB_ID:-0} % 20000))}"
        # As torchrun does: ranks that share a node must not each use all of its cores.
        OMP_NUM_THREADS=1
        # Megatron-LM refuses tensor parallelism without it before Blackwell. All kernels and exchanges
        # then share one hardware queue. tests/schedule/test_one_queue.py shows that overlap loses
        # nothing by it, unless keys are sent ahead in a backward pass because no query moves.
        CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
        # A failed exchange says its cause. Without it NCCL is silent.
        NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
        "$allocator"
    )
    if [ -n "$interface" ]; then
        environment+=(NCCL_SOCKET_IFNAME="$interface" GLOO_SOCKET_IFNAME="$interface")
        environment+=(NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="$interface")
    fi
    # One task is one rank. Ranks of a node follow each other, as tensor parallelism needs, and
    # none is bound to a single core: each plans on a thread beside its training step.
    start=(srun "--ntasks=$ranks" --kill-on-bad-exit=1 --distribution=block --cpu-bind=none)
    inside=()
    case $container in
        '') [ -z "$mounts" ] || die "--mounts needs --container" ;;
        *.sif)
            inside=(apptainer exec --nv --pwd "$PWD" --bind "$PWD${mounts:+,$mounts}" "$container")
            ;;
        *)
            in_container=(--container-image="$container" --container-workdir="$PWD")
            in_container+=(--container-mounts="$PWD:$PWD${mounts:+,$mounts}")
            ;;
    esac
    start_one=(srun --ntasks=1 --ntasks-per-node=1 --nodes=1 --cpu-bind=none)
    start_one+=("${in_container[@]}" "${inside[@]}" "$python")
    logs=$logs/${SLURM_JOB_ID:-dry-run}
    start+=("${in_container[@]}" launch/slurm/rank.sh "$logs" "${inside[@]}" "$python" -u)
    make_data_absolute
}

# Makes data sets that are there absolute in `flags`: logs then name them whole, and they are looked
# for in a container only where --mounts has them.
make_data_absolute() {
    local place in_data=false
    for place in "${!flags[@]}"; do
        case ${flags[place]} in
            --data-path | --*-data-path) in_data=true ;;
            --*) in_data=false ;;
            *)
                ! $in_data || [ ! -f "${flags[place]}.idx" ] ||
                    flags[place]=$(realpath -s "${flags[place]}")
                ;;
        esac
    done
}

# Ends the script if the model has experts: Megatron-LM then wants sequence parallelism, for which the
# ranks of a baseline have unequal numbers of tokens.
without_experts() {
    [ -z "$model_experts" ] ||
        die "$model has experts, for which Megatron-LM needs --sequence-parallel, and wlb-llm does not take" \
            "that: choose a dense model"
}

# Sets `group`, the ranks of a context-parallel group for the baselines that have such: two, or the
# next more that divide the data-parallel ranks. By default schedulers take as few as hold the longest
# document, which is one where documents fit a rank, and then they share nothing.
# choose_context_parallel TENSOR STAGES
choose_context_parallel() {
    local data
    whole_number --tensor-model-parallel-size "$1"
    whole_number --pipeline-model-parallel-size "$2"
    data=$((ranks / ($1 * $2)))
    group=2
    while [ $group -lt $data ] && [ $((data % group)) != 0 ]; do
        group=$((group + 1))
    done
    [ $data -gt 1 ] || group=1
}

# Ends the job where a Python command ends with 2 and says why: flags, or files that they name, are
# wrong. It runs once, for seconds, before ranks start; what one process cannot tell, the ranks do.
check_once() {
    local told status=0
    ! $dry_run || return 0
    told=$(env "${environment[@]}" "${start_one[@]}" "$@" 2>&1 >/dev/null) || status=$?
    [ "$status" = 2 ] || return 0
    told=$(grep -E '^(error|throughput\.py): ' <<<"$told" | tail -n 1) || return 0
    die "${told#*: }"
}

# Starts a Python command on all ranks, or prints it.
on_all_ranks() {
    if $dry_run; then
        echo "export $(print_command "${environment[@]}")"
        print_command "${start[@]}" "$@"
    else
        env "${environment[@]}" "${start[@]}" "$@"
    fi
}

# Iteration of the latest checkpoint in a directory, 0 where there is none, or weights alone
# ("release").
latest_checkpoint() {
    local iteration
    iteration=$(cat "$1/latest_checkpointed_iteration.txt" 2>/dev/null) || true
    [[ $iteration =~ ^[0-9]+$ ]] || iteration=0
    echo "$iteration"
}

# Runs pretrain_gpt.py on all ranks with the model's flags and the given ones before the user's own. Sets `training`, all
# of its flags.
pretraining() {
    local tensor stages micro_batches servers models=$ranks
    training=("${model_flags[@]}" "${training_flags[@]}" "$@" "${flags[@]}")
    tensor=$(value_of --tensor-model-parallel-size 1 "${training[@]}")
    stages=$(value_of --pipeline-model-parallel-size 1 "${training[@]}")
    whole_number --tensor-model-parallel-size "$tensor"
    whole_number --pipeline-model-parallel-size "$stages"
    # Dedicated servers hold no model.
    servers=$(value_of --distca-servers inplace "${training[@]}")
    if [ "$servers" != inplace ]; then
        whole_number "--distca-servers dedicated:" "${servers#dedicated:}"
        models=$((ranks - ${servers#dedicated:}))
        [ "$models" -gt 0 ] || die "--distca-servers $servers leaves none of $ranks ranks for the model"
    fi
    [ $((models % (tensor * stages))) = 0 ] ||
        die "$models ranks are not a multiple of tensor x pipeline size, $tensor x $stages: change" \
            "these sizes or --nodes (in a dry run SLURM_JOB_NUM_NODES)"
    # As many micro-batches as keep a pipeline mostly full.
    micro_batches=$((stages > 1 ? 2 * stages : 1))
    training=(
        --global-batch-size "$((models * micro_batches / (tensor * stages)))" "${training[@]}"
    )
    # It has no effect in a plain run.
    [[ " ${training[*]} " != *' --distca '* ]] ||
        training=(--distca-gpus-per-node "$ranks_per_node" "${training[@]}")
    check_once -m megatron_patches.check_run --ranks "$ranks" -- "${training[@]}"
    on_all_ranks pretrain_gpt.py "${training[@]}"
}

# Ends a job that was started again more than --retries times in turn without a new checkpoint.
# count_starts ITERATION
count_starts() {
    local file=$logs/starts before=none count=0
    [ ! -f "$file" ] || read -r before count <"$file"
    [ "$before" = "$1" ] && count=$((count + 1)) || count=0
    [ "$count" -le "$retries" ] ||
        die "$count starts in turn added no checkpoint to iteration $1: not started again (--retries)"
    mkdir -p "$logs"
    echo "$1 $count" >"$file"
}

# The job's nodes that Slurm has found dead, or that drain. Slurm marks the state of one that does not
# answer with a star. Its filter by states does not know all of them in every version.
bad_nodes() {
    sinfo --noheader --Node --nodes "$SLURM_JOB_NODELIST" --format '%N %T' |
        sed -En 's/^(\S+) +((down|drain|fail)\S*|\S*\*\S*)$/\1/p' | sort -u | paste -sd , || true
}

# The same, with checkpoints. Slurm sends SIGTERM before the time limit, and before it takes nodes
# away: the ranks then save and exit, and the job is queued again to go on. So it is where a node failed.
pretraining_that_goes_on() {
    local save before after iterations load bad status=0
    save=$(value_of --save '' "${flags[@]}")
    [ -n "$save" ] || die "give --save DIRECTORY: the job goes on from there after a time limit"
    whole_number --train-iters "$(value_of --train-iters 1 "${flags[@]}")"
    before=$(latest_checkpoint "$save")
    load=(--load "$save")
    if [ -n "$from" ] && [ "$before" = 0 ]; then
        load=(--load "$from" --finetune --exit-on-missing-checkpoint)
    fi
    $dry_run || count_starts "$before"
    pretraining "${load[@]}" --exit-signal-handler "$@" || status=$?
    ! $dry_run || return "$status"
    if [ "$status" != 0 ]; then
        bad=$(bad_nodes)
        [ -n "$bad" ] || return "$status"
        echo "nodes $bad failed: queued again"
        scontrol requeue "$SLURM_JOB_ID"
        return 0
    fi
    after=$(latest_checkpoint "$save")
    iterations=$(value_of --train-iters '' "${training[@]}")
    if [ "$after" -lt "$iterations" ] && [ "$after" -gt "$before" ]; then
        echo "at iteration $after of $iterations: queued again"
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

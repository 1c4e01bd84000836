#!/usr/bin/env bash
# Trains on the same data in several ways, in turn: plain Megatron, context parallelism, WLB-LLM,
# and DistCA with both schedulers; then prints their tokens per second. No document is longer than a
# rank's tokens, so that plain Megatron has the same work. Context parallelism and WLB-LLM have groups
# of two ranks, or of the next number that divides the data-parallel ranks; choose another with
# --distca-context-parallel-size. From the repository's root:
#
#     sbatch --nodes 8 launch/slurm/benchmark.sh --data-path corpus --tokenizer-model llama/
#
# --model NAME         llama-8b (default), or another that --model help lists, without experts and up to 34B
# --container IMAGE    run in it: a Pyxis image, or an Apptainer .sif
# --mounts A:B,C:D     directories for the container, besides the repository
# --interface NAME     the network interface that ranks meet on, such as ib0
# --port PORT          where they meet; default: from the job's number
# --python FILE        the interpreter; default: .venv/bin/python
# --output DIRECTORY   where the logs go; default: sweep
# --prolog FILE        shell file that loads modules and sets variables, before ranks start
# --logs DIRECTORY     where each rank's output goes, in JOBID/rank-N.log; default: logs
# --dry-run            print the commands, run nothing (needs no Slurm)
#
# All other flags are pretrain_gpt.py's, and win over those set here.
#SBATCH --job-name=distca-benchmark
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
[ -f launch/slurm/common.sh ] || { echo "error: submit from the repository's root" >&2; exit 2; }
source launch/slurm/common.sh

parse_launcher_options "model python port interface container mounts prolog logs output" "$@"
check_flags pretrain_gpt.py
describe_job
choose_model
without_experts
case $model in
    *70b | *405b) die "without sequence and pipeline parallelism, $model fits no GPU" ;;
esac
choose_context_parallel "$(value_of --tensor-model-parallel-size 8 "${flags[@]}")" \
    "$(value_of --pipeline-model-parallel-size 1 "${flags[@]}")"
$dry_run || mkdir -p "$output"
failed=()
# What is measured early may be better off than what comes late, so each way has two turns.
for turn in 1 2; do
    for way in plain per-document-cp wlb-llm greedy tiles; do
        # --sequence-parallel is left out: wlb-llm gives ranks unequal numbers of tokens.
        scheduler=(--distca --distca-scheduler "$way")
        case $way in
            plain) scheduler=() ;;
            per-document-cp | wlb-llm) scheduler+=(--distca-context-parallel-size "$group") ;;
        esac
        log=$output/$way-$turn.log
        set -- "${scheduler[@]}" --tensor-model-parallel-size 8 \
            --seq-length 32768 --max-position-embeddings 32768 \
            --distca-max-document-length 32768 \
            --train-iters 12 --lr-warmup-iters 1 --log-interval 1 --eval-iters 0
        if $dry_run; then
            pretraining "$@"
        elif ! pretraining "$@" 2>&1 | tee "$log"; then
            failed+=("$log")
        fi
    done
done
# The node's own Python will do, also where $python is a container's: it needs no packages.
$dry_run || python3 benchmarks/training/compare_speeds.py "$output"/*.log || failed+=("the summary")
[ ${#failed[@]} = 0 ] || die "these did not end well: ${failed[*]}"

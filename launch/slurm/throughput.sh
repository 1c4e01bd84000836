#!/usr/bin/env bash
# Runs benchmarks/training/throughput.py on all GPUs: plain Megatron and schedulers of --distca on
# made-up documents, in turn in the same processes. Context parallelism and WLB-LLM have groups of two
# ranks, or of the next number that divides the data-parallel ranks; choose another with
# --distca-context-parallel-size. From the repository's root:
#
#     sbatch --nodes 4 launch/slurm/throughput.sh --output throughput
#
# --model NAME         llama-8b (default), or another that --model help lists, without experts
# --container IMAGE    run in it: a Pyxis image, or an Apptainer .sif
# --mounts A:B,C:D     directories for the container, besides the repository
# --interface NAME     the network interface that ranks meet on, such as ib0
# --port PORT          where they meet; default: from the job's number
# --python FILE        the interpreter; default: .venv/bin/python
# --output DIRECTORY   where throughput.json and throughput.md go; default: sweep
# --prolog FILE        shell file that loads modules and sets variables, before ranks start
# --logs DIRECTORY     where each rank's output goes, in JOBID/rank-N.log; default: logs
# --dry-run            print the commands, run nothing (needs no Slurm)
#
# All other flags are benchmarks/training/throughput.py's, and win over those set here. All ways to
# train are in memory together: choose fewer --schedulers, or --num-layers, if it is too little.
#SBATCH --job-name=distca-throughput
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
check_flags benchmarks/training/throughput.py
describe_job
choose_model
without_experts
choose_context_parallel "$(value_of --tensor-model-parallel-size 8 "${flags[@]}")" \
    "$(value_of --pipeline-model-parallel-size 1 "${flags[@]}")"
# --sequence-parallel is left out: wlb-llm gives ranks unequal numbers of tokens.
benchmark=(
    benchmarks/training/throughput.py "${model_flags[@]}"
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tensor-model-parallel-size 8 --seq-length 32768 --vocab-size 128256
    --distca-gpus-per-node "$ranks_per_node" --tolerances 0.1 --modes ping-pong
    --distca-context-parallel-size "$group" --schedulers per-document-cp wlb-llm greedy tiles
    --output "$output" "${flags[@]}"
)
check_once "${benchmark[@]}" --only-check "$ranks"
on_all_ranks "${benchmark[@]}"

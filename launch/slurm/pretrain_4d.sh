#!/usr/bin/env bash
# Pretrains on documents that are longer than a rank's tokens: where others add context parallelism
# to tensor, pipeline and data parallelism, --distca spreads a document's core attention over all
# servers. A window, data-parallel size x --seq-length, must hold the longest document. Its sizes are an
# example of all four dimensions; distca simulate prints those that suit a job. From the repository's root:
#
#     sbatch --nodes 8 launch/slurm/pretrain_4d.sh --data-path corpus --tokenizer-model llama/ --save checkpoints/4d
#
# The baseline with context parallelism in groups of four ranks, on the same data:
#
#     sbatch ... --distca-scheduler per-document-cp --distca-context-parallel-size 4
#
# --model NAME         llama-8b (default), or another that --model help lists
# --from DIRECTORY     start from the weights of this checkpoint; later runs go on from --save
# --container IMAGE    run in it: a Pyxis image, or an Apptainer .sif
# --mounts A:B,C:D     directories for the container, besides the repository
# --interface NAME     the network interface that ranks meet on, such as ib0
# --port PORT          where they meet; default: from the job's number
# --python FILE        the interpreter; default: .venv/bin/python
# --prolog FILE        shell file that loads modules and sets variables, before ranks start
# --logs DIRECTORY     where each rank's output goes, in JOBID/rank-N.log; default: logs
# --retries N          starts in turn that may add no checkpoint, after node failures; default: 3
# --dry-run            print the commands, run nothing (needs no Slurm)
#
# All other flags are pretrain_gpt.py's, and win over those set here.
#SBATCH --job-name=distca-4d
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
[ -f launch/slurm/common.sh ] || { echo "error: submit from the repository's root" >&2; exit 2; }
source launch/slurm/common.sh

parse_launcher_options "model python port interface container mounts prolog logs retries from" "$@"
check_flags pretrain_gpt.py
describe_job
choose_model
pretraining_that_goes_on --distca \
    --tensor-model-parallel-size "$model_tensor" --sequence-parallel \
    --pipeline-model-parallel-size "$model_stages" \
    --seq-length "$model_tokens" --max-position-embeddings 262144 \
    --distca-max-document-length 262144

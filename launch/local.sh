#!/usr/bin/env bash
# Pretrains an 8B Llama on the GPUs of one machine, or on its CPU cores where it has none:
#
#     launch/local.sh --data-path corpus --tokenizer-model llama/ --save checkpoints
#
# --processes N    how many to start; default: one for each GPU
# --python FILE    the interpreter; default: .venv/bin/python
# --port PORT      where the processes meet; default: a free one
# --dry-run        print the command, run nothing
#
# All other flags are pretrain_gpt.py's, and win over those set here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh

parse_launcher_options "$@"
choose_model
[ "$model" = llama-8b ] || die "one machine holds llama-8b: launch/slurm is for larger models"
meet=(--standalone)
[ -z "$port" ] || meet=(--nnodes 1 --master-addr 127.0.0.1 --master-port "$port")
command=(
    # Megatron-LM asks for it with tensor parallelism, for the order of kernels.
    env CUDA_DEVICE_MAX_CONNECTIONS=1
    "$python" -m torch.distributed.run "${meet[@]}" --nproc-per-node "$processes"
    pretrain_gpt.py --distca "${model_flags[@]}" "${training_flags[@]}"
    --tensor-model-parallel-size 4 --sequence-parallel
    --seq-length 16384 --max-position-embeddings 16384 "${flags[@]}"
)
if $dry_run; then
    print_command "${command[@]}"
    exit
fi
exec "${command[@]}"

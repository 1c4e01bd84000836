#!/usr/bin/env bash
# Pretrains an 8B Llama on the GPUs of one machine, or on its CPU cores where it has none:
#
#     launch/local.sh --data-path corpus --tokenizer-model llama/ --save checkpoints
#
# --model NAME     llama-8b (default), llama-3.1-8b, llama-3.2-1b, llama-3.2-3b or qwen3-8b
# --processes N    how many to start; default: one for each GPU, or for each core without any
# --python FILE    the interpreter; default: .venv/bin/python
# --port PORT      where the processes meet; default: a free one
# --dry-run        print the command, run nothing
#
# With --from-hf FOLDER the model is that of the folder, and --model says nothing.
# Tensor parallelism is 4, or as much of that as divides the processes.
# All other flags are pretrain_gpt.py's, and win over those set here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh

parse_launcher_options "model python processes port" "$@"
check_flags pretrain_gpt.py
choose_model
$small || die "one machine does not hold $model: launch/slurm is for larger models"
gpus=0
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^ *[0-9GM]') || true
elif command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || true
fi
# One for each GPU that CUDA shows, or for each core.
if [ "$processes" = auto ]; then
    if [ "$gpus" -gt 0 ]; then processes=$gpus; else processes=$(getconf _NPROCESSORS_ONLN); fi
fi
whole_number --processes "$processes"
tensor=4
while [ $((processes % tensor)) != 0 ]; do tensor=$((tensor / 2)); done
meet=(--standalone)
[ -z "$port" ] || meet=(--nnodes 1 --master-addr 127.0.0.1 --master-port "$port")
# Each process on the CPUs of its GPU's NUMA node; torchrun needs numactl for it.
numa=()
if [ "$gpus" -gt 0 ] && command -v numactl >/dev/null; then numa=(--numa-binding node); fi
command=(
    # Megatron-LM asks for it with tensor parallelism, for the order of kernels.
    env CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" "$allocator"
    "$python" -m megatron_patches.launch "${meet[@]}" "${numa[@]}"
    --nproc-per-node "$processes"
    pretrain_gpt.py --distca "${model_flags[@]}" "${training_flags[@]}"
    --tensor-model-parallel-size "$tensor" --sequence-parallel
    --distca-gpus-per-node "$processes"
    --seq-length 16384 --max-position-embeddings 16384 "${flags[@]}"
)
if $dry_run; then
    print_command "${command[@]}"
    exit
fi
command -v "$python" >/dev/null || die "no $python: launch/setup.sh makes .venv; or give --python FILE"
exec "${command[@]}"

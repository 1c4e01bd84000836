#!/usr/bin/env bash
# Sets everything up, pretrains a small GPT with --distca on real text, on four processes of the CPU
# (also where there are GPUs), runs some of the same steps as plain Megatron, and compares the two.
# The trained model is written for `distca generate`, as demo/model.
# More flags are passed on: launch/demo.sh --train-iters 20
# --dry-run prints the two commands that train, and runs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. launch/common.sh
parse_launcher_options "" "$@"
check_flags pretrain_gpt.py
more=("${flags[@]}")
if $dry_run; then
    start=(print_command)
else
    start=(env)
    launch/setup.sh
fi
# Megatron warns of each GPU package that a machine without a GPU does not have.
# What it prints goes through a pipe, line by line.
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1
# The demo is float32, so that its losses compare from machine to machine; on GPUs --distca needs
# bf16, and four processes as many GPUs.
export CUDA_VISIBLE_DEVICES=
if ! $dry_run; then
    .venv/bin/python -m data.demo_corpus --output-dir demo/data &
    telling $! echo "making the corpus"
fi

# A quarter of the tokens are of documents that are as long as a rank's tokens, the others of short
# ones. The model is narrow, so that core attention is a large part of a step, as in long training.
flags=(
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 192
    --num-attention-heads 8 --kv-channels 16 --group-query-attention --num-query-groups 2
    --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --seq-length 8192 --max-position-embeddings 32768 --distca-max-document-length 8192
    --micro-batch-size 1 --global-batch-size 4 --train-iters 80
    --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1
    --init-method-std 0.08 --use-distributed-optimizer
    --data-path 0.25 demo/data/python_packages 0.75 demo/data/python_functions --split '90,8,2'
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model demo/data/tokenizer
    --log-interval 5 --eval-interval 1000
)

# A run with --distca does not write over another one's checkpoints; these are the demo's own.
$dry_run || [ -n "$(value_of --load '' "${more[@]}")" ] || rm -rf demo/checkpoints

launcher=(.venv/bin/python -m megatron_patches.launch --nproc-per-node 4)
# Megatron prints all of its arguments, some 850 lines.
without_arguments() {
    sed -u '/^-* arguments -*$/,/^-* end of arguments -*$/d'
}
"${start[@]}" "${launcher[@]}" pretrain_gpt.py --distca "${flags[@]}" \
    --eval-iters 2 --save demo/checkpoints --tensorboard-dir demo/tensorboard/distca "${more[@]}" |
    without_arguments | passing_on 10 "training with DistCA"

# Without --distca the same command is plain Megatron. These flags win over those passed on.
plain=(
    "${launcher[@]}" pretrain_gpt.py "${flags[@]}" "${more[@]}"
    --exit-interval 15 --eval-iters 0 --save demo/plain_checkpoints
    --tensorboard-dir demo/tensorboard/plain
)
if $dry_run; then
    print_command "${plain[@]}"
    exit
fi
steps=$(value_of --train-iters 80 "${more[@]}")
steps=$((steps < 15 ? steps : 15))
echo "running the first $steps steps as plain Megatron, too; its log is demo/plain.log" >&2
mkdir -p demo

# The last iteration that plain Megatron's log has, of as many as it runs.
plain_iteration() {
    local doing
    doing=$(sed -n "s|.*iteration  *\\([0-9]*\\)/.*|\\1 of $steps iterations are done|p" demo/plain.log | tail -n 1)
    echo "plain Megatron: ${doing:-starting}"
}
"${plain[@]}" >demo/plain.log 2>&1 &
telling $! plain_iteration || { tail -n 20 demo/plain.log >&2 && exit 1; }
.venv/bin/python -m data.demo_report --distca demo/tensorboard/distca \
    --plain demo/tensorboard/plain --output demo/report.png -- "${flags[@]}" "${more[@]}" &
telling $! echo "making the report"

# With flags of one's own it may be no Llama any more, which the command says.
# Its folder is the demo's own, which another run writes anew.
if .venv/bin/distca convert --force --to demo/model \
    --checkpoint "$(value_of --save demo/checkpoints "${more[@]}")"; then
    # What is likeliest is then an underscore, over and over: samples show more.
    echo "the model answers: .venv/bin/distca generate demo/model --prompt 'def main(' --temperature 0.8 --seed 1" >&2
    echo "(it has seen few tokens: expect words of Python in no order, not code that runs)" >&2
fi

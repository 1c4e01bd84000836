#!/usr/bin/env bash
# Sets everything up and pretrains a small GPT with --distca on real text, on four processes of the
# CPU, also where there are GPUs.
# More flags are passed on: launch/demo.sh --train-iters 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh
# Megatron warns of each GPU package that a machine without a GPU does not have.
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
# The demo is float32, so that its losses compare from machine to machine; on GPUs --distca needs
# bf16, and four processes as many GPUs.
export CUDA_VISIBLE_DEVICES=
.venv/bin/python -m data.demo_corpus --output-dir demo/data
exec .venv/bin/torchrun --nproc-per-node 4 pretrain_gpt.py \
    --distca \
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 \
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 \
    --normalization RMSNorm --swiglu --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 2048 --max-position-embeddings 8192 \
    --micro-batch-size 1 --global-batch-size 4 --train-iters 100 \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 \
    --use-distributed-optimizer \
    --data-path demo/data/python_source --split 90,8,2 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model demo/data/tokenizer.json \
    --log-interval 5 --eval-interval 50 --eval-iters 2 \
    --save demo/checkpoints --tensorboard-dir demo/tensorboard \
    "$@"

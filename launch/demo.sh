#!/usr/bin/env bash
# Sets everything up and pretrains a small GPT with --distca on real text, on four processes.
# More flags are passed on: launch/demo.sh --train-iters 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh
.venv/bin/python -m data.demo_corpus --output-dir demo/data 2>/dev/null
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
exec .venv/bin/torchrun --nproc-per-node 4 pretrain_gpt.py \
    --distca \
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 \
    --num-attention-heads 8 --group-query-attention --num-query-groups 2 \
    --normalization RMSNorm --swiglu --disable-bias-linear \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --attention-dropout 0 --hidden-dropout 0 \
    --seq-length 1024 --max-position-embeddings 4096 \
    --micro-batch-size 1 --global-batch-size 8 --train-iters 100 \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 \
    --use-distributed-optimizer \
    --data-path demo/data/python_source --split 90,8,2 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model demo/data/tokenizer.json \
    --log-interval 5 --eval-interval 50 --eval-iters 2 \
    --save demo/checkpoints --tensorboard-dir demo/tensorboard \
    "$@"

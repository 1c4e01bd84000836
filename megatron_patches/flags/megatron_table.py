"""Table of Megatron-LM's flags that the lean loop has, with their names, meanings and defaults."""

from __future__ import annotations

from typing import Any

from distca.documents.chat import PROMPT_FORMATS
from distca.documents.tokenizer import TOKENIZER_TYPES
from megatron_patches.flags.latent_attention import LATENT_FLAGS
from megatron_patches.flags.megatron_values import layer_pattern, window_size

SFT_TOKENIZER = "SFTTokenizer"
"""Tokenizer type of `--sft`, in Megatron-LM, too."""

EVAL_INTERVAL = 1000
"""Iterations between evaluations, unless `--eval-interval` is given."""

# Group -> (flag, keywords of add_argument). Help is Megatron's meaning in a line, or what is done.
_SWITCH = {"action": "store_true"}
FLAGS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "network size": [
        ("--num-layers", {"type": int, "required": True, "help": "Transformer layers."}),
        ("--hidden-size", {"type": int, "required": True, "help": "Width of the model."}),
        ("--ffn-hidden-size", {"type": int, "help": "Width of the MLP. Default: 4 hidden sizes."}),
        ("--num-attention-heads", {"type": int, "required": True, "help": "Query heads."}),
        ("--kv-channels", {"type": int, "help": "Head size. Default: hidden size / heads."}),
        ("--group-query-attention", {**_SWITCH, "help": "Use grouped-query attention."}),
        ("--num-query-groups", {"type": int, "default": 1, "help": "Key-value heads."}),
        ("--max-position-embeddings", {"type": int, "help": "Longest --seq-length of the model."}),
        (
            "--position-embedding-type",
            {"choices": ["rope", "none"], "default": "rope", "help": "Rotary positions, or none."},
        ),
        ("--rotary-base", {"type": int, "default": 10000, "help": "Base of the rotary angles."}),
        ("--rotary-percent", {"type": float, "default": 1.0, "help": "Share of a head rotated."}),
        (
            "--rotary-seq-len-interpolation-factor",
            {"type": int, "help": "Rotary positions are divided by it."},
        ),
        ("--use-rope-scaling", {**_SWITCH, "help": "Llama 3's scaling of the rotary angles."}),
        (
            "--rope-scaling-factor",
            {"type": float, "default": 8.0, "help": "Factor of --use-rope-scaling."},
        ),
        (
            "--normalization",
            {"choices": ["LayerNorm", "RMSNorm"], "default": "LayerNorm", "help": "Kind of norm."},
        ),
        ("--norm-epsilon", {"type": float, "default": 1e-5, "help": "Epsilon of the norms."}),
        ("--qk-layernorm", {**_SWITCH, "help": "Norm on queries and keys."}),
        ("--swiglu", {**_SWITCH, "help": "SwiGLU in the MLP."}),
        (
            "--untie-embeddings-and-output-weights",
            {**_SWITCH, "help": "An output layer of its own."},
        ),
        (
            "--make-vocab-size-divisible-by",
            {"type": int, "default": 128, "help": "The vocabulary is padded to a multiple."},
        ),
        (
            "--window-size",
            {"type": window_size, "help": "Sliding window: L,0 lets a query see L earlier tokens."},
        ),
        (
            "--softmax-type",
            {
                "choices": ["vanilla", "off-by-one", "learnable"],
                "default": "vanilla",
                "help": "A sink in the softmax: none, one of 0, or a learned one for each head.",
            },
        ),
        (
            "--window-attn-skip-freq",
            {
                "type": layer_pattern,
                "help": "Every Nth layer has no window, or a list of those with one: '[1,1,0]*4'.",
            },
        ),
    ],
    "multi-latent attention": LATENT_FLAGS,
    "mixture of experts": [
        ("--num-experts", {"type": int, "help": "Experts of a layer. Default: there are none."}),
        (
            "--moe-layer-freq",
            {
                "type": layer_pattern,
                "default": 1,
                "help": "Every Nth layer has experts, or a list: '[0]*1+[1]*11'.",
            },
        ),
        (
            "--moe-ffn-hidden-size",
            {"type": int, "help": "Width of an expert. Default: --ffn-hidden-size."},
        ),
        (
            "--moe-shared-expert-intermediate-size",
            {"type": int, "help": "Width of the experts that all tokens use. Default: none."},
        ),
        ("--moe-router-topk", {"type": int, "default": 2, "help": "Experts that a token uses."}),
        (
            "--moe-router-score-function",
            {"choices": ["softmax", "sigmoid"], "default": "softmax", "help": "Router's scores."},
        ),
        ("--moe-router-pre-softmax", {**_SWITCH, "help": "Scores before the choice, not after."}),
        (
            "--moe-router-topk-scaling-factor",
            {"type": float, "help": "Factor of the scores of --moe-router-pre-softmax."},
        ),
        ("--moe-router-num-groups", {"type": int, "help": "Groups of experts to choose among."}),
        ("--moe-router-group-topk", {"type": int, "help": "Groups that a token may use."}),
        (
            "--moe-router-dtype",
            {"choices": ["fp32", "fp64"], "help": "Precision of scores. Default: the model's."},
        ),
        (
            "--moe-router-load-balancing-type",
            {
                "choices": ["aux_loss", "seq_aux_loss", "global_aux_loss", "none"],
                "nargs": "+",
                "default": ["aux_loss"],
                "help": "Auxiliary losses, averaged over micro-batches or the global batch.",
            },
        ),
        (
            "--moe-aux-loss-coeff",
            {"type": float, "nargs": "+", "default": [0.0], "help": "Factor of each of them."},
        ),
        ("--moe-z-loss-coeff", {"type": float, "help": "Factor of the loss of large scores."}),
        (
            "--moe-router-enable-expert-bias",
            {**_SWITCH, "help": "Balance experts by a bias of their scores."},
        ),
        (
            "--moe-router-bias-update-rate",
            {"type": float, "default": 1e-3, "help": "Step of that bias."},
        ),
        ("--moe-grouped-gemm", {**_SWITCH, "help": "Experts of a rank in one call, on GPUs."}),
        (
            "--moe-token-dispatcher-type",
            {
                "choices": ["allgather", "alltoall"],
                "default": "allgather",
                "help": "Way of tokens to experts of other ranks.",
            },
        ),
        ("--moe-permute-fusion", {**_SWITCH, "help": "Fused sorting of tokens, on GPUs."}),
        (
            "--expert-model-parallel-size",
            {"type": int, "default": 1, "help": "Data-parallel ranks that share the experts."},
        ),
        (
            "--expert-tensor-parallel-size",
            {"type": int, "help": "Processes that share an expert. Default: as other layers."},
        ),
    ],
    "regularization": [
        (
            "--attention-dropout",
            {"type": float, "default": 0.1, "help": "Dropout in core attention."},
        ),
        (
            "--hidden-dropout",
            {"type": float, "default": 0.1, "help": "Dropout after attention and MLP."},
        ),
        ("--weight-decay", {"type": float, "default": 0.01, "help": "Weight decay."}),
        ("--clip-grad", {"type": float, "default": 1.0, "help": "Largest global gradient norm."}),
        ("--adam-beta1", {"type": float, "default": 0.9, "help": "Adam's first beta."}),
        ("--adam-beta2", {"type": float, "default": 0.999, "help": "Adam's second beta."}),
        ("--adam-eps", {"type": float, "default": 1e-8, "help": "Adam's epsilon."}),
        ("--sgd-momentum", {"type": float, "default": 0.9, "help": "SGD's momentum."}),
    ],
    "training": [
        (
            "--micro-batch-size",
            {"type": int, "required": True, "help": "Samples that a rank runs at a time."},
        ),
        (
            "--global-batch-size",
            {
                "type": int,
                "help": "Samples of a step. Default: one micro-batch of each data-parallel rank.",
            },
        ),
        (
            "--rampup-batch-size",
            {
                "nargs": 3,
                "metavar": ("START", "INCREMENT", "SAMPLES"),
                "help": "Global batches grow from START to --global-batch-size over so many "
                "samples (megatron-core up to 0.17).",
            },
        ),
        (
            "--step-batch-size-schedule",
            {
                "metavar": "'TOKENS:SIZE ...'",
                "help": "Global batches are of each size from so many tokens on, such as "
                "'0:16 1B:32' (megatron-core from 0.18 on; instead of --global-batch-size).",
            },
        ),
        ("--train-iters", {"type": int, "help": "Iterations of the run."}),
        ("--train-samples", {"type": int, "help": "Samples of the run, instead of iterations."}),
        ("--exit-interval", {"type": int, "help": "Exit after an iteration divisible by it."}),
        ("--exit-duration-in-mins", {"type": int, "help": "Exit after this many minutes."}),
        ("--exit-signal-handler", {**_SWITCH, "help": "On SIGTERM: save and exit."}),
        ("--optimizer", {"choices": ["adam", "sgd"], "default": "adam", "help": "Optimizer."}),
        (
            "--recompute-granularity",
            {"choices": ["full", "selective"], "help": "Recompute activations to save memory."},
        ),
        ("--recompute-activations", {**_SWITCH, "help": "Short for selective recomputation."}),
        (
            "--recompute-method",
            {"choices": ["uniform", "block"], "help": "Which layers to recompute with full."},
        ),
        ("--recompute-num-layers", {"type": int, "help": "Layers recomputed at a time."}),
        (
            "--recompute-modules",
            {"nargs": "*", "type": str, "help": "Modules to recompute with selective."},
        ),
        (
            "--no-check-for-nan-in-loss-and-grad",
            {
                "action": "store_false",
                "dest": "check_for_nan_in_loss_and_grad",
                "help": "Go on when the loss is not a number.",
            },
        ),
        (
            "--attention-backend",
            {
                "choices": ["auto", "flash", "unfused", "local"],
                "default": "auto",
                "help": "local, unfused: Megatron's own attention with a dense mask (no --distca).",
            },
        ),
        (
            "--transformer-impl",
            {
                "choices": ["local", "transformer_engine"],
                "help": "Layer spec. Default: transformer_engine on GPUs, else local.",
            },
        ),
    ],
    "biases and fusions": [
        (
            "--disable-bias-linear",
            {
                "action": "store_false",
                "dest": "add_bias_linear",
                "help": "Linear layers have no biases.",
            },
        ),
        ("--add-qkv-bias", {**_SWITCH, "help": "A bias in the QKV projection all the same."}),
        (
            "--no-gradient-accumulation-fusion",
            {
                "action": "store_false",
                "dest": "gradient_accumulation_fusion",
                "help": "Do not add up weight gradients inside the GEMM (GPUs only).",
            },
        ),
        (
            "--no-bias-swiglu-fusion",
            {
                "action": "store_false",
                "dest": "bias_swiglu_fusion",
                "help": "Do not fuse bias and SwiGLU (GPUs only).",
            },
        ),
        (
            "--no-bias-dropout-fusion",
            {
                "action": "store_false",
                "dest": "bias_dropout_fusion",
                "help": "Do not fuse bias, dropout and residual (GPUs only).",
            },
        ),
        (
            "--no-rope-fusion",
            {
                "action": "store_false",
                "dest": "apply_rope_fusion",
                "help": "Do not fuse the rotary embedding (GPUs with Transformer Engine only).",
            },
        ),
    ],
    "initialization": [
        ("--seed", {"type": int, "default": 1234, "help": "Seed of weights, dropout, data."}),
        (
            "--init-method-std",
            {"type": float, "default": 0.02, "help": "Deviation of first weights."},
        ),
    ],
    "learning rate": [
        ("--lr", {"type": float, "required": True, "help": "Peak learning rate."}),
        ("--min-lr", {"type": float, "default": 0.0, "help": "Lowest learning rate."}),
        (
            "--lr-decay-style",
            {
                "choices": ["constant", "linear", "cosine", "inverse-square-root"],
                "default": "linear",
                "help": "How the learning rate decays.",
            },
        ),
        ("--lr-decay-iters", {"type": int, "help": "Iterations of decay. Default: all."}),
        (
            "--lr-decay-samples",
            {"type": int, "help": "Samples of decay, with --train-samples. Default: all."},
        ),
        ("--lr-warmup-iters", {"type": int, "default": 0, "help": "Iterations of warm-up."}),
        (
            "--lr-warmup-samples",
            {"type": int, "default": 0, "help": "Samples of warm-up, with --train-samples."},
        ),
        ("--lr-warmup-fraction", {"type": float, "help": "Share of the decay to warm up in."}),
        ("--lr-warmup-init", {"type": float, "default": 0.0, "help": "Learning rate at first."}),
    ],
    "checkpointing": [
        ("--save", {"help": "Directory to save checkpoints to."}),
        ("--save-interval", {"type": int, "help": "Iterations between checkpoints."}),
        ("--load", {"help": "Directory to load the latest checkpoint from."}),
        ("--ckpt-step", {"type": int, "help": "Load this iteration's checkpoint instead."}),
        ("--no-save-optim", {**_SWITCH, "help": "Do not save the optimizer."}),
        ("--no-load-optim", {**_SWITCH, "help": "Do not load the optimizer."}),
        ("--no-save-rng", {**_SWITCH, "help": "Do not save random states."}),
        ("--no-load-rng", {**_SWITCH, "help": "Do not load random states."}),
        ("--finetune", {**_SWITCH, "help": "Load the weights alone, start at iteration 0."}),
        (
            "--exit-on-missing-checkpoint",
            {**_SWITCH, "help": "An error if --load has no checkpoint, instead of a fresh start."},
        ),
    ],
    "mixed precision": [
        ("--bf16", {**_SWITCH, "help": "Run in bfloat16, with a float32 optimizer."}),
        (
            "--accumulate-allreduce-grads-in-fp32",
            {**_SWITCH, "help": "Gradients in float32. Always on with --bf16, as in Megatron-LM."},
        ),
    ],
    "distributed": [
        (
            "--tensor-model-parallel-size",
            {"type": int, "default": 1, "help": "Ranks that divide each layer."},
        ),
        (
            "--pipeline-model-parallel-size",
            {"type": int, "default": 1, "help": "Stages of layers."},
        ),
        (
            "--num-layers-per-virtual-pipeline-stage",
            {"type": int, "help": "Layers of each virtual stage, for interleaving."},
        ),
        ("--context-parallel-size", {"type": int, "default": 1, "help": "Must be 1 here."}),
        ("--sequence-parallel", {**_SWITCH, "help": "Sequence parallelism within TP."}),
        ("--use-distributed-optimizer", {**_SWITCH, "help": "Shard the optimizer over DP."}),
        ("--overlap-grad-reduce", {**_SWITCH, "help": "Reduce gradients during the backward."}),
        ("--overlap-param-gather", {**_SWITCH, "help": "Gather weights during the forward."}),
        (
            "--distributed-backend",
            {"choices": ["nccl", "gloo"], "help": "Default: nccl on GPUs, else gloo."},
        ),
        (
            "--distributed-timeout-minutes",
            {"type": int, "default": 10, "help": "Minutes until a collective fails."},
        ),
    ],
    "validation": [
        ("--eval-iters", {"type": int, "default": 100, "help": "Iterations of an evaluation."}),
        (
            "--eval-interval",
            {"type": int, "default": EVAL_INTERVAL, "help": "Iterations between evaluations."},
        ),
        (
            "--full-validation",
            {
                **_SWITCH,
                "help": "An evaluation reads each document of the validation set, and the test, "
                "once; --eval-iters is left out.",
            },
        ),
        (
            "--multiple-validation-sets",
            {
                **_SWITCH,
                "help": "Each prefix of --valid-data-path is a set with a loss of its own; needs "
                "--full-validation.",
            },
        ),
        (
            "--validation-set-names",
            {"nargs": "+", "help": "Names of the validation sets. Default: their numbers."},
        ),
        (
            "--eval-global-batch-size",
            {"type": int, "help": "Samples of an evaluation's iteration. Default: as in training."},
        ),
    ],
    "data and tokenizer": [
        (
            "--data-path",
            {"nargs": "+", "help": "Prefixes of datasets, or a weight before each."},
        ),
        ("--data-args-path", {"help": "A file with the words of --data-path."}),
        ("--split", {"default": "969,30,1", "help": "Shares of train, validation and test."}),
        ("--train-data-path", {"nargs": "+", "help": "--data-path of training alone."}),
        ("--valid-data-path", {"nargs": "+", "help": "--data-path of validation alone."}),
        ("--test-data-path", {"nargs": "+", "help": "--data-path of the test alone."}),
        (
            "--per-split-data-args-path",
            {"help": "A JSON file with the words for train, valid and test."},
        ),
        (
            "--seq-length",
            {"type": int, "required": True, "help": "Tokens a rank owns in a window."},
        ),
        (
            "--tokenizer-type",
            {
                "choices": [*TOKENIZER_TYPES, SFT_TOKENIZER],
                "required": True,
                "help": "Kind of tokenizer.",
            },
        ),
        (
            "--tokenizer-model",
            {"help": "A tokenizer.json, or its folder; for SFTTokenizer the folder."},
        ),
        ("--vocab-size", {"type": int, "help": "Size of the vocabulary, for NullTokenizer."}),
        (
            "--sft",
            {
                **_SWITCH,
                "help": "Data are conversations in JSON lines, of which answers alone count in the "
                "loss.",
            },
        ),
        (
            "--sft-tokenizer-prompt-format",
            {
                "choices": PROMPT_FORMATS,
                "default": PROMPT_FORMATS[0],
                "help": "How messages are written, for SFTTokenizer; default: by the tokenizer's "
                "chat template.",
            },
        ),
    ],
    "logging": [
        ("--log-interval", {"type": int, "default": 100, "help": "Iterations between log lines."}),
        ("--tensorboard-dir", {"help": "Directory for TensorBoard."}),
        (
            "--tensorboard-log-interval",
            {"type": int, "default": 1, "help": "Iterations between TensorBoard's points."},
        ),
        ("--wandb-project", {"help": "Project in Weights & Biases; needs the package wandb."}),
        ("--wandb-exp-name", {"help": "Name of the run there."}),
        ("--wandb-entity", {"help": "User or team there."}),
        ("--wandb-save-dir", {"help": "Directory for its files. Default: wandb in --save."}),
        (
            "--log-throughput",
            {
                **_SWITCH,
                "help": "Log model TFLOP/s of a GPU, with attention over each document's own "
                "pairs of tokens.",
            },
        ),
    ],
    "done in any case, or without effect here": [
        (
            "--dataloader-type",
            {
                "choices": ["single", "external"],
                "help": "Documents come once, in an order shuffled by --seed, as with single.",
            },
        ),
        ("--num-workers", {"type": int, "help": "A thread makes micro-batches ahead."}),
        ("--data-cache-path", {"help": "The order of documents is made anew at each start."}),
        ("--reset-position-ids", {**_SWITCH, "help": "Positions count from a document's start."}),
        ("--reset-attention-mask", {**_SWITCH, "help": "Documents don't see each other."}),
        ("--eod-mask-loss", {**_SWITCH, "help": "A document's last token predicts nothing."}),
        (
            "--no-create-attention-mask-in-dataloader",
            {**_SWITCH, "help": "Masks are made of documents' lengths."},
        ),
        ("--calculate-per-token-loss", {**_SWITCH, "help": "Losses are averaged over tokens."}),
        ("--use-mcore-models", {**_SWITCH, "help": "Models are megatron-core's."}),
        ("--use-flash-attn", {**_SWITCH, "help": "GPUs run FlashAttention."}),
        ("--use-rotary-position-embeddings", {**_SWITCH, "help": "The default."}),
        ("--attention-softmax-in-fp32", {**_SWITCH, "help": "It always is."}),
        ("--apply-query-key-layer-scaling", {**_SWITCH, "help": "Scores always fit: float32."}),
        ("--no-masked-softmax-fusion", {**_SWITCH, "help": "It never is fused."}),
        ("--no-bias-gelu-fusion", {**_SWITCH, "help": "They never are fused."}),
        ("--ckpt-format", {"choices": ["torch_dist"], "help": "The one format."}),
        ("--use-dist-ckpt", {**_SWITCH, "help": "Checkpoints are distributed ones."}),
        ("--no-one-logger", {**_SWITCH, "help": "It is never used."}),
    ],
}

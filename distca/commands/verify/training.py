"""Stage: five steps with `--distca` against plain Megatron, and their tokens a second."""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distca.commands.verify.apart import run_apart
from distca.commands.verify.predictions import NO_PREDICTION, measured_cluster, training_seconds
from distca.commands.verify.stage import SEND, Context, Fault, Found, NotRun
from distca.cost.model_sizes import ModelSize
from distca.documents.index import IndexedWriter
from distca.plan import BLOCK
from distca.wording import install

STEPS = 5
_LOSS = re.compile(r"iteration +\d+/.*? lm loss: (\S+) \|")
_GRAD_NORM = re.compile(r"iteration +\d+/.*? grad norm: (\S+) \|")
_STEP_SECONDS = re.compile(r" s: ([\d.e+-]+) \|")
_APART = {torch.float32: 1e-4, torch.bfloat16: 0.01}
"""Most that losses may differ, relative to plain Megatron's."""
_NORMS_APART = 0.01
"""Most that the norms of the first step's gradients may differ: Megatron prints three digits."""
_LEAST = 1e-12
"""Smaller numbers of plain Megatron's are not divided by."""
_VOCABULARY = 128
_SECONDS = 400
_PRINTED = 50_000
"""Characters of what a run printed that are kept if it failed."""
_WITHOUT = {
    "transformer_engine": "--transformer-impl local --no-rope-fusion",
    # Modules of apex.
    "fused_weight_gradient_mlp_cuda": "--no-gradient-accumulation-fusion",
    "scaled_masked_softmax_cuda": "--no-masked-softmax-fusion",
}
"""Flags for what is not installed."""
_LAUNCHER = "megatron_patches.launch"


@dataclass(frozen=True)
class Job:
    """Sizes of a job.

    Attributes:
        model: sizes of the model.
        window: tokens of a micro-batch of all ranks together, which documents fill.
        init_std: standard deviation of the first weights.
    """

    model: ModelSize
    window: int
    init_std: float = 0.02


_SMALL = ModelSize(2, 64, 4, 2, 16, 96, _VOCABULARY)
_LARGE = ModelSize(4, 2048, 16, 4, 128, 5504, _VOCABULARY)
_TOKENS_OF_A_GPU = 8192
"""Tokens of a rank in a micro-batch of the job whose speed is measured."""
_MICRO_BATCHES = 2


@dataclass(frozen=True)
class Ran:
    """What a run printed.

    Attributes:
        losses: loss of each step.
        grad_norms: norm of all gradients in each step.
        seconds: median of the steps' seconds, without the first two.
    """

    losses: list[float]
    grad_norms: list[float]
    seconds: float


def check_training(context: Context) -> Found:
    """Trains the same small model twice, on the machine of rank 0."""
    if importlib.util.find_spec("megatron.training") is None:
        raise NotRun(f"Megatron-LM's loop is not installed: {install('megatron')}")
    if context.on_gpu:
        # The ranks of the runs have the same GPUs.
        torch.cuda.empty_cache()
    found = _compare(context) if context.rank == 0 else None
    result = context.gather(found)[0]
    assert isinstance(result, Found)
    return result


def _compare(context: Context) -> Found:
    """Holds losses of all ranks against those of one process, and measures a larger job."""
    # Smaller weights would see nearly the mean of all tokens, with hardly a gradient of keys.
    ranks = context.local_size
    job = Job(_SMALL, window_of(ranks), init_std=0.1)
    _write_documents(context, job)
    # A dense mask keeps documents apart there.
    plain = _train(context, job, 1, ["--attention-backend", "unfused"])
    ours = _train(context, job, ranks, ["--distca"])
    for name, numbers in (
        (f"losses of {STEPS} steps", (ours.losses, plain.losses)),
        ("gradients' norms", (ours.grad_norms, plain.grad_norms)),
    ):
        if not all(math.isfinite(each) for of_run in numbers for each in of_run):
            raise Fault(f"{name} are not finite: {_both(*numbers, ranks)}", SEND)
    apart = _apart(ours.losses, plain.losses)
    # Adam's steps are as long whatever the gradients' scale, and rounding grows from step to step.
    norms_apart = _apart(ours.grad_norms[:1], plain.grad_norms[:1])
    for name, found, allowed, our, their in (
        (f"losses of {STEPS} steps", apart, _APART[context.dtype], ours.losses, plain.losses),
        ("gradients' norms", norms_apart, _NORMS_APART, ours.grad_norms, plain.grad_norms),
    ):
        if not found <= allowed:
            raise Fault(
                f"{name} are {found:.1e} of plain Megatron's from them ({allowed:g} is allowed): "
                f"{_both(our, their, ranks)}",
                SEND,
            )
    if context.is_fast:
        job = Job(_LARGE, ranks * _TOKENS_OF_A_GPU)
        _write_documents(context, job)
        ours = _train(context, job, ranks, ["--distca"])
        if not all(map(math.isfinite, (*ours.losses, *ours.grad_norms))):
            raise Fault(
                f"losses or gradients' norms of a larger job are not finite: {_said(ours.losses)}; "
                f"{_said(ours.grad_norms)}",
                SEND,
            )
    tokens = _MICRO_BATCHES * job.window
    figures = {
        "losses_apart": apart,
        "gradients_apart": norms_apart,
        "tokens_per_s": tokens / ours.seconds,
    }
    text = (
        f"losses of {STEPS} steps on {ranks} rank(s) are within {apart:.1e} of plain Megatron's on "
        f"one, the first gradients' norm within {norms_apart:.1e}; "
        f"{tokens / ours.seconds:,.0f} tokens/s"
    )
    cluster = measured_cluster(context)
    if cluster is not None:
        sequences = [np.array(_lengths(job), dtype=np.int64)] * _MICRO_BATCHES
        predicted = tokens / training_seconds(job.model, cluster, sequences, ranks)
        figures["predicted_tokens_per_s"] = predicted
        text += f" (simulated: {predicted:,.0f})" if context.is_fast else f"; {NO_PREDICTION}"
    return Found(text, figures)


def window_of(ranks: int) -> int:
    """Returns the tokens of a small window that gives each rank whole blocks of attention."""
    return max(4 // ranks, 1) * BLOCK * ranks


def _lengths(job: Job) -> list[int]:
    """Lengths of documents that fill a window: one has half of it, one has a token."""
    eighth = job.window // 8
    return [4 * eighth, 1, 3 * eighth - 1, eighth]


def _write_documents(context: Context, job: Job) -> None:
    """Writes documents whose tokens a model can learn to predict, enough for all steps."""
    draw = np.random.default_rng(0)
    with IndexedWriter(context.folder / "documents.bin", _VOCABULARY) as writer:
        for length in _lengths(job) * ((STEPS + 1) * _MICRO_BATCHES):
            noise = draw.integers(0, 3, length)
            tokens = (draw.integers(100) + np.arange(length) + noise) % 100
            writer.add_document(tokens.tolist())
        writer.write_index(context.folder / "documents.idx")


def _train(context: Context, job: Job, ranks: int, flags: list[str]) -> Ran:
    """Runs the steps in processes of their own, as a user starts them."""
    model = job.model
    arguments = ["--standalone", "--nproc-per-node", str(ranks)]
    arguments += ["-m", "megatron_patches.pretrain", *flags]
    arguments += f"""
        --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY - 1}
        --make-vocab-size-divisible-by {_VOCABULARY} --num-layers {model.layers}
        --hidden-size {model.hidden_size} --ffn-hidden-size {model.ffn_hidden_size}
        --num-attention-heads {model.heads} --kv-channels {model.head_dim}
        --group-query-attention --num-query-groups {model.kv_heads}
        --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --micro-batch-size 1 --global-batch-size {_MICRO_BATCHES * ranks}
        --lr 1e-3 --lr-decay-style constant --init-method-std {job.init_std}
        --train-iters {STEPS} --split 100,0,0 --log-interval 1 --eval-iters 0
        --seq-length {job.window // ranks} --max-position-embeddings {job.window}
        --distca-max-document-length {job.window}
    """.split()
    arguments += ["--data-path", str(context.folder / "documents")]
    arguments += ["--bf16"] if context.on_gpu else []
    arguments += _flags_of_this_installation()
    status, printed = run_apart(_LAUNCHER, arguments, _SECONDS, context.folder)
    losses = [float(loss) for loss in _LOSS.findall(printed)]
    if status != 0 or len(losses) != STEPS:
        last = printed.strip().splitlines()[-1] if printed.strip() else "it printed nothing"
        if status is not None and status < 0:
            last = f"signal {-status} has ended it"
        name = "with --distca" if "--distca" in flags else "of plain Megatron"
        command = shlex.join([sys.executable, "-m", _LAUNCHER, *arguments])
        raise Fault(f"a run {name} failed: {last}", SEND, f"{command}\n{printed[-_PRINTED:]}")
    seconds = [float(each) for each in _STEP_SECONDS.findall(printed)]
    norms = [float(each) for each in _GRAD_NORM.findall(printed)]
    return Ran(losses, norms, statistics.median(seconds[2:]))


def _flags_of_this_installation() -> list[str]:
    """Returns the flags without which Megatron-LM stops where packages are missing."""
    missing = [
        flags for module, flags in _WITHOUT.items() if importlib.util.find_spec(module) is None
    ]
    return " ".join(missing).split()


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Most that numbers of ours are from theirs, relative to those; all are finite."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(our - their) / max(abs(their), _LEAST) for our, their in pairs)


def _both(ours: Sequence[float], theirs: Sequence[float], ranks: int) -> str:
    return f"{_said(ours)} with --distca on {ranks} rank(s), {_said(theirs)} without on one"


def _said(numbers: Sequence[float]) -> str:
    return ", ".join(f"{each:.4f}" for each in numbers)

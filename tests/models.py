"""Small Megatron models on live ranks: one run of a job with documents of given lengths."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

MODEL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --lr 1e-2 --lr-decay-style constant --train-iters 100
    --make-vocab-size-divisible-by 64 --tokenizer-type NullTokenizer --vocab-size 250
    --data-path unused --eval-iters 0 --weight-decay 0.1
""".split()


@dataclass(frozen=True)
class MemoryCorpus:
    """Documents of random tokens with a structure that a model can learn."""

    lengths: np.ndarray

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        generator = np.random.default_rng(document)
        first = generator.integers(0, 50)
        noise = generator.integers(0, 3, size=int(self.lengths[document]))
        tokens = (first + np.arange(self.lengths[document]) + noise) % 50
        return tokens[start:end].astype(np.int64)


def memory_stream(lengths: Sequence[int]) -> Any:
    """A token stream of documents in the given order."""
    from megatron_patches.stream import TokenStream

    column = np.asarray(lengths, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(column)])
    corpus = MemoryCorpus(column)
    numbers, zeros = np.arange(len(column)), np.zeros_like(column)
    return TokenStream((corpus,), zeros, numbers, zeros, offsets)  # type: ignore[arg-type]


@dataclass
class StepsDone:
    """What a rank saw of some training steps.

    Attributes:
        losses: of each step.
        grad_norms: of each step.
        gradients: of the first step, by parameter name, with the dimension that TP splits or None.
        bytes_counted: bytes sent by phase, as the transport counted them.
        bytes_planned: the same as the plans predict them.
        place: (tensor-parallel rank, data-parallel rank).
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, tuple[torch.Tensor, int | None]] = field(default_factory=dict)
    bytes_counted: dict[str, int] = field(default_factory=dict)
    bytes_planned: dict[str, int] = field(default_factory=dict)
    place: tuple[int, int] = (0, 0)


def parse(flags: Sequence[str]) -> Namespace:
    from megatron_patches.arguments import add_distca_arguments, validate_distca_arguments
    from megatron_patches.lean.arguments import parse_args

    args = parse_args(add_distca_arguments, [*MODEL, *flags], dist.get_world_size())
    args.rank = dist.get_rank()
    validate_distca_arguments(args)
    return args


def make_run(args: Namespace, stream: Any) -> Any:
    """A lean run of the real job, over a stream of our own."""
    from megatron_patches import data
    from megatron_patches.batch import MicroBatches
    from megatron_patches.gpt_job import GPT_JOB
    from megatron_patches.job import DataIterators
    from megatron_patches.lean import config, training

    layout = data.window_layout(args)
    make = data.batch_maker(args, layout, torch.device("cpu"))(stream, 0)
    model, optimizer = training.build_model_and_optimizer(GPT_JOB, args)
    scheduler = config.parameter_scheduler(args, optimizer)
    batches = MicroBatches(make, 0, layout.samples_per_micro_batch, torch.device("cpu"))
    iterators = DataIterators(batches, None, None)
    return training.Run(GPT_JOB, args, model, optimizer, scheduler, [iterators]), make


def train(flags: Sequence[str], lengths: Sequence[int], steps: int) -> StepsDone:
    """Trains for some steps on this rank; collective."""
    from megatron.core import parallel_state

    from distca.cost.volume import plan_bytes
    from megatron_patches.data import attention_shape
    from megatron_patches.lean import training

    args = parse(flags)
    training.initialize_megatron(args)
    run, make = make_run(args, memory_stream(lengths))
    done = StepsDone(
        place=(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
    )
    for chunk in run.model:
        chunk.train()
        chunk.zero_grad_buffer()
    for step in range(steps):
        if step == 0 and not args.use_distributed_optimizer:
            losses = training.forward_backward(run, "train", forward_only=False)
            done.gradients = collect_gradients(run.model[0])
            _, grad_norm, _ = run.optimizer.step()
            run.scheduler.step(increment=args.global_batch_size)
        else:
            losses, _, grad_norm = training.train_step(run)
        done.losses.append(losses["lm loss"])
        done.grad_norms.append(float(grad_norm))
    run.data[0].close()
    if args.distca:
        transport = make.core_attention.transport
        done.bytes_counted = dict(transport.bytes_sent)
        per_micro_batch = args.data_parallel_size * args.micro_batch_size
        for first_sample in range(0, steps * args.global_batch_size, per_micro_batch):
            plan = make.plan(first_sample)
            phases = plan_bytes(plan, attention_shape(args), args.distca_backward).phases
            for phase, matrix in phases.items():
                moved = args.num_layers * int(matrix[transport.rank].sum())
                done.bytes_planned[phase] = done.bytes_planned.get(phase, 0) + moved
    dist.barrier()
    parallel_state.destroy_model_parallel()
    from megatron.core import num_microbatches_calculator

    num_microbatches_calculator.unset_num_microbatches_calculator()
    return done


def starts_of_micro_batches(flags: Sequence[str], lengths: Sequence[int]) -> list[list[int]]:
    """Where the documents of each micro-batch of the first step start in the stream; collective."""
    from megatron.core import num_microbatches_calculator, parallel_state

    from megatron_patches import data
    from megatron_patches.lean import training

    args = parse(flags)
    training.initialize_megatron(args)
    layout = data.window_layout(args)
    make = data.batch_maker(args, layout, torch.device("cpu"))(memory_stream(lengths), 0)
    step = layout.samples_per_micro_batch
    found = [
        make.documents(first).starts.tolist() for first in range(0, args.global_batch_size, step)
    ]
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    return found


def train_all(runs: Sequence[Sequence[str]], lengths: Sequence[int], steps: int) -> list[StepsDone]:
    """Several runs, one after the other in the same processes."""
    return [train(flags, lengths, steps) for flags in runs]


def collect_gradients(model: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    found = {}
    for name, parameter in model.module.named_parameters():
        split = getattr(parameter, "tensor_model_parallel", False)
        dimension = parameter.partition_dim if split else None
        found[name.removeprefix("module.")] = (parameter.main_grad.clone(), dimension)
    return found


def whole_gradients(ranks: Sequence[StepsDone]) -> dict[str, torch.Tensor]:
    """The gradients of the whole model, from the tensor-parallel ranks of one replica."""
    shards = sorted((r for r in ranks if r.place[1] == 0), key=lambda r: r.place[0])
    whole = {}
    for name, (gradient, dimension) in shards[0].gradients.items():
        parts = [shard.gradients[name][0] for shard in shards]
        if dimension is None or len(parts) == 1:
            whole[name] = gradient
        elif "linear_fc1" in name:
            # Each rank holds its part of the gate, then its part of the other half.
            halves = zip(*(part.chunk(2, dim=0) for part in parts), strict=True)
            whole[name] = torch.cat([torch.cat(half) for half in halves])
        else:
            whole[name] = torch.cat(parts, dim=dimension)
    return whole

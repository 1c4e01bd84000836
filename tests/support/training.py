"""Megatron-LM's own training steps, one by one, on live ranks."""

from __future__ import annotations

import importlib
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches import parts
from megatron_patches.batches.ticks import PlannedIterator
from megatron_patches.flags.batch_sizes import BatchSizes, samples_of_training
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.loop.data import build_data
from megatron_patches.pipeline.data_iterators import DataIterators

initialize = parts.initialize


@dataclass
class Run(parts.BuiltModel):
    """A run with its data.

    Attributes:
        data: iterators of micro-batches.
    """

    data: DataIterators

    def iterators(self, which: str) -> Any:
        """A split's iterators in the form that Megatron's schedules take."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        # As the loop wraps those of data that it does not load itself.
        found = RerunDataIterator(getattr(self.data, which))
        virtual = not isinstance(self.data.train, PlannedIterator) and len(self.model) > 1
        return [found] * len(self.model) if virtual else found


def build_run(args: Namespace, data: DataIterators) -> Run:
    """Builds the model and the optimizer of a run; collective.

    Args:
        args: of `initialize`.
        data: iterators of micro-batches.
    """
    return Run(**vars(parts.build_run(args)), data=data)


def samples_of_splits(args: Namespace) -> tuple[int, int, int]:
    """Returns the samples of the whole run for training, validation and test."""
    batches = BatchSizes.from_args(args)
    evaluation = args.eval_iters * batches.evaluated
    iterations = args.train_iters or batches.iterations(args.train_samples)
    evaluations = iterations // args.eval_interval + 1
    return samples_of_training(args), evaluations * evaluation, evaluation


def build_whole_run(args: Namespace) -> Run:
    """Builds a run over the data that its flags name; collective."""
    from megatron.training import get_tokenizer

    complete = Namespace(**vars(args) | {"vocab_size": get_tokenizer().vocab_size})
    config = DistcaConfig.from_args(args)
    return build_run(args, build_data(config, complete, *samples_of_splits(args)))


def train_step(run: Run) -> tuple[dict[str, float], bool, float]:
    """Runs an iteration; collective.

    Returns:
        The figures that the loop logs, on every rank; whether the update was skipped; and the norm
        of the gradients.
    """
    from megatron.core import num_microbatches_calculator as batch_size
    from megatron.training.training import train_step as step

    args = run.args
    batch_size.update_num_microbatches(args.consumed_train_samples)
    for chunk in run.model:
        chunk.train()
    figures, skipped, *_, norm, _, _ = step(
        run.forward_step,
        run.iterators("train"),
        run.model,
        run.optimizer,
        run.scheduler,
        run.config,
        run.forward_backward_func,
        args.iteration,
    )
    args.iteration += 1
    args.consumed_train_samples += batch_size.get_current_global_batch_size()
    return _of_last_stage(figures) | run.data.train.take_figures(), bool(skipped), norm


def forward_backward(run: Run) -> dict[str, float]:
    """Runs the passes of a global batch, and leaves the gradients; see `train_step`."""
    from megatron.core import parallel_state

    reports = run.forward_backward(run.iterators("train"))
    figures = {}
    for name in reports[0] if reports else ():
        pair = torch.stack([report[name].view(-1) for report in reports]).sum(dim=0)
        dist.all_reduce(pair, group=parallel_state.get_data_parallel_group())
        figures[name] = pair[0] / pair[1]
    return _of_last_stage(figures)


def evaluate(run: Run, which: str) -> dict[str, float]:
    """Evaluates the mean losses of `--eval-iters` global batches of a split; collective."""
    from megatron.training.training import evaluate as evaluate_by_megatron

    # It reads the schedule of all runs, which is Megatron's own here.
    training = importlib.import_module("megatron.training.training")
    given = training.get_forward_backward_func
    training.get_forward_backward_func = lambda *_, **__: run.forward_backward_func
    try:
        figures, *_ = evaluate_by_megatron(
            run.forward_step, run.iterators(which), run.model, None, run.config
        )
    finally:
        training.get_forward_backward_func = given
    return _of_last_stage(figures)


def _of_last_stage(figures: dict[str, torch.Tensor]) -> dict[str, float]:
    """Tells the figures to the ranks of all stages; collective."""
    found: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, {name: float(value) for name, value in figures.items()})
    return next(each for each in found if each)

"""Whole runs of Megatron-LM's loop on live ranks, from data on disk: what it logs, and sets."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from support.models import command_line
from support.ranks import forget_megatron


def write_documents(prefix: Path, lengths: Sequence[int]) -> str:
    """An indexed dataset of documents with a structure that a model can learn."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        tokens = generator.integers(0, 50) + np.arange(length) + generator.integers(0, 3, length)
        builder.add_document(tokens % 50, [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@dataclass
class RunSeen:
    """What a rank saw of a run; losses and learning rates by iteration.

    Attributes:
        losses: as logged.
        norms: norms of all gradients, as logged, of the iterations that have losses.
        samples: samples of each iteration.
        rates_logged: learning rates as logged.
        rates_used: rates of each group of parameters when the optimizer steps, `[(rate, decay)]`.
        validation: where each evaluation was, and its loss.
        place: tokens of training and of validation before the first step, and the most
            tokens of a document, if given.
        threads_left: our threads that are there when the loop has ended.
    """

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    rates_logged: dict[int, float] = field(default_factory=dict)
    rates_used: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    validation: list[tuple[str, float]] = field(default_factory=list)
    place: tuple[int, int, int | None] = (0, 0, None)
    threads_left: list[str] = field(default_factory=list)


def whole_run(flags: Sequence[str]) -> RunSeen:
    """Trains from the flags' first or loaded iteration to their last; collective."""
    from megatron_patches import hooks, megatron_lm

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    seen, data = RunSeen(), []

    theirs = megatron_lm.build_data

    def build_data(*given: Any) -> Any:
        data.append(theirs(*given))
        config, args = given[:2]
        seen.place = (
            args.train_stream_start + args.consumed_train_samples * args.seq_length,
            args.valid_stream_start + args.consumed_valid_samples * args.seq_length,
            config.documents.max_length,
        )
        return data[-1]

    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *command_line(flags)]),
        mock.patch.dict(os.environ, launcher),
        # Failures are for the test.
        mock.patch.object(
            megatron_lm, "ending_the_job_on_failure", return_value=contextlib.nullcontext()
        ),
        mock.patch.object(megatron_lm, "build_data", build_data),
        _noting(seen),
    ):
        # A rank that stays alive may have threads of a failed run before.
        before = set(threading.enumerate())
        try:
            try:
                megatron_lm.pretrain(launcher)
            except SystemExit as end:
                # An exit interval ends with 0.
                if end.code:
                    raise
            seen.threads_left = [
                each.name
                for each in set(threading.enumerate()) - before
                if each.name.startswith("distca")
            ]
        except BaseException:
            for iterators in data:
                iterators.finish()
            raise
        finally:
            for hook in (hooks.ADD_FLAGS, *hooks.LOOP):
                if hook.needed:
                    hook.undo()
            forget_megatron()
            # The lock of `--save` ends with the run.
            gc.collect()
    of_ranks: list[RunSeen] = [RunSeen()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, seen)
    # The last stage alone has losses.
    last = next(each for each in of_ranks if each.losses)
    return replace(seen, losses=last.losses, norms=last.norms, validation=last.validation)


@contextlib.contextmanager
def _noting(seen: RunSeen) -> Iterator[None]:
    """Notes what Megatron-LM's loop does."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args, training

    from megatron_patches.versions import newer_flag

    step, log = training.train_step, training.training_log
    evaluate, evaluate_all = training.evaluate, training.evaluate_and_print_results
    evaluated: list[str] = []

    @functools.wraps(step)
    def train_step(*args: Any, **named: Any) -> Any:
        groups = args[3].param_groups
        rates = [(group["lr"], group["weight_decay"]) for group in groups]
        done = step(*args, **named)
        seen.rates_used[get_args().curr_iteration + 1] = rates
        seen.samples[get_args().curr_iteration + 1] = get_current_global_batch_size()
        return done

    @functools.wraps(log)
    def training_log(*args: Any, **named: Any) -> Any:
        given = inspect.signature(log).bind(*args, **named).arguments
        if given["loss_dict"]:
            seen.losses[given["iteration"]] = float(given["loss_dict"]["lm loss"])
            if given["grad_norm"] is not None:
                seen.norms[given["iteration"]] = float(given["grad_norm"])
        seen.rates_logged[given["iteration"]] = given["learning_rate"]
        return log(*args, **named)

    @functools.wraps(evaluate_all)
    def evaluate_and_print_results(prefix: str, *args: Any, **named: Any) -> Any:
        iterators = args[1]
        several = get_args().multiple_validation_sets and isinstance(iterators, list)
        names = newer_flag(get_args(), "validation_set_names")
        sets = names or range(len(iterators)) if several else ()
        # As Megatron-LM names the losses of several sets.
        evaluated[:] = [f"{prefix}-{name}" for name in sets] or [prefix]
        return evaluate_all(prefix, *args, **named)

    @functools.wraps(evaluate)
    def noted_evaluate(*args: Any, **named: Any) -> Any:
        losses, *others = evaluate(*args, **named)
        if losses:
            seen.validation.append((evaluated[0], float(losses["lm loss"])))
        del evaluated[0]
        return losses, *others

    with (
        mock.patch.multiple(
            training,
            train_step=train_step,
            training_log=training_log,
            evaluate=noted_evaluate,
            evaluate_and_print_results=evaluate_and_print_results,
        ),
        # Kept from a first run, they would be reduced by some ranks alone.
        mock.patch.dict(getattr(training, "_STARTUP_TIMESTAMPS", {})),
    ):
        yield

"""Whole runs of the lean loop on live ranks, from data on disk: what the loop logs, and sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from support.models import parse, start_processes


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
        samples: samples of each iteration.
        rates_logged: learning rates as logged.
        rates_used: rates of each group of parameters when the optimizer steps, `[(rate, decay)]`.
        validation: where each evaluation was, and its loss.
    """

    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    rates_logged: dict[int, float] = field(default_factory=dict)
    rates_used: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    validation: list[tuple[str, float]] = field(default_factory=list)


def whole_run(flags: Sequence[str]) -> RunSeen:
    """Trains from the flags' first or loaded iteration to their last; collective."""
    from megatron_patches.loop.gpt_job import GPT_JOB
    from megatron_patches.loop.lean import logs, training

    args = parse(flags)
    start_processes(args)
    seen = RunSeen()

    class Log(logs.TrainingLog):
        def iteration_done(
            self, iteration: int, losses: Any, *, samples: int, learning_rate: float, **more: Any
        ) -> None:
            seen.losses[iteration] = losses["lm loss"]
            seen.samples[iteration] = samples
            seen.rates_logged[iteration] = learning_rate
            more |= {"samples": samples, "learning_rate": learning_rate}
            super().iteration_done(iteration, losses, **more)

        def evaluated(self, where: str, losses: Any, iteration: int, suffix: str = "") -> None:
            seen.validation.append((where + suffix, losses["lm loss"]))
            super().evaluated(where, losses, iteration, suffix)

    run = training.build_run(GPT_JOB, args)
    step = run.optimizer.step

    def noted_step() -> Any:
        groups = run.optimizer.param_groups
        seen.rates_used[args.iteration + 1] = [(g["lr"], g["weight_decay"]) for g in groups]
        return step()

    run.optimizer.step = noted_step
    with mock.patch.object(logs, "TrainingLog", Log):
        training._train(run)
    dist.barrier()
    return seen

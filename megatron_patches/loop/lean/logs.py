"""Log lines in Megatron-LM's format, and a progress bar."""

from __future__ import annotations

import logging
import math
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megatron_patches.loop.lean.boards import Boards
from megatron_patches.loop.lean.throughput import Throughput
from megatron_patches.loop.messages import message_handlers, message_level

logger = logging.getLogger(__name__)


def setup_logging(rank: int) -> None:
    """Sends messages of the first rank and all warnings to standard output, errors to the other."""
    logging.basicConfig(level=message_level(rank), handlers=message_handlers(rank), force=True)
    # Megatron's own notes on groups and buckets are for its developers.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


class TrainingLog:
    """Collects an interval's figures and writes them on the first rank.

    Args:
        args: flags, of which intervals, those of boards, `train_iters` and `seq_length` are used.
        first_iteration: number of iterations done before.
        throughput: counter of the model's operations; None: they are not logged.
    """

    def __init__(
        self, args: Namespace, first_iteration: int, throughput: Throughput | None = None
    ) -> None:
        self._args, self._throughput = args, throughput
        self._sums: dict[str, float] = {}
        self._iterations = self._skipped = self._nans = self._samples = 0
        self._cpu_seconds: list[float] = []
        self._since = time.perf_counter()
        self._is_writer = dist.get_rank() == 0
        self._boards = Boards(args, self._is_writer)
        self._bar = tqdm(
            total=args.train_iters,
            initial=first_iteration,
            unit="it",
            disable=not (self._is_writer and sys.stderr.isatty()),
        )
        self._redirect = logging_redirect_tqdm()
        if not self._bar.disable:
            self._redirect.__enter__()

    def iteration_done(
        self,
        iteration: int,
        losses: Mapping[str, float],
        *,
        samples: int,
        learning_rate: float,
        loss_scale: float,
        grad_norm: float | None,
        skipped: bool,
        cpu_seconds: float,
    ) -> None:
        """Adds an iteration's figures, and logs a line every `log_interval` iterations. Collective.

        All figures are the same on all ranks, except for `cpu_seconds`, which this rank's process
        used in the iteration, all its threads together. `samples` are those of the iteration.
        """
        self._iterations += 1
        self._samples += samples
        self._cpu_seconds.append(cpu_seconds)
        self._skipped += skipped
        self._nans += not math.isfinite(losses.get("lm loss", 0.0))
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._bar.update(1)
        if "lm loss" in losses:
            self._bar.set_postfix_str(f"lm loss {losses['lm loss']:.4f}")
        if iteration % self._args.tensorboard_log_interval == 0:
            self._write_boards(iteration, losses, learning_rate, grad_norm)
        if iteration % self._args.log_interval == 0:
            self._print_line(iteration, samples, learning_rate, loss_scale, grad_norm)

    def _print_line(
        self,
        iteration: int,
        global_batch_size: int,
        learning_rate: float,
        loss_scale: float,
        grad_norm: float | None,
    ) -> None:
        args = self._args
        elapsed = time.perf_counter() - self._since
        seconds = elapsed / self._iterations
        figures = {"tokens/s": self._samples * args.seq_length / elapsed, "iteration-time": seconds}
        busiest, mean = busiest_and_mean(self._cpu_seconds)
        figures["CPU seconds of the busiest rank"] = busiest
        figures["CPU seconds of the mean rank"] = mean
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        fields = [
            f" [{now}] iteration {iteration:8d}/{args.train_iters:8d}",
            f"consumed samples: {args.consumed_train_samples:12d}",
            f"elapsed time per iteration (ms): {seconds * 1e3:.1f}",
            f"tokens/s: {figures['tokens/s']:.1f}",
            f"CPU seconds of the busiest rank: {busiest:.3f}",
            f"CPU seconds of the mean rank: {mean:.3f}",
            f"learning rate: {learning_rate:.6E}",
            f"global batch size: {global_batch_size:5d}",
            *(f"{name}: {total / self._iterations:.6E}" for name, total in self._sums.items()),
            f"loss scale: {loss_scale:.1f}",
        ]
        if self._throughput is not None:
            figures["throughput"] = self._throughput.per_gpu(elapsed) / 1e12
            # Megatron-LM's place for it.
            fields.insert(3, f"throughput per GPU (TFLOP/s/GPU): {figures['throughput']:.3f}")
        if grad_norm is not None:
            fields.append(f"grad norm: {grad_norm:.3f}")
        fields += [
            f"number of skipped iterations: {self._skipped:3d}",
            f"number of nan iterations: {self._nans:3d}",
        ]
        if self._is_writer:
            logger.info("%s |", " | ".join(fields))
        for name, value in figures.items():
            self._boards.add(name, value, iteration)
        self._sums.clear()
        self._cpu_seconds.clear()
        self._iterations = self._skipped = self._nans = self._samples = 0
        self._since = time.perf_counter()

    def _write_boards(
        self,
        iteration: int,
        losses: Mapping[str, float],
        learning_rate: float,
        grad_norm: float | None,
    ) -> None:
        self._boards.add("learning-rate", learning_rate, iteration)
        if grad_norm is not None:
            self._boards.add("grad-norm", grad_norm, iteration)
        samples = self._args.consumed_train_samples
        for name, value in losses.items():
            self._boards.add(name, value, iteration)
            self._boards.add_by_samples(f"{name} vs samples", value, samples)

    def evaluated(
        self, where: str, losses: Mapping[str, float], iteration: int, suffix: str = ""
    ) -> None:
        """Logs an evaluation's losses, as Megatron-LM does.

        Args:
            where: place in the run.
            losses: mean losses by name.
            iteration: number of the iteration.
            suffix: what tells one of several sets from the others.
        """
        text = f" validation{suffix} loss at {where} | "
        for name, value in losses.items():
            perplexity = math.exp(min(20.0, value))
            text += f"{name} value: {value:.6E} | {name} PPL: {perplexity:.6E} | "
            self._boards.add(f"{name} validation{suffix}", value, iteration)
        if self._is_writer:
            rule = "-" * (len(text) + 1)
            logger.info("%s\n%s\n%s", rule, text, rule)

    def pause(self, seconds: float) -> None:
        """Excludes seconds that were spent on other things than iterations."""
        self._since += seconds

    def close(self) -> None:
        """Closes the progress bar and the boards."""
        if not self._bar.disable:
            self._redirect.__exit__(None, None, None)
        self._bar.close()
        self._boards.close()


def parameter_count(model: list[Any]) -> int:
    """Counts the parameters of this rank's model chunks."""
    return sum(parameter.numel() for chunk in model for parameter in chunk.parameters())


def busiest_and_mean(seconds: Sequence[float]) -> tuple[float, float]:
    """Averages an iteration's seconds of the busiest rank, and of the mean rank. Collective.

    In each iteration all wait for its busiest rank, which may be another one each time: so the
    busiest rank's seconds are averaged over iterations, rather than each rank's.

    Args:
        seconds: seconds of this rank in each iteration.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    busiest = torch.tensor(seconds, dtype=torch.float64, device=device)
    total = busiest.sum()
    dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return busiest.mean().item(), total.item() / (len(seconds) * dist.get_world_size())


def sum_reports(
    reports: list[dict[str, torch.Tensor]], group: dist.ProcessGroup
) -> dict[str, tuple[float, float]]:
    """Sums `[sum, count]` pairs over micro-batches and the data-parallel group."""
    if not reports:
        return {}
    names = list(reports[0])
    total = torch.stack(
        [torch.stack([report[name].double() for name in names]) for report in reports]
    ).sum(dim=0)
    dist.all_reduce(total, group=group)
    return {name: (pair[0], pair[1]) for name, pair in zip(names, total.tolist(), strict=True)}

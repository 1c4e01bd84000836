"""Sizes of global batches, which flags may let grow as the run goes on.

Megatron-LM's own calculators count, by the samples consumed. Up to megatron-core 0.17 batches grow
by `--rampup-batch-size`, from 0.18 on by `--step-batch-size-schedule`.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core import num_microbatches_calculator as calculators

from megatron_patches.versions import BATCHES_RAMP_UP, newer_flag

EVAL_INTERVAL = 1000
"""Iterations between evaluations, unless `--eval-interval` is given."""


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a run's global batches, in samples.

    Attributes:
        global_batch_size: size of a batch, of the last ones where they grow.
        evaluated: size of an evaluation's batch, which never grows.
        micro_batch_size: samples of a micro-batch on a rank.
        data_parallel_size: data-parallel ranks.
        decrease_if_needed: whether a batch that ranks cannot share is made smaller.
        seq_length: tokens of a sample.
        rampup: value of `--rampup-batch-size`: start, increment and samples; None: not given.
        steps: value of `--step-batch-size-schedule`; None: not given.
    """

    global_batch_size: int
    evaluated: int
    micro_batch_size: int
    data_parallel_size: int
    decrease_if_needed: bool
    seq_length: int
    rampup: tuple[int, int, int] | None
    steps: str | None

    @classmethod
    def from_args(cls, args: Namespace) -> BatchSizes:
        """Makes the value of Megatron-LM's checked arguments."""
        rampup = None
        if args.rampup_batch_size:
            start, increment, samples = args.rampup_batch_size
            rampup = (start, increment, samples)
        return cls(
            global_batch_size=args.global_batch_size,
            evaluated=int(newer_flag(args, "eval_global_batch_size") or args.global_batch_size),
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
            decrease_if_needed=args.decrease_batch_size_if_needed,
            seq_length=args.seq_length,
            rampup=rampup,
            steps=newer_flag(args, "step_batch_size_schedule"),
        )

    def micro_batches_by_sample(self) -> Callable[[int], int]:
        """Returns a function from a sample to the number of micro-batches of its global batch.

        It has a calculator of its own, since plans are made ahead of the loop's iteration.
        """
        calculator = self._calculator()

        def count(sample: int) -> int:
            calculator.update(sample, consistency_check=False)
            return int(calculator.get())

        return count

    def iterations(self, samples: int, consumed: int = 0) -> int:
        """Returns the iterations that `--train-samples` makes, by Megatron-LM's rules.

        The last batch may exceed the samples while batches grow, and is left out when they don't.

        Args:
            samples: training samples of the run.
            consumed: number of samples consumed before these iterations.
        """
        last_growing = -1
        if self.rampup:
            last_growing = min(self.rampup[2], samples)
        elif self.steps is not None:
            last_growing = samples - 1
        calculator = self._calculator()
        iterations = 0
        while consumed <= last_growing:
            calculator.update(consumed, consistency_check=False)
            consumed += calculator.get_current_global_batch_size()
            iterations += 1
        return int(iterations + max(samples - consumed, 0) // self.global_batch_size)

    def check_growth(self, samples: int | None) -> None:
        """Checks the flags by which global batches grow.

        Args:
            samples: value of `--train-samples`.

        Raises:
            ValueError: from 0.18 on megatron-core has another flag, or values do not go together.
        """
        if self.rampup is None and self.steps is None:
            return
        flag = "--rampup-batch-size" if self.steps is None else "--step-batch-size-schedule"
        if self.rampup is not None:
            sizes = _rampup_sizes(self.rampup, self.global_batch_size)
            if not BATCHES_RAMP_UP:
                raise ValueError(
                    f"{flag} was removed in megatron-core 0.18: give --step-batch-size-schedule "
                    f"'{_as_steps(sizes, self.seq_length)}' (tokens:size) instead of it and of "
                    "--global-batch-size"
                )
        else:
            sizes = self._step_sizes()
        if samples is None:
            raise ValueError(f"{flag} counts in samples: give --train-samples, not --train-iters")
        unit = self.micro_batch_size * self.data_parallel_size
        for _, size in sizes:
            if size % unit and not self.decrease_if_needed:
                raise ValueError(
                    f"{flag}: the global batch size {size} is not a multiple of --micro-batch-size "
                    f"{self.micro_batch_size} times the data-parallel size "
                    f"{self.data_parallel_size}"
                )

    def _step_sizes(self) -> list[tuple[int, int]]:
        """Parses `--step-batch-size-schedule`: the first sample and the size of each step."""
        try:
            return [(int(sample), int(size)) for sample, size in self._calculator().schedule]
        except (ValueError, AssertionError) as error:
            raise ValueError(
                f"--step-batch-size-schedule {self.steps!r}: give pairs of tokens and sizes, the "
                "first with 0 tokens, such as '0:16 1B:32'"
            ) from error

    def _calculator(self) -> Any:
        """Makes Megatron-LM's calculator, which logs nothing."""
        of_all = {
            "micro_batch_size": self.micro_batch_size,
            "data_parallel_size": self.data_parallel_size,
            "decrease_batch_size_if_needed": self.decrease_if_needed,
            "rank": -1,
        }
        if self.steps is not None:
            return calculators.StepBatchsizeNumMicroBatchesCalculator(
                schedule=self.steps, seq_length=self.seq_length, **of_all
            )
        if self.rampup:
            start, increment, samples = self.rampup
            return calculators.RampupBatchsizeNumMicroBatchesCalculator(
                global_batch_size=self.global_batch_size,
                start_global_batch_size=start,
                batch_size_increment=increment,
                ramup_samples=samples,
                **of_all,
            )
        return calculators.ConstantNumMicroBatchesCalculator(
            global_batch_size=self.global_batch_size, **of_all
        )


def samples_of_training(args: Namespace) -> int:
    """Returns the training samples of the whole run; some were in batches of other sizes.

    Args:
        args: Megatron-LM's arguments, with the progress of the checkpoint that was loaded.
    """
    if args.train_samples:
        return int(args.train_samples)
    left = args.train_iters - args.iteration
    return int(args.consumed_train_samples + left * args.global_batch_size)


def check_batch(args: Namespace) -> None:
    """Checks that ranks can share a global batch; Megatron-LM's message names evaluation flags.

    Args:
        args: arguments before Megatron-LM checks them, with the number of ranks with a model.

    Raises:
        ValueError: they cannot.
    """
    of_model = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    grows = args.rampup_batch_size or newer_flag(args, "step_batch_size_schedule") is not None
    if args.global_batch_size is None or grows or args.world_size % of_model:
        return
    ranks = args.world_size // of_model
    unit = args.micro_batch_size * ranks
    left = args.global_batch_size % unit
    if left and not args.decrease_batch_size_if_needed:
        above = args.global_batch_size - left + unit
        below = f"{above - unit} or " if above > unit else ""
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} times the data-parallel size {ranks}: give {below}{above}"
        )


def _rampup_sizes(rampup: tuple[int, int, int], last: int) -> list[tuple[int, int]]:
    """Returns the first sample of each size of `--rampup-batch-size START INCREMENT SAMPLES`."""
    start, increment, samples = rampup
    if not (0 < start < last and min(increment, samples) > 0) or (last - start) % increment:
        raise ValueError(
            f"--rampup-batch-size {start} {increment} {samples} must lead in positive steps of "
            f"{increment} from {start} to --global-batch-size {last}"
        )
    steps = (last - start) // increment
    return [(math.ceil(n * samples / steps), start + n * increment) for n in range(steps + 1)]


def _as_steps(sizes: list[tuple[int, int]], seq_length: int) -> str:
    return " ".join(f"{sample * seq_length}:{size}" for sample, size in sizes)

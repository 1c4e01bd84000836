"""What a run measures of its steps, and the line of each log interval.

Each rank keeps its own figures of each step. Only when Megatron-LM logs, the ranks share them, so a
step waits for nothing more. Boards get all figures, and the line those that fit a terminal.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import resource
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distca.run_figures import (
    ALLOCATED,
    ATTENTION_BUSIEST,
    ATTENTION_MEAN,
    BUSIEST,
    GRADIENTS,
    MEAN,
    MFU,
    RESERVED,
    RESIDENT,
    SECONDS,
    SPEED,
    TFLOPS,
    WAIT,
)
from distca.runtime import AttentionTimes
from distca.simulate import peak_tflops
from megatron_patches import cpu
from megatron_patches.batches.micro_batch import PAIRS
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.loop.finite import ending_unless_finite
from megatron_patches.loop.metrics_file import write_metrics
from megatron_patches.model.core_attention import PackedCoreAttention
from megatron_patches.pipeline.data_iterators import unwrap
from megatron_patches.pipeline.progress import Progress
from megatron_patches.versions import counts_pairs

logger = logging.getLogger(__name__)

_LEGEND = (
    "log lines: s is the time of a step; attention s, the time of attention kernels in a step on "
    "the busiest rank and on the mean rank; wait, the part of a step for which the mean rank waits "
    "for exchanges; GB, the peak %s. All other figures are for boards (--tensorboard-dir)"
)

# Fields of Megatron-LM's line that are left to boards.
_ON_BOARDS = {
    "consumed samples",
    "elapsed time per iteration (ms)",
    "learning rate",
    "global batch size",
}
# The same, while they say nothing: name and most that is nothing.
_UNLESS_ABOVE = {
    "number of skipped iterations": 0.0,
    "number of nan iterations": 0.0,
    "loss scale": 1.0,
}
_FIRST = ("lm loss", "grad norm")
_EVALUATION = re.compile(r"^ validation\S* loss at ")
_EVALUATED = re.compile(r"([^|:]+): (\S+) \|")
_ITERATION = re.compile(r"^ \[[^]]*\] iteration +(\d+)/ *(\d+) ")


@dataclass
class StepFigures:
    """Figures of one step on this rank.

    Attributes:
        seconds: wall time.
        cpu_seconds: CPU time of the process.
        tokens: tokens of the global batch.
        samples: samples of the global batch.
        of_batch: figures of the global batch that this rank's iterator has, by name.
    """

    seconds: float
    cpu_seconds: float
    tokens: int
    samples: int
    of_batch: Mapping[str, float]


@dataclass
class StepLog:
    """Figures of the steps since the last line.

    Attributes:
        steps: steps since the last line, of this rank.
        times: times of core attention on this rank; None: it is not ours, or nothing ran yet.
        shared: figures of the line that is printed next, by name.
        lines: number of lines so far.
    """

    steps: list[StepFigures] = field(default_factory=list)
    times: AttentionTimes | None = None
    shared: dict[str, float] = field(default_factory=dict)
    lines: int = 0

    def share(self, args: Namespace, dedicated: int) -> None:
        """Makes the figures of an interval, the same on all ranks with a model. Collective.

        Args:
            args: Megatron-LM's arguments.
            dedicated: number of dedicated servers, which are devices of the job as well.
        """
        steps, self.steps = self.steps, []
        attention = [] if self.times is None else self.times.take()
        device = torch.device("cpu" if cpu.without_cuda() else "cuda")
        # Ranks wait for the busiest one in each step, which may be another one each time.
        of_batches = {
            name: sum(each.of_batch[name] for each in steps) / len(steps)
            for name in steps[0].of_batch
        }
        own = torch.tensor(
            [
                *of_batches.values(),
                sum(each.of_batch[PAIRS] * each.samples for each in steps),
                *(each.cpu_seconds for each in steps),
                *(each.kernels for each in attention),
                *(each.waits for each in attention),
                *_peak_gigabytes(),
            ],
            dtype=torch.float64,
            device=device,
        )
        most, total = own.clone(), own
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        sizes = [len(of_batches), 1, len(steps), len(attention), len(attention), -1]
        sizes[-1] = len(own) - sum(sizes[:-1])
        mean = total / dist.get_world_size()
        batches, pairs, cpu_seconds, kernels, waits, _ = mean.split(sizes)  # type: ignore[no-untyped-call]
        _, _, most_cpu_seconds, most_kernels, _, peaks = most.split(sizes)  # type: ignore[no-untyped-call]
        seconds = sum(each.seconds for each in steps)
        self.shared = {SPEED: sum(each.tokens for each in steps) / seconds}
        self.shared |= zip(of_batches, batches.tolist(), strict=True)
        samples = sum(each.samples for each in steps)
        self.shared |= _utilization(samples, float(pairs), seconds, args, dedicated)
        if attention and float(kernels.sum()) > 0:
            self.shared |= {
                ATTENTION_BUSIEST: float(most_kernels.mean()),
                ATTENTION_MEAN: float(kernels.mean()),
            }
            if float(waits.sum()) > 0:
                self.shared[WAIT] = float(waits.mean()) * len(steps) / seconds
        if cpu.without_cuda():
            self.shared[BUSIEST] = float(most_cpu_seconds.mean())
            self.shared[MEAN] = float(cpu_seconds.mean())
            self.shared[RESIDENT] = float(peaks[0])
        else:
            self.shared |= {ALLOCATED: float(peaks[0]), RESERVED: float(peaks[1])}
        self.shared[SECONDS] = seconds / len(steps)

    def write(self, iteration: int) -> None:
        """Writes the figures to Megatron-LM's boards, which one rank has."""
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        figures = {name: value for name, value in self.shared.items() if name != SECONDS}
        if ATTENTION_MEAN in figures:
            balance = figures[ATTENTION_BUSIEST] / figures[ATTENTION_MEAN]
            figures["attention, busiest rank over mean"] = balance
        if (board := get_tensorboard_writer()) is not None:
            for name, value in figures.items():
                board.add_scalar(name, value, iteration)
        if (wandb := get_wandb_writer()) is not None:
            wandb.log(figures, iteration)


def _peak_gigabytes() -> tuple[float, ...]:
    """Returns this rank's peak memory: allocated and reserved on a GPU, resident on a CPU."""
    if cpu.without_cuda():
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,)
    return torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9


def _utilization(
    samples: int, pairs: float, seconds: float, args: Namespace, dedicated: int
) -> dict[str, float]:
    """Returns the MFU, or where the device's peak is not known its rate.

    Operations are Megatron-LM's count of the model, with the pairs that documents really have.

    Args:
        samples: number of samples.
        pairs: million pairs of a micro-batch, times its samples, added up over the samples.
        seconds: time in which they were trained on.
        args: Megatron-LM's arguments.
        dedicated: number of dedicated servers.
    """
    from megatron.training.training import num_floating_point_operations as operations

    if not counts_pairs(operations):
        return {}
    # It counts half of a square, for causal masks.
    squares = 2e6 * pairs / args.micro_batch_size
    total = operations(args, samples, seqlen_squared_sum_in_batch=squares)
    rate = total / seconds / (args.world_size + dedicated) / 1e12
    peak = None
    if (args.bf16 or args.fp16) and not cpu.without_cuda():
        peak = peak_tflops(torch.cuda.get_device_name())
    return {TFLOPS: rate} if peak is None else {MFU: rate / peak}


class Logging(Protocol):
    """A run that measures its steps."""

    log: StepLog
    progress: Progress

    @property
    def config(self) -> DistcaConfig: ...


def measured_step(theirs: Callable[..., Any], run: Logging) -> Callable[..., Any]:
    """Measures a step, and ends the run by a line where something is not finite."""
    checked_step = ending_unless_finite(theirs)
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def train_step(*given: Any, **named: Any) -> Any:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size
        from megatron.training import get_args

        args, log = get_args(), run.log
        arguments = signature.bind(*given, **named).arguments
        iterators = arguments["data_iterator"]
        # One of the model chunks': the micro-batches of all are the same.
        iterator = unwrap(iterators[0] if isinstance(iterators, list) else iterators)
        if log.times is None:
            log.times = _times_of(arguments["model"], iterator)
        if log.times is not None:
            log.times.begin_step()
        run.progress.begin(args.curr_iteration + 1)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        figures, *others = checked_step(*given, **named)
        samples = get_current_global_batch_size()
        log.steps.append(
            StepFigures(
                time.perf_counter() - begin,
                time.process_time() - cpu_begin,
                samples * args.seq_length,
                samples,
                iterator.take_figures(),
            )
        )
        if log.times is not None:
            log.times.end_step()
        run.progress.enter("the end of the iteration")
        return figures, *others

    return train_step


def _times_of(model: Iterable[torch.nn.Module], iterator: Any) -> AttentionTimes | None:
    """Returns what measures a rank's core attention; None: it is not ours."""
    if (runtime := getattr(iterator, "runtime", None)) is not None:
        times: AttentionTimes = runtime.core_attention.times
        return times
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, PackedCoreAttention):
                return module.times
    return None


def measured_log(theirs: Callable[..., Any], run: Logging) -> Callable[..., Any]:
    """Logs as Megatron-LM does, and the figures that steps were measured by."""
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def training_log(*given: Any, **named: Any) -> Any:
        from megatron.training import get_args

        args, log = get_args(), run.log
        arguments = signature.bind(*given, **named).arguments
        iteration = arguments["iteration"]
        is_logged = iteration % args.log_interval == 0 or arguments.get("is_first_iteration", False)
        if is_logged and log.steps:
            log.share(args, run.config.dedicated)
            log.write(iteration)
            if run.config.metrics is not None and args.rank == args.world_size - 1:
                write_metrics(run.config.metrics, log.shared | _logged(arguments))
            if not log.lines:
                memory = "of resident memory" if cpu.without_cuda() else "allocated and reserved"
                logger.info(_LEGEND, memory)
            log.lines += 1
        return theirs(*given, **named)

    return training_log


def _logged(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Returns what Megatron-LM logs of an iteration itself, of what it has.

    Args:
        arguments: arguments of its `training_log`.
    """
    named = {"iteration": "iteration", "learning_rate": "learning rate", "grad_norm": GRADIENTS}
    found = {name: arguments.get(given) for given, name in named.items()}
    # Losses are on the last pipeline stage.
    found |= arguments["loss_dict"]
    return {name: float(value) for name, value in found.items() if value is not None}


def short_lines(theirs: Callable[[str], None], run: Logging) -> Callable[[str], None]:
    """Prints the line of an interval in a form that fits a terminal, and others as they are."""

    @functools.wraps(theirs)
    def print_rank_last(message: str) -> None:
        theirs(short_line(message, run.log.shared))

    return print_rank_last


def short_line(line: str, figures: Mapping[str, float]) -> str:
    """Returns a line of Megatron-LM with few of its fields and those of a run's figures.

    Fields that a flag of Megatron-LM adds, and losses, are kept. Names are Megatron-LM's. Of an
    evaluation's line the numbers alone are written as others are.

    Args:
        line: its line of an interval or an evaluation; another is returned as it is.
        figures: measured figures of the interval, by name.
    """
    if _EVALUATION.match(line):
        return _EVALUATED.sub(lambda field: f"{field[1]}: {_short(field[1], field[2])} |", line)
    begin = _ITERATION.match(line)
    if begin is None:
        return line
    theirs: dict[str, str] = {}
    for part in line.split("|")[1:]:
        name, colon, value = part.strip().rpartition(":")
        if colon and name not in _ON_BOARDS and not _says_nothing(name, value):
            theirs[name] = _short(name, value.strip())
    first = {name: theirs.pop(name) for name in _FIRST if name in theirs}
    fields = first | _measured(figures) | theirs
    shown = " | ".join(f"{name}: {value}" for name, value in fields.items())
    return f"iteration {begin[1]}/{begin[2]} | {shown} |"


def _measured(figures: Mapping[str, float]) -> dict[str, str]:
    """Returns the fields of measured figures."""
    found = {}
    if SECONDS in figures:
        found[SECONDS] = f"{figures[SECONDS]:.3g}"
    if SPEED in figures:
        found[SPEED] = f"{figures[SPEED]:.0f}"
    if MFU in figures:
        found[MFU] = f"{figures[MFU]:.0%}"
    if ATTENTION_BUSIEST in figures:
        busiest, mean = figures[ATTENTION_BUSIEST], figures[ATTENTION_MEAN]
        found["attention s"] = f"{busiest:.3g}/{mean:.3g}"
    if WAIT in figures:
        found["wait"] = f"{figures[WAIT]:.0%}"
    peaks = [figures[name] for name in (ALLOCATED, RESERVED, RESIDENT) if name in figures]
    if peaks:
        found["GB"] = "/".join(f"{peak:.1f}" for peak in peaks)
    return found


def _says_nothing(name: str, value: str) -> bool:
    return name in _UNLESS_ABOVE and float(value) <= _UNLESS_ABOVE[name]


def _short(name: str, value: str) -> str:
    """Returns a value without an exponent where it needs none; losses keep seven digits."""
    if "E" not in value:
        return value
    number = float(value)
    if "loss" not in name or name.endswith("PPL"):
        return f"{number:.4g}"
    return f"{number:.6f}" if 0.01 <= abs(number) < 1000 else f"{number:.7g}"

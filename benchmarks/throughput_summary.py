"""What `benchmarks/throughput.py` measures, and the figures that follow from it."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from replay import Pass, fit, replay, ticks_seconds

from data.lengths import DISTRIBUTIONS, draw
from distca.plan import BLOCK, Mask
from distca.plan.plan import max_over_mean
from distca.plan.span import Floats, Int64s
from distca.schedule import tick_schedule


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        processes: data-parallel ranks of all stages.
        stages: of the pipeline.
        micro_batches: of a batch.
        seq_length: tokens of a rank in a micro-batch.
        layers: transformer layers.
        hidden_size: width; a head has 32 elements, four heads share a key-value head.
        batches: different global batches of each mix, each a training step.
        rounds: how often all batches are measured.
        schedulers: of `--distca-scheduler`.
        modes: "ping-pong", or "whole" micro-batches (`--no-distca-ping-pong`).
        tolerances: of `--distca-tolerance`.
        mixes: of document lengths: see the module.
        seed: of the document lengths.
    """

    processes: int
    stages: int
    micro_batches: int
    seq_length: int
    layers: int
    hidden_size: int
    batches: int
    rounds: int
    schedulers: tuple[str, ...]
    modes: tuple[str, ...]
    tolerances: tuple[float, ...]
    mixes: tuple[str, ...]
    seed: int

    @property
    def data_parallel_size(self) -> int:
        return self.processes // self.stages

    @property
    def tokens(self) -> int:
        """Of a global batch."""
        return self.data_parallel_size * self.micro_batches * self.seq_length

    def ways(self) -> dict[str, list[str]]:
        """What is compared, by name, and its flags."""
        ways: dict[str, list[str]] = {PLAIN: []}
        kinds = itertools.product(self.schedulers, self.modes, self.tolerances)
        for scheduler, mode, tolerance in kinds:
            flags = ["--distca", "--distca-scheduler", scheduler]
            flags += ["--distca-tolerance", str(tolerance)]
            flags += [] if mode == "ping-pong" else ["--no-distca-ping-pong"]
            name = scheduler if len(self.modes) == 1 else f"{scheduler}, {mode}"
            name += f", tolerance {tolerance:g}" if len(self.tolerances) > 1 else ""
            if self.stages > 1:
                ways[f"{name}{APART}"] = [*flags, "--no-distca-pool-stages"]
            ways[name] = flags
        return ways


MODES = ("ping-pong", "whole")
PLAIN, SHORT, APART = "plain", "documents of one block", ", stages apart"
LONG_TAIL = "long-tail"
_SCALE = 65_536


def document_lengths(setting: Setting, mix: str) -> list[int]:
    """Documents that fill all batches; one that reaches beyond a rank's tokens is cut there."""
    ranks = setting.batches * setting.micro_batches * setting.data_parallel_size
    if mix == LONG_TAIL:
        generator = np.random.default_rng(setting.seed)
        count = ranks * setting.seq_length
        drawn = np.exp(generator.normal(np.log(setting.seq_length / 16), 2.0, size=count))
    else:
        total = ranks * _SCALE
        drawn = draw(DISTRIBUTIONS[mix], total, setting.seed) * setting.seq_length / _SCALE
    drawn_lengths = iter(np.maximum(drawn, 1).astype(np.int64).tolist())
    lengths = []
    for _ in range(ranks):
        left = setting.seq_length
        while left:
            lengths.append(min(next(drawn_lengths, left), left))
            left -= lengths[-1]
    return lengths


@dataclass
class Step:
    """What a rank saw of a training step.

    Attributes:
        seconds: from barrier to barrier, planning included.
        cpu_seconds: of the process.
        passes: of plain Megatron, with a pipeline.
        ticks: CPU seconds of each tick of `--distca`.
        bytes_sent: to other ranks.
        peak_bytes: tensors that were there at once, beside parameters and optimizer; 0 where it was
            not measured.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    passes: list[Pass] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    peak_bytes: int = 0


def pairs_of_ranks(setting: Setting, mix: str) -> Int64s:
    """Visible pairs of documents as they came, `[batches, micro-batches, ranks]`."""
    shape = (setting.batches, setting.micro_batches, setting.data_parallel_size)
    loads = np.zeros(int(np.prod(shape)), dtype=np.int64)
    at = 0
    for length in document_lengths(setting, mix):
        loads[at // setting.seq_length] += Mask().pairs(0, length, 0, length)
        at += length
    return loads.reshape(shape)


Ranks = list[dict[str, list[list[Step]]]]
"""Of each rank by way, batch and round."""


def summarize(setting: Setting, mix: str, ranks: Ranks) -> dict[str, Any]:
    """Medians, ratios and the ideal of one mix."""
    median = {
        name: [statistics.median(step.seconds for step in row) for row in rows]
        for name, rows in ranks[0].items()
    }
    pairs = pairs_of_ranks(setting, mix)
    cpu = {
        name: [
            statistics.mean(step.cpu_seconds for row in own[name] for step in row) for own in ranks
        ]
        for name in ranks[0]
    }
    ways = {
        name: {
            "tokens_per_second": setting.batches * setting.tokens / sum(median[name]),
            "ratio": sum(median[PLAIN]) / sum(median[name]),
            "cpu_seconds_of_ranks": cpu[name],
            "seconds": sum(median[name]),
            "bytes_sent_of_ranks": [sum(row[0].bytes_sent for row in own[name]) for own in ranks],
            "peak_bytes": max(
                step.peak_bytes for own in ranks for row in own[name] for step in row
            ),
        }
        for name in setting.ways()
    }
    if setting.stages == 1:
        ideal = _ideal_seconds(setting, pairs.sum(axis=1), median[PLAIN], median[SHORT])
        for way in ways.values():
            way["ideal_ratio"] = sum(median[PLAIN]) / ideal
    else:
        _add_replayed(setting, pairs, ranks, ways)
    return {
        "max_over_mean_pairs": [
            max_over_mean(loads) for loads in pairs.reshape(-1, pairs.shape[-1])
        ],
        "seconds": median,
        "ways": ways,
    }


def _ideal_seconds(
    setting: Setting, pairs: Int64s, plain: list[float], short: list[float]
) -> float:
    """Seconds of all batches if their pairs, `[batches, ranks]`, were perfectly shared out."""
    rest = statistics.median(short)
    short_pairs = setting.micro_batches * setting.seq_length // BLOCK
    short_pairs *= Mask().pairs(0, BLOCK, 0, BLOCK)
    total = 0.0
    for seconds, loads in zip(plain, pairs, strict=True):
        per_pair = max(seconds - rest, 0.0) / max(loads.max() - short_pairs, 1)
        total += seconds - per_pair * (loads.max() - loads.mean())
    return float(total)


def _add_replayed(
    setting: Setting, pairs: Int64s, ranks: Ranks, ways: dict[str, dict[str, Any]]
) -> None:
    """Replayed seconds, their ratio, and the ideal ratio, of each way."""

    def column(data_rank: int) -> list[dict[str, list[list[Step]]]]:
        return ranks[data_rank :: setting.data_parallel_size]

    def plain(batch: int, passes_of: Any) -> float:
        return max(
            replay([passes_of(stage, own, data, batch) for stage, own in enumerate(column(data))])
            for data in range(setting.data_parallel_size)
        )

    def measured(stage: int, own: Any, data: int, batch: int) -> list[Pass]:
        rounds = [step.passes for step in own[PLAIN][batch]]
        return [
            first._replace(seconds=statistics.median(each.seconds for each in (first, *others)))
            for first, *others in zip(*rounds, strict=True)
        ]

    models = {}
    for stage in range(setting.stages):
        for phase in ("forward", "backward"):
            found = [
                (pairs[batch, each.micro_batch, data], each.seconds)
                for data in range(setting.data_parallel_size)
                for batch in range(setting.batches)
                for each in measured(stage, column(data)[stage], data, batch)
                if each.phase == phase
            ]
            models[stage, phase] = fit(*zip(*found, strict=True))

    def modelled(stage: int, own: Any, data: int, batch: int) -> list[Pass]:
        fitted = []
        for each in measured(stage, own, data, batch):
            rest, per_pair = models[stage, each.phase]
            seconds = rest + per_pair * float(pairs[batch, each.micro_batch, data])
            fitted.append(each._replace(seconds=seconds))
        return fitted

    batches = range(setting.batches)
    plain_seconds = sum(plain(batch, measured) for batch in batches)
    plain_modelled = sum(plain(batch, modelled) for batch in batches)
    for name, way in ways.items():
        if name == PLAIN:
            seconds, ideal = plain_seconds, plain_modelled
        else:
            seconds = 0.0
            for batch in batches:
                rounds = [[step.ticks for step in own[name][batch]] for own in ranks]
                table: Floats = np.median(np.array(rounds), axis=1)
                seconds += ticks_seconds(list(table.T))
            ideal = sum(
                _ideal_ticks(setting, float(pairs[batch].sum()), models, APART not in name)
                for batch in batches
            )
        way["replayed_seconds"] = seconds
        way["replayed_ratio"] = plain_seconds / seconds
        way["ideal_ratio"] = plain_modelled / ideal


def _ideal_ticks(
    setting: Setting, pairs: float, models: dict[tuple[int, str], tuple[float, float]], pooled: bool
) -> float:
    """Seconds of a batch's ticks if pairs were perfectly shared out, over stages or within them."""
    each = pairs / setting.micro_batches / setting.data_parallel_size
    total = 0.0
    for tick in tick_schedule(setting.micro_batches, setting.stages).ticks:
        working = [models[n, tick.phase] for n, work in enumerate(tick.work) if work is not None]
        shared = each * (len(working) / setting.stages if pooled else 1.0)
        total += max(rest for rest, _ in working)
        total += shared * statistics.mean(per_pair for _, per_pair in working)
    return total


def table(setting: Setting, summaries: dict[str, Any]) -> str:
    """The figures as Markdown."""
    columns = ["mix", "pairs max/mean", "scheduler", "tokens/s", "peak MB", "ratio"]
    piped = setting.stages > 1
    columns += ["CPU s of ranks", "replayed s", "replayed ratio"] if piped else []
    columns += ["ideal", "of ideal"]
    rows = [columns, ["---"] * len(columns)]
    for mix, summary in summaries.items():
        spread = summary["max_over_mean_pairs"]
        for name, way in summary["ways"].items():
            row = [mix, f"{min(spread):.2f} to {max(spread):.2f}", name]
            row += [f"{way['tokens_per_second']:.0f}", f"{way['peak_bytes'] / 1e6:.1f}"]
            row.append(f"{way['ratio']:.3f}")
            reached = way["ratio"]
            if piped:
                row.append(", ".join(f"{cpu:.2f}" for cpu in way["cpu_seconds_of_ranks"]))
                row += [f"{way['replayed_seconds']:.2f}", f"{way['replayed_ratio']:.3f}"]
                reached = way["replayed_ratio"]
            row += [f"{way['ideal_ratio']:.3f}", f"{reached / way['ideal_ratio']:.1%}"]
            rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)

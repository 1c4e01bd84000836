"""A report of the demo: its run with `--distca` beside the first steps as plain Megatron.

    python -m data.demo_report --distca demo/tensorboard/distca --plain demo/tensorboard/plain \\
        --output demo/report.png -- FLAGS

The folders are the runs' `--tensorboard-dir`, and FLAGS are the flags of both runs. The command
prints a table and draws a picture.
"""

from __future__ import annotations

import argparse
import logging
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distca.commands.plan_plot import busiest_servers, draw_documents
from distca.palette import BLACK, BLUE, ORANGE
from distca.plan import Plan
from distca.plan.span import Floats
from distca.run_figures import (
    AFTER,
    BEFORE,
    BUSIEST,
    LOSS,
    MEAN,
    Scalars,
    board_files,
    read_boards,
)
from distca.schedule import ScheduleConfig, make_scheduler, plain_loads
from megatron_patches.batches.blends import check_blends
from megatron_patches.batches.micro_batch import PAIRS
from megatron_patches.batches.stream import TokenStream
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import mask_of_window
from megatron_patches.parts import parse_args

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOISE = 0.03
"""Share by which CPU seconds of equal work differ from run to run."""


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same steps.

    Attributes:
        first, last: first and last of the steps.
        plain: CPU seconds of the busiest and of the mean rank in a step of plain Megatron.
        distca: CPU seconds of the busiest and of the mean rank in a step with `--distca`.
        before: pairs of the busiest rank over the mean in plain data parallelism.
        after: pairs of the busiest rank over the mean with `--distca`.
        pairs: million pairs of the mean rank's micro-batch in the mean layer, in plain Megatron and
            with `--distca`.
    """

    first: int
    last: int
    plain: tuple[float, float]
    distca: tuple[float, float]
    before: float
    after: float
    pairs: tuple[float, float]

    @property
    def ratio(self) -> float:
        """CPU seconds of the busiest rank in plain Megatron over those with `--distca`."""
        return self.plain[0] / self.distca[0]

    def table(self) -> str:
        """Formats the figures as lines of text."""
        rows: list[tuple[str, float, float]] = [
            ("CPU seconds of the busiest rank", self.plain[0], self.distca[0]),
            ("CPU seconds of the mean rank", self.plain[1], self.distca[1]),
            (
                "busiest over mean, CPU seconds",
                self.plain[0] / self.plain[1],
                self.distca[0] / self.distca[1],
            ),
            ("busiest over mean, core attention", self.before, self.after),
            ("million query-key pairs per rank, layer", *self.pairs),
        ]
        title = f"steps {self.first} to {self.last}, per step"
        return "\n".join(
            [
                f"{title:40}{'plain Megatron':>16}{'DistCA':>10}",
                *(f"{name:40}{plain:16.2f}{distca:10.2f}" for name, plain, distca in rows),
                f"Plain Megatron's busiest rank takes {self.ratio:.2f} times as long as DistCA's. "
                "All other ranks wait for it.",
                f"If steps were only core attention, and DistCA balanced it perfectly, this "
                f"would be {self.before:.2f} times.",
                *self._of_the_pairs(),
                *self._of_the_mean_rank(),
            ]
        )

    def _of_the_pairs(self) -> list[str]:
        """Says how many more pairs documents have that are not cut."""
        ratio = self.pairs[1] / self.pairs[0]
        if ratio < 1.005:
            return []
        return [
            f"DistCA's core attention has {ratio:.2f} times the query-key pairs, because it keeps",
            "documents whole. Plain Megatron cuts them where a rank's tokens end.",
        ]

    def _of_the_mean_rank(self) -> list[str]:
        """Says how the mean ranks' CPU seconds differ, if by more than noise."""
        ratio = self.distca[1] / self.plain[1]
        if abs(ratio - 1) <= _NOISE:
            return ["The mean rank's CPU seconds are about the same in both."]
        return [f"The mean rank's CPU seconds are {ratio:.2f} times as many with DistCA."]


def read_scalars(folder: Path) -> Scalars:
    """Reads the figures of the last run that wrote to a folder.

    Raises:
        ValueError: no run wrote to it.
    """
    files = board_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no TensorBoard files: give a run's --tensorboard-dir")
    return read_boards(files[-1:])


def compare(distca: Scalars, plain: Scalars) -> Comparison | None:
    """Compares the steps that both runs logged, without the first one, in which they warm up.

    Returns:
        The comparison; None: the runs are too short.
    """
    logged = sorted(distca.get(BUSIEST, {}).keys() & plain.get(BUSIEST, {}).keys())
    if len(logged) < 2:
        return None

    def mean_of(scalars: Scalars, name: str) -> float:
        return float(np.mean([scalars[name][iteration] for iteration in logged[1:]]))

    return Comparison(
        logged[0] + 1,
        logged[-1],
        (mean_of(plain, BUSIEST), mean_of(plain, MEAN)),
        (mean_of(distca, BUSIEST), mean_of(distca, MEAN)),
        mean_of(distca, BEFORE),
        mean_of(distca, AFTER),
        (mean_of(plain, PAIRS), mean_of(distca, PAIRS)),
    )


def first_window(flags: Sequence[str], processes: int) -> tuple[Plan, Floats]:
    """Plans a run's first window, and counts each rank's pairs in plain data parallelism."""
    args = parse_args(flags, world_size=processes)
    lengths = _first_lengths(args)
    capacities = np.full(args.data_parallel_size, args.seq_length, dtype=np.int64)
    mask = mask_of_window(args.window_size)
    scheduling = DistcaConfig.from_args(args).scheduling
    config = ScheduleConfig(tolerance=scheduling.tolerance)
    plan = make_scheduler(scheduling.scheduler, config).plan(lengths, capacities, mask)
    return plan, plain_loads(lengths, capacities, mask)


def _first_lengths(args: Namespace) -> np.ndarray:
    tokens = args.data_parallel_size * args.seq_length
    documents = DistcaConfig.from_args(args).documents
    stream = TokenStream.open(
        check_blends(documents, args, ["train"])["train"],
        "train",
        seed=args.seed,
        num_tokens=tokens,
        max_document_length=documents.max_length or tokens,
    )
    return stream.document_lengths(0, tokens)


def draw(
    distca: Scalars, plain: Scalars, found: Comparison, plan: Plan, before: Floats, path: Path
) -> None:
    """Draws losses, balance, a plan and the ranks' pairs, in the format of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (losses, balance), (documents, ranks) = figure.subplots(2, 2)
    losses.plot(*_curve(distca[LOSS]), color=BLUE, label="DistCA")
    losses.plot(*_curve(plain[LOSS]), "o", color=ORANGE, markersize=4, label="plain Megatron")
    losses.set(title="The loss falls as plain Megatron's does", xlabel="step", ylabel="loss")
    losses.legend()
    balance.plot(*_curve(distca[BEFORE]), color=ORANGE, label="plain data parallelism")
    balance.plot(*_curve(distca[AFTER]), color=BLUE, label="DistCA")
    balance.axhline(1, color=BLACK, linewidth=0.8, linestyle="--")
    balance.set(
        title="Core attention of the busiest rank over the mean",
        xlabel="step",
        ylabel="pairs, busiest / mean",
        ylim=(0, None),
    )
    balance.legend()
    draw_documents(documents, plan, busiest_servers(plan))
    documents.set(title="The first window's documents; numbers: the rank that computes a task")
    _draw_bars(ranks, before, plan.loads().astype(np.float64))
    figure.suptitle(
        f"CPU seconds of the busiest rank in a step: plain Megatron {found.plain[0]:.2f}, DistCA "
        f"{found.distca[0]:.2f} (steps {found.first} to {found.last})"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _curve(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def _draw_bars(axes: Axes, before: Floats, after: Floats) -> None:
    """Draws each rank's pairs in plain data parallelism and with `--distca`."""
    ranks = np.arange(len(before))
    axes.bar(ranks - 0.2, before / 1e6, 0.4, color=ORANGE, label="plain data parallelism")
    axes.bar(ranks + 0.2, after / 1e6, 0.4, color=BLUE, label="DistCA")
    axes.set(
        title="Core attention of each rank for that window",
        xlabel="rank",
        ylabel="million pairs",
        xticks=ranks,
    )
    axes.legend()


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--distca", type=Path, required=True, help="figures of the run with it")
    parser.add_argument("--plain", type=Path, required=True, help="figures of plain Megatron")
    parser.add_argument("--output", type=Path, required=True, help="the picture")
    parser.add_argument("--processes", type=int, default=4, help="of both runs (default: 4)")
    parser.add_argument("flags", nargs="+", metavar="FLAGS", help="after --: what both were given")
    args = parser.parse_args(argv)
    # What it says of each file that it reads is in the logs of the runs.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        distca, plain = read_scalars(args.distca), read_scalars(args.plain)
        found = compare(distca, plain)
        if found is None:
            sys.stdout.write(
                "no report: the runs have fewer than two log lines in common, and the first "
                "is left out as warm-up; give more --train-iters, or a smaller --log-interval\n"
            )
            return 0
        plan, before = first_window(args.flags, args.processes)
    except ValueError as error:
        sys.stderr.write(f"no report: {error}\n")
        return 2
    draw(distca, plain, found, plan, before, args.output)
    sys.stdout.write(f"{found.table()}\nPicture: {args.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

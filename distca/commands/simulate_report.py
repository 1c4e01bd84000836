"""The report of `distca simulate`: a table, its rows as JSON, and a picture."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distca.commands.command_line import make_figure
from distca.commands.verdict import TITLES, Verdict, is_plain, speed_up
from distca.palette import BLACK, GREY, IN_TURN, ORANGE, PURPLE, SKY_BLUE
from distca.simulate import DISTCA_SYSTEMS, Breakdown, Choice, Workload, training_flags
from distca.simulate.baselines import WITHOUT_WINDOWS
from distca.simulate.charges import Charges
from distca.simulate.flags import megatron_flags
from distca.whole_file import writing
from distca.wording import counted

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

CHARGED = (
    "In all systems links reach {links:.0%} and copies {copies:.0%} of the data sheets' speeds."
    "\nWhile an exchange runs, it takes {interference:.0%} of a GPU's compute."
)
COPY_ENGINES = (
    "DistCA's are puts of the host, which take\nnone, but a launch for each message "
    "(--exchanges copy-engines): measured nowhere."
)
_WIDTH = 40
"""Characters of a line on a bar."""
RANGES = (
    "DistCA over it: DistCA's speed divided by this system's, in these batches. In brackets: the "
    "95%\nconfidence interval of its mean over many batches. An interval that includes 1 means no "
    "clear difference.\nThe interval does not include the simulator's own error. That error was "
    "{error:.1%} in the median\nfor steps on CPUs, and most predicted ratios favoured DistCA."
)
FROM_PARTS = (
    "Planning takes long in this job. So a part stands for DistCA's whole iteration in {parts} of "
    "{batches} batches.\nIn eight of nine such layouts it was 0.1% faster to 1.7% slower than "
    "all of it. With --whole-iterations\nno part stands for an iteration."
)
RATES = (
    "Assumed rates: core attention {attention:g} TFLOP/s forward, linear layers {mfu:.0%} of "
    "{peak:g} TFLOP/s\n(--attention-tflops, --linear-mfu)."
)
MASKS = (
    "In all systems, tokens attend only within their document. In Megatron-LM's "
    "pretraining, tokens attend across documents by default, which takes longer."
)
RING = " The ring is --cp-comm-type p2p, Megatron's default."
UNCHARGED = (
    "Nothing is charged (--baseline-ideal): all links and memories reach their data sheets' speeds."
)


PARTS = {
    "linear": "linear layers, if shared evenly",
    "attention": "core attention, if shared evenly",
    "collectives": "collectives of tensor and expert parallelism",
    "launches": "launches, half-filled waves",
    "copies": "copies around exchanges",
    "interference": "compute slowed down by exchanges",
    "exchanges": "exchanges and reductions that nothing hides",
    "waiting": "imbalance, bubbles, cut documents",
}
"""Titles of the parts of `Breakdown`, in the order of the report."""


def as_json(
    choices: Sequence[Choice], workload: Workload, batches: int, parts: Mapping[str, Breakdown]
) -> dict[str, object]:
    """Returns all figures, as `--json` prints them.

    Args:
        choices: systems, each in its best configuration.
        workload: model, cluster and sizes.
        batches: number of batches that were simulated.
        parts: what an iteration's time is spent on, of each system for which it is known.

    Returns:
        `verdict`, the first line of the report; `use_distca`, null where no difference is clear or
        nothing was compared; sizes of the job; and `systems`, a row for each.
    """
    verdict = Verdict.of(choices)
    return {
        "verdict": verdict.first_line(workload),
        "use_distca": verdict.use_distca,
        "gpus": workload.gpus,
        "cluster": workload.cluster.name,
        "context": workload.context,
        "sequences": workload.sequences,
        "batches": batches,
        "systems": [
            _row(choice, workload, verdict.distca, parts.get(choice.system)) for choice in choices
        ],
    }


def _row(
    choice: Choice, workload: Workload, best: Choice | None, parts: Breakdown | None
) -> dict[str, object]:
    """Returns a row: all figures, and the arguments to train so, null where training cannot.

    Args:
        choice: system in its best configuration.
        workload: model, cluster and sizes.
        best: the fastest of DistCA's, which rows are held against, or None.
        parts: what an iteration's time is spent on; None: it is not known.
    """
    row = asdict(choice)
    # JSON has no NaN.
    row = {name: None if value != value else value for name, value in row.items()}
    row["flags"] = row["distca_over_it"] = None
    row["seconds_by_part"] = None if parts is None else asdict(parts)
    if choice.candidate is None:
        return row
    if best is not None:
        over = asdict(speed_up(best, choice))
        row["distca_over_it"] = {n: None if value != value else value for n, value in over.items()}
    with contextlib.suppress(ValueError):
        make = training_flags if choice.system in DISTCA_SYSTEMS else megatron_flags
        flags = make(choice.candidate, workload)
        row["flags"] = [word for flag in flags for word in flag.split()]
    return row


def format_choices(choices: Sequence[Choice], workload: Workload, batches: int) -> str:
    """Returns the verdict, and the table that it is of, without a newline at the end.

    Args:
        choices: systems, each in its best configuration.
        workload: model, cluster and sizes.
        batches: number of batches that were simulated.
    """
    verdict = Verdict.of(choices)
    lines = [
        verdict.first_line(workload),
        job_line(workload, batches),
        f"{'':30}{'tokens/s':>11}{'s':>9}{'GB a GPU':>10}{'idle':>7}{'waits':>7}"
        f"  {'DistCA over it':24}configuration",
    ]
    for choice in choices:
        title = f"{TITLES[choice.system]:30}"
        if choice.candidate is None:
            lines.append(title + why_not(choice, workload))
            continue
        over = "" if verdict.distca is None else str(speed_up(verdict.distca, choice))
        over = "" if choice is verdict.distca else over
        plain = ": no groups, so plain Megatron" if is_plain(choice) else ""
        lines.append(
            f"{title}{choice.tokens_per_second:>11,.0f}{choice.seconds:>9.3f}"
            f"{choice.memory_gb:>10.1f}{choice.idle:>7.1%}{choice.exposed:>7.1%}  "
            f"{over:24}{choice.candidate}{plain}"
        )
    return "\n".join([*lines, *assumptions(workload, batches, verdict)])


def job_line(workload: Workload, batches: int) -> str:
    """Returns what was simulated."""
    return (
        f"{counted(workload.gpus, 'GPU')} of {workload.cluster.name}, "
        f"{counted(workload.sequences, 'sequence')} of {counted(workload.context, 'token')}, "
        + (
            f"experts shared by {counted(workload.expert_parallel, 'GPU')}, "
            if workload.model.experts
            else ""
        )
        + f"{batches} batch(es); simulated, not measured"
    )


def assumptions(workload: Workload, batches: int, verdict: Verdict) -> list[str]:
    """Returns what the figures mean, and what they rest on, a paragraph each."""
    cluster, charges = workload.cluster, workload.cluster.charges
    gib = cluster.memory_gb * 1e9 / 2**30
    return [
        *(
            [RANGES.format(error=verdict.simulators_error)]
            if batches > 1 and verdict.distca is not None
            else []
        ),
        *(
            [FROM_PARTS.format(parts=verdict.distca.from_parts, batches=batches)]
            if verdict.distca is not None and verdict.distca.from_parts
            else []
        ),
        f"A GPU has {cluster.memory_gb:g} GB ({gib:.{0 if gib >= 10 else 2}f} GiB). "
        f"Training may fill {cluster.usable_bytes / 1e9:g} GB.",
        RATES.format(
            attention=cluster.attention_tflops, mfu=cluster.linear_mfu, peak=cluster.peak_tflops
        ),
        charged_line(charges) + RING * charges.baseline_copies,
        MASKS,
    ]


def format_parts(parts: Mapping[str, Breakdown]) -> str:
    """Returns a table of what iterations' time is spent on, without a newline at the end.

    Args:
        parts: of each system that is shown.
    """
    lines = ["Where the time of an iteration goes, in seconds (first batch):"]
    lines.append(f"{'':48}" + "".join(f"{TITLES[system]:>30}" for system in parts))
    shown = {system: each.as_shown() for system, each in parts.items()}
    for part, title in PARTS.items():
        line = f"  {title:46}"
        for system, each in parts.items():
            seconds = shown[system][part]
            line += f"{seconds:>21.3f}{f'({seconds / each.seconds:.1%})':>9}"
        lines.append(line)
    for system, each in parts.items():
        less = sorted(each.less_for_a_percent().items(), key=lambda item: item[1])
        if system in DISTCA_SYSTEMS and less:
            found = ", or if ".join(
                f'"{PARTS[part]}" took {share:.0%} less' for part, share in less
            )
            lines.append(f'"{TITLES[system]}" would take 1% less time if {found}.')
    return "\n".join(lines)


def why_not(choice: Choice, workload: Workload) -> str:
    """Returns why a system has no configuration."""
    if choice.tried:
        return f"out of memory in all {choice.tried} configurations"
    if choice.system in WITHOUT_WINDOWS and not workload.model.sees_all:
        return "has neither windows nor chunks"
    return "no valid layout divides"


def charged_line(charges: Charges) -> str:
    if not charges.baseline_copies:
        return UNCHARGED
    said = CHARGED.format(
        links=charges.link_efficiency,
        copies=charges.copy_efficiency,
        interference=charges.interference,
    )
    return f"{said} {COPY_ENGINES}" if charges.copy_engines else said


def plot_choices(
    choices: Sequence[Choice], workload: Workload, parts: Mapping[str, Breakdown], path: Path
) -> None:
    """Draws tokens per second and memory of each system, and what time is spent on.

    Args:
        choices: systems, each in its best configuration.
        workload: model, cluster and sizes.
        parts: parts of the time of an iteration of some systems; empty: they are not drawn.
        path: a picture; its suffix says in which format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the suffix is no format that matplotlib can write.
    """
    figure = make_figure(figsize=(11, 0.7 * (len(choices) + 2 * len(parts)) + 2.5 + bool(parts)))
    heights = [len(choices), 2 * len(parts) + 1] if parts else [1]
    above, *below = figure.subfigures(len(heights), squeeze=False, height_ratios=heights).ravel()
    speed, memory = above.subplots(1, 2, sharey=True)
    for each in below:
        _plot_parts(parts, each)
    names = [TITLES[choice.system] for choice in choices]
    # Bars are light enough for black text on them.
    thousands = np.nan_to_num([choice.tokens_per_second for choice in choices]) / 1e3
    speed.barh(names, thousands, color=SKY_BLUE)
    memory.barh(names, np.nan_to_num([choice.memory_gb for choice in choices]), color=ORANGE)
    memory.axvline(workload.cluster.usable_bytes / 1e9, color=BLACK, linestyle="--", linewidth=1.0)
    for number, choice in enumerate(choices):
        text = "out of memory" if choice.candidate is None else str(choice.candidate)
        text = textwrap.fill(
            text, _WIDTH, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False
        )
        speed.text(0, number, text, va="center", fontsize=8)
    speed.invert_yaxis()
    speed.set(xlabel="thousand tokens/s, all GPUs")
    memory.set(xlabel="GB of the busiest GPU (dashed: usable)")
    job = f"{counted(workload.sequences, 'sequence')} of {counted(workload.context, 'token')}"
    above.suptitle(f"{counted(workload.gpus, 'GPU')} of {workload.cluster.name}, {job}: simulated")
    with writing(path) as written:
        figure.savefig(written, dpi=110)


def _plot_parts(parts: Mapping[str, Breakdown], figure: SubFigure) -> None:
    """Draws a bar for each system, with the parts of an iteration one after the other."""
    axes = figure.subplots()
    names = [TITLES[system] for system in parts]
    ends = np.zeros(len(parts))
    for (part, title), colour in zip(PARTS.items(), (*IN_TURN, GREY, PURPLE), strict=True):
        seconds = np.array([each.as_shown()[part] for each in parts.values()])
        axes.barh(names, seconds, left=ends, color=colour, label=title)
        ends = ends + seconds
    axes.invert_yaxis()
    axes.set(xlabel="seconds of an iteration (first batch)")
    figure.legend(fontsize=8, ncols=2, loc="outside lower center")

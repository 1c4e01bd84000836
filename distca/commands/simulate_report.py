"""The report of `distca simulate`: a table, its rows as JSON, and a picture."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from distca.commands.command_line import make_figure
from distca.palette import BLACK, ORANGE, SKY_BLUE
from distca.simulate import DISTCA_SYSTEMS, MEGATRON, Candidate, Choice, Workload, training_flags
from distca.simulate.baselines import WITHOUT_WINDOWS
from distca.simulate.charges import Charges
from distca.simulate.hybrid import HYBRID

TITLES = {
    "packed": "plain Megatron",
    "cp-p2p": "context parallel, ring",
    "cp-a2a": "context parallel, all-to-all",
    "cp-a2a+p2p": "context parallel, a2a+p2p",
    "per-document-cp": "context parallel, all-gather",
    HYBRID: "hybrid context parallel",
    "wlb-llm": "WLB-LLM, ideal",
    "wlb-llm-paper": "WLB-LLM as in the paper",
    "greedy": "DistCA, greedy",
    "tiles": "DistCA, tiles",
}
"""Names of the systems for readers."""
CHARGED = (
    "All are charged alike: links reach {links:.0%} and copies {copies:.0%} of their speed, "
    "exchanges take {interference:.0%} of\ncompute."
)
RING = " The ring is --cp-comm-type p2p, Megatron's default."
UNCHARGED = (
    "Nothing is charged (--baseline-ideal): all links and memories reach their data sheets' speeds."
)


def as_json(choice: Choice, workload: Workload) -> dict[str, object]:
    """Returns a row: all figures, and the arguments to train so, null where training cannot."""
    row = asdict(choice)
    # JSON has no NaN.
    row = {name: None if value != value else value for name, value in row.items()}
    row["flags"] = None
    if choice.system in DISTCA_SYSTEMS and choice.candidate is not None:
        with contextlib.suppress(ValueError):
            flags = training_flags(choice.candidate, workload)
            row["flags"] = [word for flag in flags for word in flag.split()]
    return row


def format_choices(choices: Sequence[Choice], workload: Workload) -> str:
    """Returns the table, and what to expect of DistCA, without a newline at the end."""
    lines = [
        f"{workload.gpus} GPUs of {workload.cluster.name}, {workload.sequences} sequences of "
        f"{workload.context:,} tokens; simulated, not measured",
        f"{'':32}{'tokens/s':>11}{'s':>9}{'GB a GPU':>10}{'idle':>7}{'waits':>7}  configuration",
    ]
    for choice in choices:
        title = f"{TITLES[choice.system]:32}"
        if choice.candidate is None:
            why = (
                f"out of memory in all {choice.tried} configurations"
                if choice.tried
                else "has neither windows nor chunks"
                if choice.system in WITHOUT_WINDOWS and not workload.model.sees_all
                else "no configuration divides"
            )
            lines.append(title + why)
            continue
        lines.append(
            f"{title}{choice.tokens_per_second:>11,.0f}{choice.seconds:>9.3f}"
            f"{choice.memory_gb:>10.1f}{choice.idle:>7.1%}{choice.exposed:>7.1%}  "
            f"{choice.candidate}"
        )
    charges = workload.cluster.charges
    lines.append(charged_line(charges) + RING * charges.baseline_copies)
    return "\n".join([*lines, *_speed_ups(choices)])


def charged_line(charges: Charges) -> str:
    """What is charged."""
    if not charges.baseline_copies:
        return UNCHARGED
    return CHARGED.format(
        links=charges.link_efficiency,
        copies=charges.copy_efficiency,
        interference=charges.interference,
    )


def _speed_ups(choices: Sequence[Choice]) -> list[str]:
    """Lists a line for each system of DistCA: its speed-up over the best of what every user of
    Megatron has, and then over each other system."""
    lines = []
    others = [c for c in choices if c.system not in DISTCA_SYSTEMS]
    had = [c for c in others if c.system in MEGATRON and c.candidate is not None]
    best = max(had, key=lambda choice: choice.tokens_per_second, default=None)
    for choice in choices:
        if choice in others or choice.candidate is None:
            continue
        parts = [
            f"{choice.tokens_per_second / other.tokens_per_second:.2f} times {TITLES[other.system]}"
            if other.candidate is not None
            else f"{TITLES[other.system]} does not fit"
            for other in others
            if other.tried
        ]
        if best is not None:
            gain = choice.tokens_per_second / best.tokens_per_second
            parts.insert(0, f"{gain:.2f} times Megatron's best ({TITLES[best.system]})")
        if parts:
            lines.append(f"{TITLES[choice.system]}: {'; '.join(parts)}")
    return lines


def plot_choices(choices: Sequence[Choice], workload: Workload, path: Path) -> None:
    """Draws tokens per second and memory of each system; the suffix says in which format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the suffix is no format that matplotlib can write.
    """
    figure = make_figure(figsize=(11, 0.7 * len(choices) + 2.5), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [TITLES[choice.system] for choice in choices]
    # Bars are light enough for black text on them.
    thousands = np.nan_to_num([choice.tokens_per_second for choice in choices]) / 1e3
    speed.barh(names, thousands, color=SKY_BLUE)
    memory.barh(names, np.nan_to_num([choice.memory_gb for choice in choices]), color=ORANGE)
    memory.axvline(workload.cluster.usable_bytes / 1e9, color=BLACK, linestyle="--", linewidth=1.0)
    for number, choice in enumerate(choices):
        text = "out of memory" if choice.candidate is None else str(choice.candidate)
        speed.text(0, number, f" {text}", va="center", fontsize=9)
    speed.invert_yaxis()
    speed.set(xlabel="thousand tokens/s, all GPUs")
    memory.set(xlabel="GB of the busiest GPU (dashed: usable)")
    figure.suptitle(f"{workload.gpus} GPUs of {workload.cluster.name}: simulated")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def best_of_distca(choices: Sequence[Choice]) -> Candidate | None:
    """Returns the fastest configuration with `--distca`; None: nothing fits, or none was asked
    for."""
    chosen = [c for c in choices if c.system in DISTCA_SYSTEMS and c.candidate is not None]
    best = max(chosen, key=lambda choice: choice.tokens_per_second, default=None)
    return None if best is None else best.candidate


def how_to_train(choices: Sequence[Choice], workload: Workload) -> list[str]:
    """Lines with the flags of DistCA's best configuration; none where nothing fits."""
    best = best_of_distca(choices)
    if best is None:
        return []
    what = f"{TITLES[best.system]}, on {workload.gpus} GPUs"
    try:
        flags = training_flags(best, workload)
    except ValueError as error:
        return [f"No flags of pretrain_gpt.py for {what}: {error}"]
    return [
        f"Flags of pretrain_gpt.py for {what}, beside those of the model, the data and the "
        "learning rate:",
        format_flags(flags),
    ]


def format_flags(flags: Sequence[str], width: int = 96) -> str:
    """Formats flags for a shell: indented lines, joined by backslashes."""
    lines = [""]
    for flag in flags:
        if lines[-1] and len(lines[-1]) + 1 + len(flag) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {flag}".strip()
    return " \\\n".join(f"    {line}" for line in lines)

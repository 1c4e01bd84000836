"""Reports of `distca plan` and `distca simulate` for inference: tables, JSON and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from distca.commands.command_line import make_figure
from distca.commands.plan_plot import (
    busiest_servers,
    draw_documents,
    legend_of,
    number_servers,
)
from distca.commands.simulate_report import charged_line
from distca.cost.kernel_time import CostModel
from distca.cost.steps import step_bytes
from distca.cost.volume import AttentionShape
from distca.palette import BLUE, ORANGE
from distca.plan import Plan, SteppedPlan
from distca.schedule.serving.report import StepSummary
from distca.simulate import Outcome
from distca.simulate.serving import (
    NO_OVERHEADS,
    PARTS,
    InferenceCosts,
    Overheads,
    SteppedCosts,
)
from distca.whole_file import writing

_MOST_DRAWN = 8
"""Most steps of a picture, the first ones."""
_THOUSAND = 1000


def table(rows: Sequence[Sequence[str]], first: int = 10) -> list[str]:
    """Returns the lines of a table: names on the left, and columns that never touch.

    Args:
        rows: cells, the name of the row first. Rows may have a remark after the columns of row 0.
        first: least width of the names.
    """
    columns = len(rows[0])
    widths = [max(len(row[n]) for row in rows) for n in range(columns)]
    return [
        f"{row[0]:{max(widths[0], first)}}"
        + "".join(f"{row[n]:>{max(widths[n] + 2, 12)}}" for n in range(1, columns))
        + "".join(f"  {remark}" for remark in row[columns:])
        for row in rows
    ]


def title_of(plan: Plan, name: str | None = None) -> str:
    """Returns a line about what is fed; `name` is how the strategy is called, if not by its plan's
    scheduler."""
    cached = 0 if plan.cached_prefix is None else int(plan.cached_prefix.sum())
    groups, new = plan.head_groups, int(plan.lengths.sum()) - cached
    scattered = f", {groups} head groups" if groups > 1 else ""
    return (
        f"{_number(plan.sequences, 'sequence')} on {_number(plan.world_size, 'rank')}: "
        f"{_number(new // groups, 'new token')}, "
        f"{cached // groups:,} cached; {name or plan.scheduler}{scattered}"
    )


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


_COLUMNS = (
    ("tasks", "tasks", 1, 0),
    ("query rows", "query_rows", 1, 0),
    ("key rows", "key_rows", 1, 0),
    ("MB there", "bytes_dispatched", 1e6, 3),
    ("MB back", "bytes_combined", 1e6, 3),
    ("MB sent", "bytes_max_sent", 1e6, 3),
    ("MB recv", "bytes_max_received", 1e6, 3),
    ("max/mean", "load_max_over_mean", 1, 3),
)


def format_plan(
    stepped: SteppedPlan, steps: Sequence[StepSummary], kind: str, name: str | None = None
) -> str:
    """Returns the table of a plan's steps."""
    plan = stepped.plan
    rows = [["step", *(title for title, *_ in _COLUMNS)]]
    for number, step in enumerate(steps):
        cells = (f"{getattr(step, key) / unit:,.{digits}f}" for _, key, unit, digits in _COLUMNS)
        rows.append([str(number), *cells])
    lines = [f"{kind} of {title_of(plan, name)}", *table(rows, 6)]
    if stepped.drops:
        whole, pairs = plan.tasks.pairs(plan.mask), stepped.kept_pairs()
        keys = sum(each.key_rows for each in steps)
        all_keys = sum(each.key_rows / each.kept_keys for each in steps)
        lines.append(
            f"kept, of a layer that drops rows: {pairs.mean(axis=1).sum() / whole.sum():.1%} of "
            f"the pairs, {keys / max(all_keys, 1):.1%} of the keys that travel"
        )
    total = sum(each.bytes_dispatched + each.bytes_combined for each in steps)
    lines.append(
        f"{total / 1e6:,.3f} MB a layer and tensor-parallel rank (rows of a step travel during the "
        "step before; sent, recv: most of a rank)"
    )
    return "\n".join(lines)


def as_json(
    found: Mapping[str, Outcome], strategy: str, choices: Mapping[str, str]
) -> dict[str, object]:
    """Returns all figures of simulated strategies."""
    return {
        "strategy": strategy,
        "fastest": fastest(found),
        "choices": dict(choices),
        "simulated": {
            name: {
                "seconds": outcome.seconds,
                "computed_seconds": outcome.computed.tolist(),
                "exposed_seconds": outcome.exposed.tolist(),
                "spent_seconds": dict(outcome.spent),
                "bytes_sent": {phase: n.tolist() for phase, n in outcome.bytes_sent.items()},
                "memory_bytes": outcome.memory_bytes.tolist(),
                "fits": outcome.fits,
            }
            for name, outcome in found.items()
        },
    }


def fastest(found: Mapping[str, Outcome]) -> str:
    """Returns the name of the strategy that takes least, among those that fit in memory if any
    does."""
    return min(found, key=lambda name: (not found[name].fits, found[name].seconds))


def format_outcomes(
    found: Mapping[str, Outcome], who: str = "rank", chosen: str | None = None
) -> list[str]:
    """Returns the table of strategies, and that of what each one's time is spent on.

    Args:
        found: simulated strategies.
        who: what has tokens, a rank or a GPU.
        chosen: strategy that auto chooses, or None.
    """
    rows = [["", "ms", "computes", "waits", "MB sent", "GB a GPU"]]
    for name, outcome in found.items():
        sent = np.sum([*outcome.bytes_sent.values()], axis=0).max()
        cells = (
            *(1e3 * each for each in (outcome.seconds, outcome.computed.max())),
            *(1e3 * outcome.exposed.max(), sent / 1e6, outcome.memory_bytes.max() / 1e9),
        )
        remarks = {
            "fastest": len(found) > 1 and name == fastest(found),
            "auto": name == chosen,
            "out of memory": not outcome.fits,
        }
        said = ", ".join(what for what, holds in remarks.items() if holds)
        rows.append([name, *(f"{cell:,.2f}" for cell in cells), *([said] if said else [])])
    return [
        *table(rows),
        f"(of the {who} with most. computes: with linear layers and copies; MB sent: by a GPU, in "
        "all layers, without collectives in a rank)",
        *spent_lines(found, who),
    ]


def step_lines(
    chosen: SteppedPlan, costs: InferenceCosts, cost_model: CostModel, name: str
) -> list[str]:
    """Returns the table of a plan's steps, with the seconds of kernels and of links."""
    rows = [["step", "kernels us", "links us", "MB there", "MB back"]]
    stepped_costs = SteppedCosts(chosen, costs.shape, cost_model, costs.links)
    for number, step in enumerate(stepped_costs.steps):
        moved = [step.dispatch.transfer, step.combine.transfer]
        links = sum(max(each.out_seconds.max(), each.in_seconds.max()) for each in moved)
        there, back = (each.bytes_sent.sum() / 1e6 for each in moved)
        cells = 1e6 * float(step.kernel_seconds.max()), 1e6 * links, there, back
        rows.append([str(number), *(f"{cell:,.1f}" for cell in cells)])
    heading = f"{name}, a layer, step by step (MB: of one GPU of each rank, all ranks together):"
    return [heading, *table(rows, 6)]


def spent_lines(found: Mapping[str, Outcome], who: str) -> list[str]:
    """Returns a table of what the last rank's time is spent on, which adds up to the iteration.

    Args:
        found: simulated strategies.
        who: what ranks are called.
    """
    rows = [["", *PARTS]]
    for name, outcome in found.items():
        rows.append([name, *(f"{1e3 * outcome.spent[part]:,.2f}" for part in PARTS)])
    return [f"ms of the {who} that ends last, by part:", *table(rows)]


PUBLISHED_PREFILLS = {"Tetris": (34, "17.9%"), "Meta": (14, "14.4%")}
"""Systems, how many of their prefills were published, and the median error of their predictions by
the commands' own rates and overheads, as benchmarks/results/serving/published.md has them."""


def assumption_lines(
    costs: InferenceCosts, profile: Path | None, overheads: Overheads
) -> list[str]:
    """Returns what a simulation assumes, and how far it may be off.

    Args:
        costs: costs of the model on its cluster.
        profile: file of measured seconds of tasks; None: they are by the cluster's rates.
        overheads: what events cost beside their work.
    """
    cluster = costs.cluster
    rate = f"at {cluster.attention_tflops:g} TFLOP/s (--attention-tflops, or --profile, changes it)"
    by = rate if profile is None else f"as in {profile}"
    lines = [charged_line(cluster.charges), *overhead_lines(overheads)]
    lines.append(f"Attention with many queries runs {by}.")
    if overheads != NO_OVERHEADS:
        errors = " and ".join(
            f"{error} of {number} published prefills of {name}"
            for name, (number, error) in PUBLISHED_PREFILLS.items()
        )
        lines.append(f"Median error: {errors}. No time of DistCA's own was measured on GPUs.")
    return lines


_EVENTS = {
    "iteration_seconds": "an iteration's scheduling and planning",
    "host_layer_seconds": "a host's launches of a layer",
    "layer_seconds": "gaps between a layer's kernels",
    "collective_seconds": "a collective",
    "hop_seconds": "each doubling of its nodes",
    "step_seconds": "a step of a ring",
    "exchange_seconds": "an exchange",
}


def overhead_lines(overheads: Overheads) -> list[str]:
    """Returns what events cost beside their work; nothing where they cost nothing."""
    found = {what: 1e3 * getattr(overheads, name) for name, what in _EVENTS.items()}
    said = [f"{what} {ms:.3g}" for what, ms in found.items() if ms]
    return [f"Overheads in ms: {', '.join(said)}."] if said else []


def plot_steps(stepped: SteppedPlan, shape: AttentionShape, path: Path) -> None:
    """Draws each step's tasks by server, and each rank's bytes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plan, shown = stepped.plan, min(stepped.steps, _MOST_DRAWN)
    figure = make_figure(figsize=(4 * shown + 1, 7))
    axes = figure.subplots(2, shown, squeeze=False, sharey="row", height_ratios=[3, 1])
    ranks, moved = np.arange(plan.world_size), step_bytes(stepped, shape)
    highlighted = busiest_servers(plan)
    queries = plan.tasks.q_start.min() / _THOUSAND, plan.tasks.q_end.max() / _THOUSAND
    for number in range(shown):
        tasks, rows = axes[0, number], axes[1, number]
        draw_documents(tasks, stepped.select(stepped.step == number).plan, highlighted)
        tasks.set(title=f"step {number}", ylim=queries[::-1], xlabel="keys, thousand tokens")
        rows.bar(ranks - 0.2, moved[number].sent() / 1e6, width=0.4, label="sent", color=BLUE)
        rows.bar(
            ranks + 0.2, moved[number].received() / 1e6, width=0.4, label="received", color=ORANGE
        )
        rows.set(xlabel="rank")
        number_servers(rows, plan.world_size)
        if number:
            tasks.set_ylabel("")
    axes[0, 0].set_ylabel("queries, thousand tokens")
    axes[1, 0].set_ylabel("MB a layer")
    axes[1, 0].legend()
    figure.suptitle(f"{title_of(plan)}\n{legend_of(plan, highlighted)}")
    with writing(path) as written:
        figure.savefig(written, dpi=110)

"""Draws the picture of docs/shared_prefixes.md: trees of a batch, and who owns and computes what.

python docs/plot_trees.py docs/figures/trees.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distca.cost.model_sizes import MODELS
from distca.palette import server_colours
from distca.plan import Mask, Plan
from distca.plan.paths import Paths
from distca.schedule import ScheduleConfig, TilesScheduler, even_capacities

_RANKS, _THOUSAND = 4, 1000
_OWN = [8192, *[2048] * 6, 4096, 2048, 1024, 2048, 1024, 3072, 2048]
"""Tokens of each node: a prompt with six answers, and a conversation that branches."""
_PARENTS = [-1, *[0] * 6, -1, 7, 8, 9, 8, 7, 12]


def plan_of_trees() -> Plan:
    """The plan in the picture."""
    paths = Paths.of(np.array(_OWN), np.array(_PARENTS))
    config = ScheduleConfig(0.05, MODELS["llama-8b"].attention_shape(1, 2))
    capacities = even_capacities(sum(_OWN), _RANKS)
    return TilesScheduler(config).plan(paths.lengths, capacities, Mask(), *paths.family)


def draw_owners(axes: Axes, plan: Plan, colours: np.ndarray) -> None:
    """Draws each document as a bar, from where it branches off, by the owners of its tokens."""
    assert plan.parents is not None
    assert plan.cached_prefix is not None
    p = plan.placement
    axes.barh(
        p.document,
        (p.end - p.start) / _THOUSAND,
        0.8,
        p.start / _THOUSAND,
        color=colours[p.rank],
        edgecolor="white",
        linewidth=0.6,
    )
    for document, parent in enumerate(plan.parents.tolist()):
        at = plan.cached_prefix[document] / _THOUSAND
        if parent >= 0:
            axes.plot([at, at], [parent, document], color="black", linewidth=0.8, zorder=0)
    axes.invert_yaxis()
    axes.set(yticks=[], xlabel="position on the path, thousand tokens")
    axes.set_title("trees: who owns the tokens")


def draw_tasks(axes: Axes, plan: Plan, colours: np.ndarray) -> None:
    """Draws what each query sees, by the server that computes it; tokens in the order of nodes."""
    t, keys = plan.tasks, plan.key_ranges
    shapes = []
    # Where the keys of each range lie on the path: ranges of a task follow each other.
    before = t.kv_start.copy()
    columns = keys.task, keys.start, keys.end
    for task, start, end in zip(*(each.tolist() for each in columns), strict=True):
        first, last = int(t.q_start[task]), int(t.q_end[task])
        low = int(before[task])
        before[task] += end - start
        high, shift = int(before[task]), start - low
        down = int(plan.query_offsets[t.document[task]])
        corner = high
        if t.ends_on_diagonal[task] and high > first:
            first, corner = max(first, low), max(first, low)
        corners = [(low, first), (corner, first), (high, last), (low, last)]
        shapes.append([(key + shift, query + down) for key, query in corners])
    axes.add_collection(
        PolyCollection(
            list(np.array(shapes) / _THOUSAND),
            facecolors=colours[t.server[keys.task]],
            edgecolors="white",
            linewidths=0.4,
        )
    )
    total = sum(_OWN) / _THOUSAND
    axes.set(xlim=(0, total), ylim=(total, 0), aspect="equal")
    axes.set(xlabel="keys, thousand tokens", ylabel="queries, thousand tokens")
    axes.set_title("core attention: who computes it")


def draw(path: Path) -> None:
    """Draws both; the file's suffix says in which format."""
    plan, colours = plan_of_trees(), server_colours(_RANKS, range(_RANKS))
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    draw_owners(left, plan, colours)
    draw_tasks(right, plan, colours)
    loads = plan.loads() / plan.loads().mean()
    names = [f"rank {rank}: {load:.2f} times the mean load" for rank, load in enumerate(loads)]
    handles = [Patch(color=colour, label=name) for colour, name in zip(colours, names, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("picture", type=Path)
    draw(parser.parse_args(argv).picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())

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

from distca.commands.tree_sections import TreeShapes, tree_shapes
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


def draw_owners(axes: Axes, shapes: TreeShapes, colours: np.ndarray) -> None:
    """Draws each document as a bar, from where it branches off, by the owners of its tokens."""
    row, start, end, rank = shapes.bars.T
    axes.barh(
        row,
        (end - start) / _THOUSAND,
        0.8,
        start / _THOUSAND,
        color=colours[rank],
        edgecolor="white",
        linewidth=0.6,
    )
    for position, parent, child in shapes.branches.tolist():
        at = position / _THOUSAND
        axes.plot([at, at], [parent, child], color="black", linewidth=0.8, zorder=0)
    axes.invert_yaxis()
    axes.set(yticks=[], xlabel="position on the path, thousand tokens")
    axes.set_title("trees: who owns the tokens")


def draw_tasks(axes: Axes, shapes: TreeShapes, colours: np.ndarray) -> None:
    """Draws what each query sees, by the server that computes it; tokens in the order of nodes."""
    axes.add_collection(
        PolyCollection(
            list(shapes.corners / _THOUSAND),
            facecolors=colours[shapes.servers],
            edgecolors="white",
            linewidths=0.4,
        )
    )
    total = shapes.tokens / _THOUSAND
    axes.set(xlim=(0, total), ylim=(total, 0), aspect="equal")
    axes.set(xlabel="keys, thousand tokens", ylabel="queries, thousand tokens")
    axes.set_title("core attention: who computes it")


def draw(path: Path) -> None:
    """Draws both; the file's suffix says in which format."""
    plan, colours = plan_of_trees(), server_colours(_RANKS, range(_RANKS))
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    shapes = tree_shapes(plan)
    draw_owners(left, shapes, colours)
    draw_tasks(right, shapes, colours)
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

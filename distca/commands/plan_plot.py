"""A picture of a plan: tasks coloured by server, loads and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distca.commands.command_line import make_figure
from distca.cost.volume import plan_bytes
from distca.palette import BLUE, ORANGE, spread_colours
from distca.plan import Plan
from distca.plan.span import Floats
from distca.schedule.base import ScheduleConfig, relative_loads, server_loads
from distca.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_DOCUMENTS = 400
"""Most documents that are drawn, the longest."""
_EDGED = 0.1
"""Part of the longest document's length above which tasks are drawn with edges."""
_THOUSAND = 1000


def plot_plan(plan: Plan, config: ScheduleConfig, path: Path) -> None:
    """Draws a plan, in the format of the file's suffix.

    Above is every task as the rectangle of its queries (down) and keys (across) in the colour of
    its server, cut off at the diagonal; documents are sorted by length. Below are each server's
    load over the mean, and the bytes that it sends and receives.

    Args:
        plan: a valid plan.
        config: configuration by which loads and bytes are measured.
        path: picture to write.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the suffix is no format that matplotlib can write.
    """
    figure = make_figure(figsize=(12, 9), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=[3, 1, 1])
    draw_documents(figure.add_subplot(grid[0]), plan)
    servers = np.arange(plan.world_size)
    relative = draw_loads(figure.add_subplot(grid[1]), plan, config)
    moved = plan_bytes(plan, config.shape).forward()
    axes = figure.add_subplot(grid[2])
    axes.bar(servers - 0.2, moved.sent() / 1e6, width=0.4, label="sent", color=BLUE)
    axes.bar(servers + 0.2, moved.received() / 1e6, width=0.4, label="received", color=ORANGE)
    axes.set(xlabel="server", ylabel="MB a layer, forward", xlim=(-0.5, plan.world_size - 0.5))
    axes.legend()
    sizes = [
        counted(len(plan.lengths), "document"),
        counted(len(plan.tasks), "task"),
        counted(plan.world_size, "server"),
    ]
    figure.suptitle(
        f"{plan.scheduler}: {', '.join(sizes)}; max/mean {relative.max():.3f}, "
        f"{moved.total / 1e9:.3f} GB"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_loads(axes: Axes, plan: Plan, config: ScheduleConfig) -> Floats:
    """Draws each server's load over the mean, in its colour, and the limit of the tolerance.

    Returns:
        The loads over the mean, float64 `[servers]`.
    """
    count = plan.world_size
    loads = server_loads(plan.tasks, plan.mask, count, config.cost_model)
    relative = relative_loads(loads, config.speeds_of(count))
    axes.bar(np.arange(count), relative, width=0.9, color=spread_colours(count))
    axes.axhline(1 + config.tolerance, color="black", linewidth=1.0, linestyle="--")
    axes.set(ylabel="load / mean", xlim=(-0.5, count - 0.5))
    return relative


def draw_documents(axes: Axes, plan: Plan) -> None:
    """Draws the tasks of the longest documents, which follow each other across the page."""
    from matplotlib.collections import PolyCollection

    longest = np.lexsort((np.arange(len(plan.lengths)), -plan.lengths))[:_MOST_DOCUMENTS]
    left = np.full(len(plan.lengths), -1.0)
    left[longest] = np.cumsum(plan.lengths[longest]) - plan.lengths[longest]
    tasks = plan.tasks[left[plan.tasks.document] >= 0]
    first = left[tasks.document]
    corner = np.where(tasks.ends_on_diagonal, tasks.q_start, tasks.kv_end)
    shapes = np.stack(
        [
            np.stack([first + tasks.kv_start, tasks.q_start], axis=1),
            np.stack([first + corner, tasks.q_start], axis=1),
            np.stack([first + tasks.kv_end, tasks.q_end], axis=1),
            np.stack([first + tasks.kv_start, tasks.q_end], axis=1),
        ],
        axis=1,
    )
    shapes /= _THOUSAND
    colours = spread_colours(plan.world_size)[tasks.server]
    # White edges separate tasks of similar colours, but would hide those of short documents.
    tall = plan.lengths[tasks.document] > _EDGED * plan.lengths.max()
    edges = np.where(tall[:, None], 1.0, colours)
    axes.add_collection(
        PolyCollection(list(shapes), facecolors=colours, edgecolors=edges, linewidths=0.3)
    )
    axes.set(
        xlim=(0, float(plan.lengths[longest].sum() / _THOUSAND)),
        ylim=(float(plan.lengths.max() / _THOUSAND), 0),
        xlabel="keys, thousand tokens (documents one after the other, the longest first)",
        ylabel="queries, thousand tokens",
    )

"""A picture of a plan: tasks by server, loads and bytes.

A few servers, the busiest, have colours of their own; the others are grey. Large tasks show the
number of their server.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distca.commands.command_line import make_figure
from distca.cost.volume import plan_bytes
from distca.palette import BLACK, BLUE, HIGHLIGHTS, ORANGE, server_colours
from distca.plan import Plan
from distca.plan.span import Floats, Int64s
from distca.plan.tasks import Tasks
from distca.schedule.base import ScheduleConfig, relative_loads, server_loads
from distca.whole_file import writing
from distca.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_DOCUMENTS = 400
"""Most documents that are drawn, the longest."""
_EDGED = 0.1
"""Part of the longest document's length above which tasks are drawn with edges."""
_THOUSAND = 1000
_TALL, _WIDE = 0.05, 0.016
"""Part of the axes' height that a task's number needs, and of their width that a digit needs."""
_LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
"""Weights of red, green and blue in the brightness of a colour."""
_MOST_NUMBERED = 32
"""Most servers whose numbers are all written below their bars."""


def busiest_servers(plan: Plan) -> list[int]:
    """Returns the servers to highlight: all if each can have a colour, else four, busiest first."""
    if plan.world_size <= len(HIGHLIGHTS):
        return list(range(plan.world_size))
    return np.argsort(-plan.loads(), kind="stable")[: len(HIGHLIGHTS) - 1].tolist()


def plot_plan(plan: Plan, config: ScheduleConfig, path: Path) -> None:
    """Draws a plan, in the format of the file's suffix.

    Above is every task as the rectangle of its queries (down) and keys (across), cut off at the
    diagonal; documents are sorted by length. Below are each server's load over the mean, and the
    bytes that it sends and receives.

    Args:
        plan: a valid plan.
        config: configuration by which loads and bytes are measured.
        path: picture to write.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the suffix is no format that matplotlib can write.
    """
    figure = make_figure(figsize=(12, 9))
    grid = figure.add_gridspec(3, 1, height_ratios=[3, 1, 1])
    highlighted = busiest_servers(plan)
    above = figure.add_subplot(grid[0])
    draw_documents(above, plan, highlighted)
    above.set_title(legend_of(plan, highlighted), fontsize=10)
    servers = np.arange(plan.world_size)
    relative = draw_loads(figure.add_subplot(grid[1]), plan, config, highlighted)
    moved = plan_bytes(plan, config.shape).forward()
    axes = figure.add_subplot(grid[2])
    axes.bar(servers - 0.2, moved.sent() / 1e6, width=0.4, label="sent", color=BLUE)
    axes.bar(servers + 0.2, moved.received() / 1e6, width=0.4, label="received", color=ORANGE)
    axes.set(xlabel="server", ylabel="MB a layer, forward")
    number_servers(axes, plan.world_size)
    axes.legend()
    sizes = [
        counted(len(plan.lengths), "document"),
        counted(len(plan.tasks), "task"),
        counted(plan.world_size, "server"),
    ]
    figure.suptitle(
        f"{plan.scheduler}: {', '.join(sizes)} with {relative.min():.2f} to {relative.max():.2f} "
        f"times the mean load; {moved.total / 1e9:.3f} GB a layer, forward"
    )
    with writing(path) as written:
        figure.savefig(written, dpi=120)


def legend_of(plan: Plan, highlighted: Sequence[int]) -> str:
    """Says what numbers and colours in the tasks mean."""
    if len(highlighted) == plan.world_size:
        return "numbers and colours: the server that computes a task"
    return f"numbers: the server that computes a task; in colour: the {len(highlighted)} busiest"


def number_servers(axes: Axes, count: int) -> None:
    """Makes the horizontal axis one of servers, with whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.5, count - 0.5)
    if count <= _MOST_NUMBERED:
        axes.set_xticks(range(count))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_loads(
    axes: Axes, plan: Plan, config: ScheduleConfig, highlighted: Sequence[int]
) -> Floats:
    """Draws each server's load over the mean, and the limit of the tolerance.

    Args:
        axes: axes to draw in.
        plan: a valid plan.
        config: configuration by which loads are measured.
        highlighted: servers with a colour of their own.

    Returns:
        The loads over the mean, float64 `[servers]`.
    """
    count = plan.world_size
    loads = server_loads(plan.tasks, plan.mask, count, config.cost_model)
    relative = relative_loads(loads, config.speeds_of(count))
    axes.bar(np.arange(count), relative, width=0.9, color=server_colours(count, highlighted))
    axes.axhline(1 + config.tolerance, color=BLACK, linewidth=1.0, linestyle="--")
    axes.annotate(
        f"mean + {config.tolerance:.0%} (tolerance)",
        (1, 1 + config.tolerance),
        (-3, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
    )
    axes.set(ylabel="load / mean")
    # Room for the words, and for the bars of axes that share this one.
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.15 * (1 + config.tolerance)))
    number_servers(axes, count)
    return relative


def shapes_of_tasks(plan: Plan) -> tuple[Int64s, Tasks, Floats]:
    """Returns the longest documents, the longest first, their tasks, and the corners of each task.

    Documents follow each other across the page. A corner is a key and a query in tokens, and the
    corners are `[tasks, 4, 2]`: where keys and queries begin, where the first query's keys end,
    where keys and queries end, and where the last query's keys begin.
    """
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
    return longest, tasks, shapes


def draw_documents(axes: Axes, plan: Plan, highlighted: Sequence[int]) -> None:
    """Draws the tasks of the longest documents, which follow each other across the page.

    Args:
        axes: axes to draw in.
        plan: a valid plan.
        highlighted: servers with a colour of their own.
    """
    from matplotlib.collections import PolyCollection

    longest, tasks, shapes = shapes_of_tasks(plan)
    shapes /= _THOUSAND
    colours = server_colours(plan.world_size, highlighted)[tasks.server]
    # White edges separate tasks of one colour, but would hide those of short documents.
    tall = plan.lengths[tasks.document] > _EDGED * plan.lengths.max()
    edges = np.where(tall[:, None], 1.0, colours)
    axes.add_collection(
        PolyCollection(list(shapes), facecolors=colours, edgecolors=edges, linewidths=0.6)
    )
    width, height = plan.lengths[longest].sum() / _THOUSAND, plan.lengths.max() / _THOUSAND
    axes.set(
        xlim=(0, float(width)),
        ylim=(float(height), 0),
        xlabel="keys, thousand tokens (documents one after the other, the longest first)",
        ylabel="queries, thousand tokens",
    )
    # The means of the corners lie within the tasks.
    middles, mean_widths = shapes.mean(axis=1), shapes[:, 1:3, 0].mean(axis=1) - shapes[:, 0, 0]
    heights = shapes[:, 2, 1] - shapes[:, 0, 1]
    digits = 1 + np.floor(np.log10(np.maximum(tasks.server, 1)))
    shown = (heights > _TALL * height) & (mean_widths > _WIDE * digits * width)
    for number in np.flatnonzero(shown).tolist():
        x, y = middles[number].tolist()
        axes.text(
            x,
            y,
            str(tasks.server[number]),
            color=BLACK if colours[number, :3] @ _LUMINANCE > 0.4 else "white",
            ha="center",
            va="center",
            fontsize=8,
        )

"""A picture of a plan: documents x keys coloured by server, loads and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distca.cost.volume import plan_bytes
from distca.plan import Plan
from distca.schedule.base import ScheduleConfig, relative_loads, server_loads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_DOCUMENTS = 400
"""Documents that are drawn: the longest."""


def plot_plan(plan: Plan, config: ScheduleConfig, path: Path) -> None:
    """Draws a plan; the file's suffix says in which format.

    Above, every task as the rectangle of its queries (down) and keys (across) in the colour of its
    server, documents in order of their length; what a query does not see is cut off at the
    diagonal. Below, each server's load over the mean and the bytes that it sends and receives.

    Args:
        plan: a valid plan.
        config: what loads and bytes are judged by.
        path: the picture.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the suffix is no format that matplotlib can write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'distca[plot]'") from error
    figure = Figure(figsize=(12, 9), layout="constrained")
    grid = figure.add_gridspec(3, 1, height_ratios=[3, 1, 1])
    _draw_documents(figure.add_subplot(grid[0]), plan)
    servers = np.arange(plan.world_size)
    loads = server_loads(plan.tasks, plan.mask, plan.world_size, config.cost_model)
    relative = relative_loads(loads, config.speeds_of(plan.world_size))
    axes = figure.add_subplot(grid[1])
    axes.bar(servers, relative, width=1.0, color=_colours(plan.world_size))
    axes.axhline(1 + config.tolerance, color="black", linewidth=0.8, linestyle="--")
    axes.set(ylabel="load / mean", xlim=(-0.5, plan.world_size - 0.5))
    moved = plan_bytes(plan, config.shape).forward()
    axes = figure.add_subplot(grid[2])
    axes.bar(servers - 0.2, moved.sent() / 1e6, width=0.4, label="sent")
    axes.bar(servers + 0.2, moved.received() / 1e6, width=0.4, label="received")
    axes.set(xlabel="server", ylabel="MB a layer, forward", xlim=(-0.5, plan.world_size - 0.5))
    axes.legend()
    figure.suptitle(
        f"{plan.scheduler}: {len(plan.lengths):,} documents, {len(plan.tasks):,} tasks, "
        f"{plan.world_size} servers; max/mean {relative.max():.3f}, {moved.total / 1e9:.3f} GB"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _colours(servers: int) -> Any:
    """One colour for each server; neighbours differ."""
    import matplotlib

    order = np.arange(servers) * 0.618034 % 1.0
    return matplotlib.colormaps["hsv"](order)


def _draw_documents(axes: Axes, plan: Plan) -> None:
    """The tasks of the longest documents, one document after the other across the page."""
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
    colours = _colours(plan.world_size)[tasks.server]
    axes.add_collection(PolyCollection(list(shapes), facecolors=colours, edgecolors="none"))
    axes.set(
        xlim=(0, float(plan.lengths[longest].sum())),
        ylim=(float(plan.lengths.max()), 0),
        xlabel="keys (documents one after the other, the longest first)",
        ylabel="queries",
    )

"""Draws the README's picture: the same documents planned by packed and by tiles, side by side.

python docs/plot_packed_beside_tiles.py docs/figures/packed_beside_tiles.png

Documents, servers and model are those of docs/concepts.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from distca.commands.plan_plot import busiest_servers, draw_documents, draw_loads
from distca.cost.model_sizes import MODELS
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.plan import Mask, Plan
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler

_SERVERS, _TOKENS = 16, 65_536
_TITLES = {
    "packed": "Packed: attention stays where its tokens are",
    "tiles": "DistCA: attention is shared out",
}


def plans(config: ScheduleConfig) -> list[Plan]:
    """The plans of all schedulers in the picture, for the same documents."""
    lengths = draw(DISTRIBUTIONS["pretrain"], _SERVERS * _TOKENS, seed=1)
    capacities = even_capacities(int(lengths.sum()), _SERVERS, _TOKENS)
    return [make_scheduler(name, config).plan(lengths, capacities, Mask()) for name in _TITLES]


def draw_beside(config: ScheduleConfig, path: Path) -> None:
    """Draws documents above and balance below, a scheduler in each column.

    Args:
        config: what plans are judged by.
        path: the picture; its suffix says in which format.
    """
    figure = Figure(figsize=(10, 5.8), layout="constrained")
    made = plans(config)
    # The same servers in both columns, so that one sees where their work goes.
    highlighted = busiest_servers(made[0])
    documents, loads = figure.subplots(2, 2, sharey="row", height_ratios=[1.3, 1])
    for above, below, plan in zip(documents, loads, made, strict=True):
        draw_documents(above, plan, highlighted)
        relative = draw_loads(below, plan, config, highlighted)
        above.set_title(_TITLES[plan.scheduler], fontsize=12, fontweight="bold")
        above.set(xlabel="documents, the longest first (keys, thousand tokens)")
        below.set_title(
            f"servers compute {relative.min():.2f} to {relative.max():.2f} times the mean"
        )
        below.set(xlabel="attention servers")
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.xaxis.label.set_size(11)
            axes.yaxis.label.set_size(11)
    for axes in (documents[1], loads[1]):
        axes.set(ylabel="")
    figure.savefig(path, dpi=160)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("picture", type=Path)
    path = parser.parse_args(argv).picture
    draw_beside(ScheduleConfig(tolerance=0.1, shape=MODELS["llama-8b"].attention_shape(1, 2)), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

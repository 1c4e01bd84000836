"""The strategy `tiles`: prompts stay on one rank each, and all ranks share their attention.

With data-parallel attention a rank computes the layers of its own prompts, and keeps their keys and
values. Where ranks wait for each other in every layer, all of them wait for the longest prompt.
Here each rank computes the linear layers of its own prompts, too, but tiles of core attention move
from ranks that have much to ranks that have little, by the scheduler of training's `tiles`.

* *Owners.* New tokens and cached ones stay where they are. If a prefix lies on another rank than
  the new tokens, as where a conversation goes on elsewhere, either its keys travel or the new
  queries, whichever has fewer bytes.
* *Load.* Seconds of core attention by the cost model. Decoded tokens of the same iteration count,
  and do not move.
* *Charge.* Tiles move only if that is predicted to save more than the exchange takes: two messages,
  and the time of the busiest link, as far as kernels do not hide it. So nothing moves where all
  prompts are short.
* *Nodes.* On several nodes tiles move inside a node first, and between nodes only what nodes differ
  by. Whoever computed a tile, the owner of its prompt sends its rows, and its link is charged.
  Ranks that wait for rows of other nodes get less, if that ends sooner.
* *Steps.* A rank computes what it has all rows of, while the rows of the tiles travel. Tiles from
  other nodes are computed last (`tile_steps.py`).

Whether tiles move is decided for each mask of the layers. Under a window loads follow the numbers
of tokens, and hardly any move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from distca.plan import Mask, Placement, Plan, SteppedPlan, Tasks
from distca.plan.span import Floats
from distca.schedule.base import ScheduleConfig, level_load, task_loads, tasks_at_home
from distca.schedule.serving.rings import tasks_of, visible_pieces
from distca.schedule.serving.steps import step_tokens
from distca.schedule.serving.tile_steps import in_steps, predicted_seconds, seconds_apart
from distca.schedule.tiles.scheduler import move_tiles

NAME: Literal["tiles"] = "tiles"

_BETWEEN_NODES = 0.04
"""Part of the mean by which a rank's attention may exceed it before tiles leave a node."""

_LONG = 8192
"""Queries and keys of a task whose kernel runs at its highest rate."""


@dataclass(frozen=True)
class BalancedTiles:
    """A strategy of prefills: attention moves in tiles from ranks with much of it to others.

    Attributes:
        config: tolerance, heads, links and blocks of the tiles. It has a cost model, since loads
            are compared with seconds of links.
        latency: seconds of an exchange, beside those of its bytes.

    Raises:
        ValueError: there is no cost model.
    """

    config: ScheduleConfig
    latency: float

    def __post_init__(self) -> None:
        if self.config.cost_model is None:
            raise ValueError("tiles of prompts are moved by seconds: give a cost model")

    def plan(
        self, held: Placement, new: Placement, mask: Mask, busy: Floats | None = None
    ) -> SteppedPlan:
        """Plans the layers of a mask.

        Args:
            held: ranks that hold the keys and values of earlier tokens of the sequences.
            new: owners of the new tokens.
            mask: attention mask of the layers.
            busy: seconds in which each rank computes decoded tokens' attention, `[ranks]`, or None.
        """
        lengths, prefix, placement = step_tokens(held, new, mask)
        tasks = self._home_tasks(placement, new, mask)
        home = Plan(lengths, placement, tasks, mask, self.config.block, NAME, (), prefix)
        stays = in_steps(home, self.config)
        waits = np.zeros(new.world_size) if busy is None else busy
        if not self._may_gain(home, waits):
            return stays
        moved = (in_steps(each, self.config) for each in self._moved(home, waits, new))
        return min([stays, *moved], key=lambda each: self.seconds(each, waits))

    def seconds(self, stepped: SteppedPlan, busy: Floats) -> float:
        """Predicts the seconds of a layer's core attention, until the last rank is done.

        Args:
            stepped: a plan that `plan` made.
            busy: as for `plan`.
        """
        return predicted_seconds(stepped, self.config, self.latency, busy)

    def _may_gain(self, home: Plan, busy: Floats) -> bool:
        """Returns whether any move may save more than it takes, where nothing travels before.

        No rank is done before all are if they are busy equally long, and two exchanges take their
        latency, whatever moves.
        """
        return self._surplus(home, busy) > 2 * self.latency

    def _surplus(self, plan: Plan, busy: Floats) -> float:
        """Seconds by which the busiest rank exceeds what all had if they were busy equally long."""
        ranks = plan.world_size
        loads, speeds = self._loads(plan.tasks, plan.mask, ranks), self.config.speeds_of(ranks)
        return float((loads + busy).max()) - level_load(float((loads * speeds).sum()), speeds, busy)

    def _moved(self, home: Plan, busy: Floats, new: Placement) -> list[Plan]:
        """Moves tiles between all ranks; or on several nodes of several ranks inside of each, and
        then what nodes differ by."""
        ranks, of_node = home.world_size, self.config.links.ranks_per_node
        if of_node == 1 or ranks <= of_node:
            return [move_tiles(home, self.config, busy)]
        inside = move_tiles(home, self.config, busy, np.arange(ranks) // of_node)
        wider = replace(self.config, tolerance=_BETWEEN_NODES)
        if not self._pays_between_nodes(self._surplus(inside, busy)):
            return [inside]
        # Rows come from their owner, whoever computed the tile inside the node.
        sources = np.zeros(len(home.lengths), dtype=np.int64)
        sources[new.document] = new.rank
        both = move_tiles(inside, wider, busy, sources=sources)
        # Until tiles of other nodes arrive, ranks compute what they have without these.
        own = self._loads(inside.tasks, inside.mask, ranks)
        waits = seconds_apart(in_steps(both, self.config), self.config, own)
        return [inside, both, move_tiles(inside, wider, busy + waits, sources=sources)]

    def _pays_between_nodes(self, surplus: float) -> bool:
        """Returns whether rows between nodes travel for less time than their attention takes.

        A tile that takes long has fewer bytes a second of it than a short one. So a tile is taken
        whose attention takes all that the busiest rank has above the mean.

        Args:
            surplus: seconds by which the busiest rank's attention exceeds the mean.
        """
        shape, cost_model = self.config.shape, self.config.cost_model
        assert cost_model is not None
        side = np.array([_LONG])
        pairs = surplus * _LONG**2 / float(cost_model.seconds(side, side, side * side)[0])
        nbytes = 2 * (pairs * shape.round_trip_bytes * shape.moved_kv_row_bytes) ** 0.5
        return nbytes * 1e-9 / self.config.links.network_gb_per_s < surplus

    def _loads(self, tasks: Tasks, mask: Mask, ranks: int) -> Floats:
        """Seconds of each rank's tasks, `[ranks]`."""
        each = task_loads(tasks, mask, self.config.cost_model)
        total = np.bincount(tasks.server, weights=each, minlength=ranks)
        return total / self.config.speeds_of(ranks)

    def _home_tasks(self, placement: Placement, new: Placement, mask: Mask) -> Tasks:
        """Makes the tasks of queries at home. Where all new tokens of a sequence are on one rank,
        they go to the keys of another that holds earlier ones, if that takes fewer bytes."""
        home = tasks_at_home(new, mask)
        if mask.window_left is not None or mask.attention_chunk is not None:
            return home
        owner = np.zeros(int(new.document.max()) + 1, dtype=np.int64)
        owner[new.document] = new.rank
        elsewhere = np.bincount(placement.document, placement.rank != owner[placement.document])
        apart = (np.bincount(new.document) == 1) & (elsewhere > 0)
        if not apart.any():
            return home
        keys, queries = (each.select(apart[each.document]) for each in (placement, new))
        q, kv = visible_pieces(keys, queries)
        of_queries = (queries.end - queries.start)[q] * self.config.shape.round_trip_bytes
        of_keys = (keys.end - keys.start)[kv] * self.config.shape.moved_kv_row_bytes
        server = np.where(of_queries < of_keys, keys.rank[kv], queries.rank[q])
        tasks = tasks_of(keys, queries, q, kv, server)
        return Tasks.concatenate([home[~apart[home.document]], tasks])

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
* *Nodes.* On several nodes tiles move inside a node first. Between nodes a rank's keys would take
  longer than many kernels, so few tiles leave a node.
* *Steps.* In step 0 a rank computes what it has all rows of, while the rows of the tiles travel,
  which are computed in step 1.

Whether tiles move is decided for each mask of the layers. Under a window loads follow the numbers
of tokens, and hardly any move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from distca.cost.step_bytes import stepped_bytes
from distca.cost.volume import PlanBytes
from distca.plan import Mask, Placement, Plan, SteppedPlan, Tasks
from distca.plan.span import Bools, Floats
from distca.schedule.base import ScheduleConfig, level_load, task_loads, tasks_at_home
from distca.schedule.serving.rings import tasks_of, visible_pieces
from distca.schedule.serving.steps import step_tokens
from distca.schedule.tiles.scheduler import move_tiles

NAME: Literal["tiles"] = "tiles"

_BETWEEN_NODES = 0.2
"""Part of the mean by which a rank's attention may exceed it before tiles leave a node."""


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
        stays = _in_two_steps(home)
        waits = np.zeros(new.world_size) if busy is None else busy
        loads = self._loads(home.tasks, mask, new.world_size)
        speeds = self.config.speeds_of(new.world_size)
        level = level_load(float((loads * speeds).sum()), speeds, waits)
        # No plan saves more than the rest.
        if float((loads + waits).max()) - level <= 2 * self.latency:
            return stays
        plans = [stays, *map(_in_two_steps, self._moved(home, waits))]
        return min(plans, key=lambda each: self.seconds(each, waits))

    def seconds(self, stepped: SteppedPlan, busy: Floats) -> float:
        """Predicts the seconds of a layer's core attention, until the last rank is done.

        Args:
            stepped: a plan that `plan` made.
            busy: as for `plan`.
        """
        plan, away = stepped.plan, ~_at_home(stepped.plan)
        ranks = plan.world_size
        first = self._loads(plan.tasks[~away], plan.mask, ranks)
        if not away.any():
            return float((first + busy).max())
        moved = stepped_bytes(stepped, self.config.shape).messages
        dispatch, combine = (
            self.latency + self.config.links.busy_seconds(PlanBytes({phase: moved[phase]}))
            for phase in ("dispatch", "combine")
        )
        # Rows travel during the first step, if there is one.
        begins = np.maximum(first, dispatch)
        second = self._loads(plan.tasks[away], plan.mask, ranks)
        return float((begins + second + busy).max() + combine.max())

    def _moved(self, home: Plan, busy: Floats) -> list[Plan]:
        """Moves tiles between all ranks; or on several nodes of several ranks inside of each, and
        then what nodes differ by, if that is much."""
        ranks, of_node = home.world_size, self.config.links.ranks_per_node
        if of_node == 1 or ranks <= of_node:
            return [move_tiles(home, self.config, busy)]
        inside = move_tiles(home, self.config, busy, np.arange(ranks) // of_node)
        wider = replace(self.config, tolerance=max(_BETWEEN_NODES, self.config.tolerance))
        return [inside, move_tiles(inside, wider, busy)]

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


def _at_home(plan: Plan) -> Bools:
    """Returns whether each task's server has all rows of it, bool `[tasks]`."""
    runs, tasks = plan.placement.joined(), plan.tasks
    offset = plan.document_offsets
    line = offset[runs.document] + runs.start
    order = np.argsort(line)
    start, rank = line[order], runs.rank[order]
    end = (line + runs.end - runs.start)[order]
    base = offset[tasks.document]
    found = np.ones(len(tasks), dtype=bool)
    for first, last in ((tasks.q_start, tasks.q_end), (tasks.kv_start, tasks.kv_end)):
        run = np.searchsorted(start, base + first, side="right") - 1
        found &= (rank[run] == tasks.server) & (base + last <= end[run])
    return found


def _in_two_steps(plan: Plan) -> SteppedPlan:
    """Puts tasks whose rows travel behind the others."""
    away = ~_at_home(plan)
    stepped = SteppedPlan.at_once(plan)
    if away.all():
        return stepped
    return replace(stepped, step=away.astype(np.int64), relays=False)

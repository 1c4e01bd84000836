"""The steps of a plan whose tiles moved, and the seconds that they take.

* *Step 0*: what a rank has all rows of, while the rows of the tiles travel.
* *Step 1*: tiles. On several nodes those whose rows come from the rank's own node.
* *Step 2*: tiles with rows from other nodes, which travel for longer. Their rows leave when a rank
  has computed step 0. So only as much is in step 0 as hides the rows of step 1, and what else a
  rank has all rows of is in step 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.cost.link import Links
from distca.cost.steps import step_bytes, stepped_bytes
from distca.cost.volume import Messages, PlanBytes
from distca.plan import Plan, SteppedPlan
from distca.plan.span import Bools, Floats, Int64s
from distca.schedule.base import ScheduleConfig, server_loads, task_loads
from distca.schedule.serving.steps import step_program


def in_steps(plan: Plan, config: ScheduleConfig) -> SteppedPlan:
    """Puts tasks whose rows travel behind the others, and those whose rows travel far behind these.

    Args:
        plan: a valid plan.
        config: heads, cost model and links.
    """
    first, last = _source_ranks(plan)
    server, links = plan.tasks.server, config.links
    away = _are_away(first, last, server)
    stepped = SteppedPlan.at_once(plan)
    if away.all():
        return stepped
    ends = np.concatenate([first, last])
    far = away & (links.node(ends) != links.node(server)).any(axis=0)
    # A server is sent each key row once: all that it computes of a prompt is in one step.
    prompt = plan.tasks.document * plan.world_size + server
    far = away & np.isin(prompt, prompt[far])
    in_two = replace(stepped, step=away.astype(np.int64), relays=False)
    if plan.world_size <= links.ranks_per_node or not far.any() or not (away & ~far).any():
        return in_two
    near = SteppedPlan.at_once(replace(plan, tasks=plan.tasks[away & ~far]))
    dispatch = stepped_bytes(near, config.shape).messages["dispatch"]
    ranks = plan.world_size
    arrives = _Exchanges(ranks, links).over(np.zeros(ranks), dispatch)
    # A rank that sends alone has nothing to wait for.
    hidden = np.where(dispatch.received() > 0, arrives, 0.0)
    chosen = _first_at_home(plan, ~away, hidden, config)
    if not len(chosen):
        return in_two
    step = np.where(far, 2, 1)
    step[chosen] = 0
    return replace(in_two, step=step)


def predicted_seconds(
    stepped: SteppedPlan, config: ScheduleConfig, latency: float, busy: Floats
) -> float:
    """Predicts the seconds of a layer's core attention, until the last rank is done.

    Args:
        stepped: a plan of `in_steps`.
        config: heads, cost model and links.
        latency: seconds of an exchange, beside those of its bytes, which no kernel hides.
        busy: seconds in which each rank computes something else behind it, `[ranks]`.
    """
    plan, ranks = stepped.plan, stepped.plan.world_size
    speeds = config.speeds_of(ranks)
    loads = [
        server_loads(plan.tasks[stepped.step == step], plan.mask, ranks, config.cost_model) / speeds
        for step in range(stepped.steps)
    ]
    if stepped.steps == 1 and not _are_away(*_source_ranks(plan), plan.tasks.server).any():
        return float((loads[0] + busy).max())
    moved = [each.messages for each in step_bytes(stepped, config.shape)]
    clock, exchanges = np.zeros(ranks), _Exchanges(ranks, config.links)
    arrives: dict[int, Floats] = {}
    returns: dict[int, Floats] = {}
    for action, step in step_program(stepped.steps):
        if action == "dispatch":
            clock = clock + latency * moved[step]["dispatch"].sizes.any()
            arrives[step] = exchanges.over(clock, moved[step]["dispatch"])
        elif action == "receive":
            clock = np.maximum(clock, arrives.pop(step))
        elif action == "compute":
            clock = clock + loads[step] + latency * moved[step]["combine"].sizes.any()
            returns[step] = exchanges.over(clock, moved[step]["combine"])
        else:
            clock = np.maximum(clock, returns.pop(step))
    return float((clock + busy).max())


def seconds_apart(stepped: SteppedPlan, config: ScheduleConfig, own: Floats) -> Floats:
    """Predicts for how long ranks that compute tiles of other nodes cannot do so in a layer,
    `[ranks]`: until the rows of these tiles are there, and once their outputs leave; 0 for others.

    Args:
        stepped: a plan of `in_steps`.
        config: heads and links.
        own: seconds of what a rank computes without these tiles, `[ranks]`.
    """
    messages, links = stepped_bytes(stepped, config.shape).messages, config.links

    def arrives(moved: Messages, far: bool) -> Floats:
        chosen = (links.node(moved.source) != links.node(moved.destination)) == far
        source, destination = moved.source[chosen], moved.destination[chosen]
        seconds = moved.sizes[chosen] * 1e-9 / links.gb_per_s(source, destination)
        sent, received = (
            np.bincount(rank, weights=seconds, minlength=len(own)) for rank in (source, destination)
        )
        np.maximum.at(received, destination, sent[source])
        return received

    dispatch, back = messages["dispatch"], messages["combine"].back
    rows, outputs = arrives(dispatch, True), arrives(back, True)
    waits = np.maximum(rows + arrives(dispatch, False) - own, 0.0) + outputs
    return np.where(rows > 0, waits, 0.0)


class _Exchanges:
    """Exchanges one after the other, each through ports that are free once the one before has left.

    Args:
        ranks: number of ranks.
        links: links between them.
    """

    def __init__(self, ranks: int, links: Links) -> None:
        self._free: Floats = np.zeros(ranks)
        self._links = links

    def over(self, clock: Floats, moved: Messages) -> Floats:
        """Starts an exchange; returns when it is over for each rank, `[ranks]`.

        A rank's messages leave together, and have arrived when all of them have left.

        Args:
            clock: when each rank starts, `[ranks]`.
            moved: bytes of the exchange.
        """
        seconds = self._links.busy_seconds(PlanBytes({"exchange": moved}))
        left = np.maximum(clock, self._free) + seconds
        self._free = np.where(seconds > 0, left, self._free)
        over: Floats = np.where(seconds > 0, left, clock)
        np.maximum.at(over, moved.destination, left[moved.source])
        return over


def _source_ranks(plan: Plan) -> tuple[Int64s, Int64s]:
    """Returns the owners of each task's first query and first key, and of its last ones; -1 if
    rows between them have other owners: int64 `[2, tasks]` each."""
    runs, tasks = plan.placement.joined(), plan.tasks
    offset = plan.document_offsets
    line = offset[runs.document] + runs.start
    order = np.argsort(line)
    start, rank = line[order], runs.rank[order]
    end = (line + runs.end - runs.start)[order]
    base = offset[tasks.document]
    owners = []
    for low, high in ((tasks.q_start, tasks.q_end), (tasks.kv_start, tasks.kv_end)):
        run = np.searchsorted(start, base + low, side="right") - 1
        whole = base + high <= end[run]
        owners.append((rank[run], np.where(whole, rank[run], -1)))
    return np.stack([low for low, _ in owners]), np.stack([high for _, high in owners])


def _are_away(first: Int64s, last: Int64s, server: Int64s) -> Bools:
    """Returns whether rows of each task travel to its server, bool `[tasks]`; see
    `_source_ranks`."""
    away: Bools = (first != server).any(axis=0) | (last != server).any(axis=0)
    return away


def _first_at_home(plan: Plan, home: Bools, hidden: Floats, config: ScheduleConfig) -> Int64s:
    """Chooses the shortest tasks at home, on each rank until they take as long as rows travel.

    Args:
        plan: a valid plan.
        home: tasks at home, bool `[tasks]`.
        hidden: seconds that each rank's tasks should take, `[ranks]`.
        config: cost model and speeds.
    """
    tasks = plan.tasks[home]
    loads = task_loads(tasks, plan.mask, config.cost_model)
    loads = loads / config.speeds_of(plan.world_size)[tasks.server]
    order = np.lexsort((loads, tasks.server))
    server, load = tasks.server[order], loads[order]
    before = np.cumsum(load) - load
    opens = np.flatnonzero(np.diff(server, prepend=-1))
    before -= np.repeat(before[opens], np.diff(opens, append=len(order)))
    return np.flatnonzero(home)[order[before < hidden[server]]]

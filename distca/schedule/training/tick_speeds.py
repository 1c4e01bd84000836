"""Speeds of the servers in a tick: ranks in the bubble take more attention.

While the pipeline fills and drains, some stages are idle and only serve. With two nano-batches
their kernels can run while other ranks compute linear layers, so with equal shares of attention
they wait. And the last stage has the output layer to compute. Therefore the time of attention *and*
linear layers is shared out, not that of attention alone.

Not all of that time can be used: rows have to come first, and outputs have to be back in time. And
where there is little attention beside the linear layers, moving its rows costs more than is gained.
How much is given away was chosen by simulating models of 8B and 34B on 2 to 8 stages, with longest
documents of 8K to 512K tokens. Any `_USED` from 0.2 to 0.35 gains as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.plan.span import Floats, Int64s
from distca.schedule.base import task_loads
from distca.schedule.training.nano_batches import NanoPlan, with_cached_prefixes

_USED = 0.25
"""Part of the linear layers' time in which servers that have less of it compute attention."""
_LEAST = 0.5
"""Least part of an even share of attention that a server keeps."""
_GIVEN = 3.0
"""`_GIVEN * attention / linear` is the largest part of its even share that a server gives away."""
_LONG = 16_384
"""Queries and keys of a task at which kernels reach their full rate."""


@dataclass(frozen=True)
class LinearWork:
    """Linear layers of a token beside a layer's core attention, in visible pairs that take as long.

    All operations count the same, whatever their rate.

    Attributes:
        layer: pairs for the linear layers of one layer.
        head: pairs for half of the output layer, divided by the layers of a model chunk. It runs
            beside no attention of its micro-batch, so that less of its time can be made up for.
    """

    layer: float
    head: float

    @staticmethod
    def of_parameters(layer: int, head: int, chunk_layers: int, q_width: int) -> LinearWork:
        """Makes the work of a model.

        Args:
            layer: parameters of a layer's matrices.
            head: parameters of the output layer.
            chunk_layers: layers of a model chunk.
            q_width: elements of a query row, over all heads; where those of an output row are
                others, the mean.
        """
        # A parameter takes 2 operations for a token, a pair 4 for an element.
        return LinearWork(layer / (2 * q_width), head / (2 * q_width) / (2 * chunk_layers))


def load_of_a_pair(cost_model: CostModel | None) -> float:
    """Returns the load of a visible pair in long tasks."""
    if cost_model is None:
        return 1.0
    long, pairs = np.array([_LONG]), np.array([_LONG * _LONG])
    return float(cost_model.seconds(long, long, pairs)[0]) / _LONG**2


def tick_speeds(attention: float, linear: Floats, speeds: Floats) -> Floats:
    """Returns the speed of each server by which a tick's attention is shared out, `[servers]`.

    Args:
        attention: load of all tasks of the tick.
        linear: load of each server's linear layers, `[servers]`.
        speeds: relative speed of each server's compute, `[servers]`.
    """
    if attention <= 0 or linear.max() == linear.min():
        return speeds
    even = attention * speeds / float(speeds.sum())
    keeps = max(1 - _GIVEN * attention / float(linear.sum()), _LEAST) * even
    # All servers are busy until the same time, but for those that would keep too little.
    busy = _USED * (linear - linear.min())
    shares, short = keeps, np.zeros(len(linear), dtype=bool)
    while True:
        rest = attention - float(keeps[short].sum()) + float(busy[~short].sum())
        until = rest / float(speeds[~short].sum())
        shares = np.where(short, keeps, speeds * until - busy)
        if not (shares < keeps * (1 - 1e-9)).any():
            return shares / float(shares.mean())
        short |= shares < keeps


class AtHome:
    """What ranks have to compute if no task leaves its stage: each nano-batch is counted once for
    all the ticks that run it."""

    def __init__(self, servers: Int64s, world_size: int, cost_model: CostModel | None) -> None:
        self._servers, self._world_size, self._cost_model = servers, world_size, cost_model
        self._counted: dict[int, tuple[Floats, Int64s]] = {}

    def count(self, stages: Sequence[Sequence[NanoPlan] | None]) -> tuple[float, Int64s]:
        """Returns the load of all tasks of a tick, and the tokens of each server, `[servers]`.

        Args:
            stages: plans of each stage's nano-batches; None: the stage is idle.
        """
        tokens = np.zeros(self._world_size, dtype=np.int64)
        loads: list[list[Floats]] = []
        for stage, ranks in zip(stages, self._servers, strict=True):
            counted = [self._of_nano_batch(nano) for nano in stage or ()]
            loads.append([each for each, _ in counted])
            for _, own in counted:
                tokens[ranks] += own
        of_nano_batches = zip(*(each for each in loads if each), strict=True)
        return sum(float(np.concatenate(each).sum()) for each in of_nano_batches), tokens

    def _of_nano_batch(self, nano: NanoPlan) -> tuple[Floats, Int64s]:
        """Returns the loads of a nano-batch's tasks, and tokens of the ranks of a stage."""
        if id(nano) not in self._counted:
            plan = with_cached_prefixes(nano.plan, nano.split_documents)
            loads = task_loads(plan.tasks, plan.mask, self._cost_model)
            self._counted[id(nano)] = loads, plan.own_tokens_per_rank()
        return self._counted[id(nano)]

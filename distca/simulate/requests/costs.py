"""Predicted seconds of an engine's iterations: by their plans, or by fitted times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.volume import Messages
from distca.schedule.serving.batches import Batch, PrefillStrategy
from distca.schedule.serving.cdsp import PrefillTimes
from distca.schedule.serving.iteration import BatchPlan, plan_iteration, rows_on_ranks
from distca.schedule.serving.moves import BlockTransfer
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.iterations import simulate_iteration


class IterationCosts(Protocol):
    """What says how long an iteration takes."""

    def seconds(self, feeds: Sequence[ScheduledTokens], moves: Sequence[BlockTransfer]) -> float:
        """Predicts the seconds of an iteration, until all ranks have ended it.

        Args:
            feeds: what is fed, at least one.
            moves: blocks that change their rank before.
        """
        ...


@dataclass(frozen=True)
class PlannedCosts:
    """Seconds by the plans that the engine's workers make of an iteration.

    Attributes:
        costs: costs of the model on its cluster.
        world_size: ranks that there are.
        block_size: tokens of a block.
        strategy: what travels in chunks of prompts, or who chooses it.
        head_groups: groups of heads that sp-ntp scatters.
        cost_model: seconds of tasks with the heads of a GPU; None: the cluster's own.
    """

    costs: InferenceCosts
    world_size: int
    block_size: int
    strategy: PrefillStrategy = "pass-kv"
    head_groups: int = 1
    cost_model: CostModel | None = None

    def plan(self, feeds: Sequence[ScheduledTokens]) -> BatchPlan:
        """Plans an iteration, as workers do."""
        return plan_iteration(
            feeds,
            self.costs.model.masks.masks,
            self.block_size,
            self.world_size,
            self.strategy,
            self.head_groups,
        )

    def seconds(self, feeds: Sequence[ScheduledTokens], moves: Sequence[BlockTransfer]) -> float:
        """See `IterationCosts.seconds`."""
        nbytes = np.zeros((self.world_size, self.world_size), dtype=np.int64)
        for move in moves:
            nbytes[move.source.rank, move.to.rank] += self._block_bytes
        moved = Messages.of_matrix(nbytes) if moves else None
        found = simulate_iteration(self.plan(feeds), self.costs, self.cost_model, moved)
        return float(found.clock.max())

    def bytes_moved(self, feeds: Sequence[ScheduledTokens], moves: Sequence[BlockTransfer]) -> int:
        """Returns the bytes that ranks send each other in an iteration, moves of blocks included;
        arguments as for `seconds`."""
        model, size = self.costs.model, self.costs.tensor_parallel
        windows = [model.masks.of_layer(layer).window_left for layer in range(model.layers)]
        batch = Batch(self.plan(feeds).parts)
        planned = batch.bytes_by_sequence(windows, self.costs.shape, size)
        return sum(planned) + len(moves) * self._block_bytes * model.layers * size

    @property
    def _block_bytes(self) -> int:
        """Bytes of a block's keys and values in a layer on one GPU."""
        return self.block_size * self.costs.shape.kv_row_bytes


@dataclass(frozen=True)
class DecodeTimes:
    """Seconds of a decode iteration, which memory and latency bound.

    Attributes:
        step: seconds to read the weights, and of what is done once a layer.
        row: seconds to read a cached token's keys and values.
    """

    step: float
    row: float

    def seconds(self, rows: int) -> float:
        """Returns the seconds of an iteration that reads `rows` cached tokens of all sequences
        together."""
        return self.step + rows * self.row


@dataclass(frozen=True)
class FittedCosts:
    """Seconds by Eq. 1 of Tetris, which is fitted to measured prefills of requests that were alone.

    Chunks that share ranks run one after the other. Ranks decode after their chunks, and read the
    weights for it once more. Moves of blocks take no time.

    Attributes:
        times: seconds of prefills.
        decode_times: seconds of decoding on a rank.
        world_size: ranks that there are.
        block_size: tokens of a block.
    """

    times: PrefillTimes
    decode_times: DecodeTimes
    world_size: int
    block_size: int

    def seconds(self, feeds: Sequence[ScheduledTokens], moves: Sequence[BlockTransfer]) -> float:
        """See `IterationCosts.seconds`."""
        free, decodes = [0.0] * self.world_size, []
        for each in feeds:
            if each.count == 1 and each.start:
                decodes.append(each)
                continue
            group = {*each.ranks.tolist()}
            degree = max(degree for degree in self.times.degrees if degree <= len(group))
            seconds = self.times.seconds(degree, each.start, each.count)
            end = max(free[rank] for rank in group) + seconds
            for rank in group:
                free[rank] = end
        ends = np.array([each.start + 1 for each in decodes], dtype=np.int64)
        read = rows_on_ranks(decodes, ends, self.block_size, self.world_size).sum(axis=0)
        for rank in np.flatnonzero(read).tolist():
            free[rank] += self.decode_times.seconds(int(read[rank]))
        return max(free)

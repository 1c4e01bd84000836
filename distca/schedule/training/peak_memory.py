"""Peak memory of a planned global batch, tick by tick: what the simulator and the planner count.

A rank holds the model's state, the activations of the micro-batches whose backward pass is still to
come, core attention's buffers, and in a pass its logits, or what its kernels and recomputed layers
take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from distca.cost.memory import HEADROOM, CoreAttentionMemory
from distca.cost.plan_memory import PlanMemory
from distca.cost.training_memory import MemoryCosts
from distca.cost.volume import AttentionShape, BackwardInputs
from distca.plan.span import Floats, Int64s
from distca.schedule.training.planned_batch import PlannedGlobalBatch, PlannedTick
from distca.schedule.training.tick_schedule import TickSchedule

MemoryOfTick = Callable[[PlannedTick], Sequence[PlanMemory]]
"""Memory of the plans of a tick, mask by mask, each ping then pong."""


class _TickBytes(NamedTuple):
    """What a tick adds to the memory of each server, `[servers]`.

    Attributes:
        tokens: tokens of a rank's micro-batch.
        kept: bytes that are kept for the backward pass beside activations.
        kernels: bytes that kernels allocate.
    """

    tokens: Floats
    kept: Int64s | Floats
    kernels: Int64s


@dataclass(frozen=True)
class StepMemory:
    """What the memory of a training step depends on beside its plans.

    Attributes:
        costs: bytes of the model.
        shape: heads of one GPU, and what travels for keys and values.
        backward: source of the kernels' inputs in the backward pass: with `keep` servers keep them.
        head_parallel: ranks of a server, which share heads: each has an equal part of its tokens.
    """

    costs: MemoryCosts
    shape: AttentionShape
    backward: BackwardInputs = "resend"
    head_parallel: int = 1

    def state_bytes(self, stages: int, servers: int) -> list[float]:
        """Returns the bytes of the model's state on a GPU, for each stage.

        Args:
            stages: number of pipeline stages.
            servers: number of servers in a stage.
        """
        replicas = servers * self.head_parallel
        return [self.costs.state_bytes(stage, stages, replicas) for stage in range(stages)]

    def peak(self, planned: PlannedGlobalBatch, memory_of: MemoryOfTick | None = None) -> Floats:
        """Returns the peak bytes of each server's GPUs, `[servers]`.

        Args:
            planned: ticks and plans of a global batch.
            memory_of: memory of a tick's plans; None: it is worked out here.
        """
        masks, count = planned.masks, planned.ticks[0].plans[0].world_size
        memory_of = memory_of or self._memory_of_ticks()
        layers = self._layers_of_a_chunk(planned.schedule)
        buffers, nano_batches, ticks = CoreAttentionMemory(), 1, []
        for planned_tick in planned.ticks:
            of_plans = list(memory_of(planned_tick))
            # Each nano-batch has the same tokens with all masks.
            of_first = masks.select(of_plans, 0)
            nano_batches = len(of_first)
            kept = layers * np.sum([each.borrowed_bytes for each in of_first], axis=0)
            if self.backward == "keep":
                kept = kept + _received(planned, of_plans, layers)
            kernels = np.zeros(count, dtype=np.int64)
            if planned_tick.tick.direction == "backward":
                kernels = np.stack([each.kernel_memory for each in of_plans]).max(axis=0)
            for each in of_plans:
                buffers = buffers.union(each.memory)
            tokens = np.sum([each.own_tokens for each in of_first], axis=0) / self.head_parallel
            ticks.append(_TickBytes(tokens, kept, kernels))
        # Row indices of all masks are there at once.
        buffers = replace(buffers, indices=len(masks.masks) * buffers.indices)
        reserved = buffers.with_headroom(HEADROOM).total(nano_batches)
        return self._peak_of(planned.schedule, planned.servers, ticks) + reserved

    def least(self, schedule: TickSchedule, servers: Int64s, tokens: Int64s) -> float:
        """Returns bytes that the GPU which needs most needs at least, whatever the plans are.

        Args:
            schedule: ticks of a global batch.
            servers: number of each data-parallel rank of each stage among the servers,
                `[stages, data-parallel ranks]`.
            tokens: tokens of each micro-batch on each of these, `[micro-batches, ranks]`.
        """
        ticks, nothing = [], np.zeros(servers.size, dtype=np.int64)
        for tick in schedule.ticks:
            own = np.zeros(servers.size)
            for members, work in zip(servers, tick.work, strict=True):
                if work is not None:
                    own[members] = tokens[work.micro_batch] / self.head_parallel
            ticks.append(_TickBytes(own, nothing, nothing))
        return float(self._peak_of(schedule, servers, ticks).max())

    def _layers_of_a_chunk(self, schedule: TickSchedule) -> int:
        return self.costs.model.layers // (schedule.stages * schedule.chunks)

    def _peak_of(
        self, schedule: TickSchedule, servers: Int64s, ticks: Sequence[_TickBytes]
    ) -> Floats:
        """Returns the peak bytes of each server's GPUs without buffers, `[servers]`."""
        costs, count = self.costs, len(ticks[0].tokens)
        dedicated = np.setdiff1d(np.arange(count), servers)
        per_token = self._layers_of_a_chunk(schedule) * costs.activation_bytes()
        kept_logits = costs.kept_logit_bytes()
        new_logits = costs.logit_bytes() - kept_logits
        kept: dict[tuple[int, int, int], Floats] = {}
        now, most = np.zeros(count), np.zeros(count)
        for tick, (tokens, more_kept, kernels) in zip(schedule.ticks, ticks, strict=True):
            most[dedicated] = np.maximum(most[dedicated], kernels[dedicated])
            for stage, work in enumerate(tick.work):
                members = servers[stage]
                if work is None:
                    most[members] = np.maximum(most[members], now[members] + kernels[members])
                    continue
                key = (stage, *work)
                last = stage == schedule.stages - 1 and work.chunk == schedule.chunks - 1
                if tick.direction == "forward":
                    kept[key] = (per_token + last * kept_logits) * tokens[members]
                    kept[key] += more_kept[members]
                    now[members] += kept[key]
                # A backward pass adds the gradients of logits, which have 16 bits, too; its kernels
                # run when there are no logits any more.
                more = last * new_logits * tokens[members]
                of_kernels = kernels[members] - last * kept_logits * tokens[members]
                if tick.direction == "backward":
                    of_kernels = of_kernels + costs.recomputed_bytes() * tokens[members]
                peak = now[members] + np.maximum(more, of_kernels)
                most[members] = np.maximum(most[members], peak)
                if tick.direction == "backward":
                    now[members] -= kept.pop(key)
        for members, nbytes in zip(servers, self.state_bytes(*servers.shape), strict=True):
            most[members] += nbytes
        return most

    def _memory_of_ticks(self) -> MemoryOfTick:
        """Returns a function that works out the memory of ticks; those that share plans, once."""
        known: dict[int, list[PlanMemory]] = {}

        def memory_of(tick: PlannedTick) -> list[PlanMemory]:
            if tick.number not in known:
                known[tick.number] = [
                    PlanMemory(plan, self.shape, self.backward) for plan in tick.plans
                ]
            return known[tick.number]

        return memory_of


def _received(planned: PlannedGlobalBatch, of_plans: Sequence[PlanMemory], layers: int) -> Floats:
    """Returns the bytes of the rows that each server receives in a tick's layers, `[servers]`."""
    received = np.zeros(of_plans[0].plan.world_size)
    for layer in range(layers):
        for each in planned.masks.select(list(of_plans), layer):
            received += each.received_bytes
    return received

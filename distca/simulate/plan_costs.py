"""Costs of a plan in a layer: kernels, exchanges, copies and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from distca.cost.kernel_memory import kernel_memory
from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.memory import CoreAttentionMemory, plan_memory
from distca.cost.volume import AttentionShape, plan_bytes
from distca.plan import Plan
from distca.plan.span import Floats, Int64s, distinct
from distca.schedule.base import server_loads
from distca.simulate.copies import copy_traffic
from distca.simulate.resources import Transfer


@dataclass(frozen=True)
class ExchangeCosts:
    """Costs of one phase of a plan's exchange.

    Attributes:
        transfer: bytes that the links carry.
        packed: bytes of the messages that each server fills, `[servers]`.
        unpacked: bytes that each server takes out of messages, `[servers]`.
    """

    transfer: Transfer
    packed: Int64s
    unpacked: Int64s


@dataclass(frozen=True)
class PlanCosts:
    """Costs of a plan in a layer, for each server and one of several head groups.

    Attributes:
        plan: plan of a nano-batch, or of a whole micro-batch.
        shape: heads of one head group on one GPU.
        head_groups: number of head groups, which take equally long.
        cost_model: forward seconds of tasks with the heads of all groups.
        links: links between the servers.
        signal: every message is one byte.
    """

    plan: Plan
    shape: AttentionShape
    head_groups: int
    cost_model: CostModel
    links: Links
    signal: bool

    @cached_property
    def own_tokens(self) -> Int64s:
        return self.plan.own_tokens_per_rank()

    @cached_property
    def kernel_seconds(self) -> Floats:
        plan = self.plan
        whole = server_loads(plan.tasks, plan.mask, plan.world_size, self.cost_model)
        return whole / self.head_groups

    @cached_property
    def kernel_calls(self) -> Int64s:
        """Kernel calls of each server: one for each task shape that it has."""
        tasks = self.plan.tasks
        shapes = distinct(tasks.server * 2 + tasks.ends_on_diagonal) // 2
        return np.bincount(shapes, minlength=self.plan.world_size)

    @cached_property
    def exchanges(self) -> dict[str, ExchangeCosts]:
        """Costs by phase. A signal is one byte, but its message is packed and unpacked whole."""
        found = {}
        for phase, messages in plan_bytes(self.plan, self.shape).messages.items():
            signals = (messages.sizes > 0).astype(np.int64)
            carried = replace(messages, sizes=signals) if self.signal else messages
            transfer = Transfer.of_messages(carried, self.links)
            found[phase] = ExchangeCosts(transfer, messages.sent(), messages.received())
        return found

    @cached_property
    def copied(self) -> dict[str, Int64s]:
        """Bytes of `copy_traffic` in each direction."""
        grouped = self.head_groups > 1
        return {
            "forward": copy_traffic(self.plan, self.shape, "forward", grouped),
            "backward": copy_traffic(self.plan, self.shape, "backward", grouped),
        }

    @cached_property
    def expanded_rows(self) -> Int64s:
        """Latents that arrive at each server, to be expanded; none where keys and values travel."""
        _, received = self.plan.kv_segments.moved_per_rank(self.plan.world_size)
        return received * (self.shape.kv_rank is not None)

    @cached_property
    def memory(self) -> CoreAttentionMemory:
        return plan_memory(self.plan, self.shape)

    @cached_property
    def kernel_memory(self) -> Int64s:
        """Bytes that each server's kernels allocate beside `memory`, `[servers]`."""
        return kernel_memory(self.plan, self.shape)

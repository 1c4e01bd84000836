"""Memory that a plan's core attention takes on each server, in a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from distca.cost.kernel_memory import kernel_memory
from distca.cost.memory import CoreAttentionMemory, memory_of_rows
from distca.cost.rows import RankRows, rank_rows
from distca.cost.volume import AttentionShape, BackwardInputs, PlanBytes, plan_bytes
from distca.plan import Plan
from distca.plan.span import Int64s


@dataclass(frozen=True)
class PlanMemory:
    """Rows and bytes of a plan in a layer, for each server. What is asked for is worked out once.

    Attributes:
        plan: plan of a nano-batch, or of a whole micro-batch.
        shape: heads of one GPU, and what travels for keys and values.
        backward_inputs: source of the kernels' inputs in the backward pass, as in `plan_bytes`.
    """

    plan: Plan
    shape: AttentionShape
    backward_inputs: BackwardInputs

    @cached_property
    def own_tokens(self) -> Int64s:
        return self.plan.own_tokens_per_rank()

    @cached_property
    def moved(self) -> PlanBytes:
        """Bytes of `plan_bytes`."""
        return plan_bytes(self.plan, self.shape, self.backward_inputs)

    @cached_property
    def rows(self) -> tuple[RankRows, RankRows]:
        return rank_rows(self.plan)

    @cached_property
    def received_bytes(self) -> Int64s:
        """Bytes of the queries, keys and values that each server receives, `[servers]`."""
        q, kv = self.rows
        return q.received * self.shape.q_row_bytes + kv.received * self.shape.kv_row_bytes

    @cached_property
    def borrowed_bytes(self) -> Int64s:
        """Bytes of the keys and values that each rank borrows from earlier nano-batches, `[ranks]`:
        pong from ping, and both from earlier micro-batches of a chain."""
        rows = self.plan.placement.tokens_per_rank() - self.own_tokens
        return rows * self.lent_row_bytes

    @property
    def lent_row_bytes(self) -> int:
        """Bytes of a key and a value, with their latent where it travels."""
        return self.shape.kv_row_bytes + (self.shape.kv_rank or 0) * self.shape.dtype_bytes

    @cached_property
    def memory(self) -> CoreAttentionMemory:
        """Buffers, as `plan_memory` has them."""
        return memory_of_rows(self.rows, self.moved, self.shape)

    @cached_property
    def kernel_memory(self) -> Int64s:
        """Bytes that each server's kernels allocate beside `memory`, `[servers]`."""
        return kernel_memory(self.plan, self.shape)

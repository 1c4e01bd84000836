"""The exact bytes of a plan, as the transport counts them when the plan is executed.

A row that is on its server already costs nothing, a row that two tasks of a server share is sent
once, and outputs come back once for each (server, query row), merged on the server. The paper's
Appendix B is the cost of one shard that brings its full context; this is the cost of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from distca.plan import Plan
from distca.plan.span import Int64s

FORWARD_PHASES = ("dispatch", "return")
BACKWARD_PHASES = ("dispatch_backward", "return_backward")
PHASES = FORWARD_PHASES + BACKWARD_PHASES

BackwardInputs = Literal["resend", "keep"]
"""Source of the kernels' inputs in the backward pass: their owners send them again, or the servers
have kept them since the forward pass."""

BACKWARD_INPUTS: tuple[BackwardInputs, ...] = ("resend", "keep")

LSE_BYTES = 4
"""Bytes of the LSE of a row and head, which travels in float32."""

MAX_HEAD_GROUPS = 8
"""Most head groups of a nano-batch: each has a transport slot of its own."""


@dataclass(frozen=True)
class AttentionShape:
    """The attention heads of one tensor-parallel rank.

    Attributes:
        heads: query heads.
        kv_heads: key-value heads; `heads` is a multiple of it.
        head_dim: elements of a head.
        dtype_bytes: bytes of an element.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim, self.dtype_bytes) < 1:
            raise ValueError(
                f"{self.heads} heads, {self.kv_heads} key-value heads, {self.head_dim} elements of "
                f"a head, {self.dtype_bytes} bytes of an element: each must be at least 1"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads are no multiple of {self.kv_heads} key-value heads"
            )

    def head_group(self, groups: int) -> AttentionShape:
        """The shape of one of so many equal head groups: key-value heads with all their queries.

        Raises:
            ValueError: `groups` does not divide the key-value heads.
        """
        if groups < 1 or self.kv_heads % groups:
            raise ValueError(
                f"{self.kv_heads} key-value heads cannot be split into {groups} head groups: "
                "choose a number that divides them"
            )
        return replace(self, heads=self.heads // groups, kv_heads=self.kv_heads // groups)

    @property
    def q_row_bytes(self) -> int:
        """Bytes of a query row, an output row, or the gradient of either."""
        return self.heads * self.head_dim * self.dtype_bytes

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a key row and a value row together."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def lse_row_bytes(self) -> int:
        """Bytes of a row's LSE over all heads."""
        return self.heads * LSE_BYTES


@dataclass(frozen=True)
class PlanBytes:
    """Bytes of one layer, by phase and pair of ranks.

    Attributes:
        phases: int64 `[source rank, destination rank]` with diagonal 0, by the names in `PHASES`.
    """

    phases: dict[str, Int64s]

    @property
    def total(self) -> int:
        """All bytes of all phases."""
        return sum(int(matrix.sum()) for matrix in self.phases.values())

    def sent(self) -> Int64s:
        """Bytes that each rank sends, int64 `[world_size]`."""
        return np.sum([matrix.sum(axis=1) for matrix in self.phases.values()], axis=0)

    def received(self) -> Int64s:
        """Bytes that each rank receives, int64 `[world_size]`."""
        return np.sum([matrix.sum(axis=0) for matrix in self.phases.values()], axis=0)

    def forward(self) -> PlanBytes:
        """The phases of the forward pass alone."""
        return PlanBytes({name: self.phases[name] for name in FORWARD_PHASES})


def plan_bytes(plan: Plan, shape: AttentionShape, backward: BackwardInputs = "resend") -> PlanBytes:
    """Counts the bytes of one layer's core attention, forward and backward.

    Args:
        plan: a valid plan.
        shape: the heads of one tensor-parallel rank.
        backward: "resend": the backward dispatch carries queries, keys and values again;
            "keep": servers have kept them.

    Raises:
        ValueError: `backward` is neither of these.
    """
    if backward not in BACKWARD_INPUTS:
        raise ValueError(f'backward is "resend" or "keep", not {backward!r}')
    q_rows = plan.q_segments.moved_rows(plan.world_size)
    kv_rows = plan.kv_segments.moved_rows(plan.world_size)
    inputs = q_rows * shape.q_row_bytes + kv_rows * shape.kv_row_bytes
    # The gradient of the output, the final output and the final LSE.
    gradient = q_rows * (2 * shape.q_row_bytes + shape.lse_row_bytes)
    return PlanBytes(
        {
            "dispatch": inputs,
            "return": (q_rows * (shape.q_row_bytes + shape.lse_row_bytes)).T.copy(),
            "dispatch_backward": gradient + inputs if backward == "resend" else gradient,
            "return_backward": inputs.T.copy(),
        }
    )

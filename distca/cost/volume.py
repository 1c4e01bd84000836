"""The bytes of a plan, exactly: what the transport will count when the plan is executed.

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

LSE_BYTES = 4
"""The LSE of a row and head travels in float32."""


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
            raise ValueError(f"every size of {self} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv_heads} kv_heads")

    def head_group(self, groups: int) -> AttentionShape:
        """The heads of one of so many equal groups: keys and values with all their queries.

        Raises:
            ValueError: the key-value heads cannot be shared out.
        """
        if groups < 1 or self.kv_heads % groups:
            raise ValueError(
                f"{self.kv_heads} key-value heads cannot be split into {groups} head groups: "
                "choose a number that divides them"
            )
        return replace(self, heads=self.heads // groups, kv_heads=self.kv_heads // groups)

    @property
    def q_row_bytes(self) -> int:
        """Bytes of a query row; also of an output row and of their gradients."""
        return self.heads * self.head_dim * self.dtype_bytes

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a key row and a value row together."""
        return 2 * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def lse_row_bytes(self) -> int:
        return self.heads * LSE_BYTES


@dataclass(frozen=True)
class PlanBytes:
    """Bytes of one layer by phase: int64 `[source rank, destination rank]`, diagonal 0.

    The names of the phases are those of `PHASES`.
    """

    phases: dict[str, Int64s]

    @property
    def total(self) -> int:
        """All bytes of all phases."""
        return sum(int(matrix.sum()) for matrix in self.phases.values())

    def sent(self) -> Int64s:
        """What each rank sends, `[world_size]`."""
        return np.sum([matrix.sum(axis=1) for matrix in self.phases.values()], axis=0)

    def received(self) -> Int64s:
        """What each rank receives, `[world_size]`."""
        return np.sum([matrix.sum(axis=0) for matrix in self.phases.values()], axis=0)

    def forward(self) -> PlanBytes:
        """The phases of the forward pass alone."""
        return PlanBytes({name: self.phases[name] for name in FORWARD_PHASES})


def plan_bytes(
    plan: Plan, shape: AttentionShape, backward: Literal["resend", "keep"] = "resend"
) -> PlanBytes:
    """Counts the bytes of one layer's core attention, forward and backward.

    Args:
        plan: a valid plan.
        shape: the heads of one tensor-parallel rank.
        backward: "resend": the backward dispatch carries queries, keys and values again;
            "keep": servers have kept them.

    Raises:
        ValueError: `backward` is neither.
    """
    if backward not in ("resend", "keep"):
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

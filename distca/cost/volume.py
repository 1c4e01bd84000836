"""The exact bytes of a plan, as the transport counts them when the plan is executed.

A row that is on its server already costs nothing, a row that two tasks of a server share is sent
once, and outputs come back once for each (server, query row), merged on the server. The paper's
Appendix B is the cost of one shard that brings its full context; this is the cost of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from distca.plan import Plan, Segments
from distca.plan.span import Bools, Int64s, numbered, sums

FORWARD_PHASES = ("dispatch", "combine")
BACKWARD_PHASES = ("dispatch_backward", "combine_backward")
PHASES = FORWARD_PHASES + BACKWARD_PHASES
SHARED_HEADS = {"forward": "shared_heads", "backward": "shared_heads_backward"}
"""Phases of the all-to-alls by which ranks share heads, by pass."""

BackwardInputs = Literal["resend", "keep"]
"""Source of the kernels' inputs in the backward pass: their owners send them again, or the servers
have kept them since the forward pass."""

BACKWARD_INPUTS: tuple[BackwardInputs, ...] = ("resend", "keep")

LSE_BYTES = 4
"""Bytes of the LSE of a row and head, which travels in float32."""

ROW_ALIGNMENT = 16
"""Bytes at whose multiples each tensor's row begins in a message: those that a thread of a GPU
loads at a time. Padding is counted wherever rows are."""


def padded(row_bytes: int) -> int:
    """Returns the bytes of a tensor's row with the padding up to the next row."""
    return -(-row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


MOST_PEERS = 16
"""Most peers whose rows of a kind are copied peer by peer: each takes an operation of its own."""

PIECE_BYTES = 2**18
"""Bytes of a peer's rows from which an operation of their own costs less than one more copy."""


def in_pieces(peers: Int64s, rows: Int64s, row_bytes: int) -> Bools:
    """Returns whether a rank copies rows of a kind straight between messages and their places, peer
    by peer.

    Otherwise all go at once, whatever the number of peers, but by way of one more copy.

    Args:
        peers: ranks that these rows go to, or come from, `[ranks]`.
        rows: all these rows, `[ranks]`.
        row_bytes: bytes of a row.
    """
    return (peers <= MOST_PEERS) & (rows * row_bytes >= peers * PIECE_BYTES)


@dataclass(frozen=True)
class AttentionShape:
    """The attention heads of one rank.

    Attributes:
        heads: query heads.
        kv_heads: key-value heads; `heads` is a multiple of it.
        head_dim: elements of a head.
        dtype_bytes: bytes of an element.
        v_head_dim: elements of a value's head, and of an output's; None: `head_dim`.
        kv_rank: size of the latent that travels instead of a token's keys and values, which servers
            make of it (`latent_rows.py`); None: these travel themselves.
        rotated_dim: elements of a key's head that all heads share, and that travel with a latent.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    v_head_dim: int | None = None
    kv_rank: int | None = None
    rotated_dim: int = 0

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim, self.dtype_bytes, self.value_dim) < 1:
            raise ValueError(
                f"{self.heads} heads, {self.kv_heads} key-value heads, {self.head_dim} elements of "
                f"a head, {self.value_dim} of a value's, {self.dtype_bytes} bytes of an element: "
                "each must be at least 1"
            )
        if self.v_head_dim == self.head_dim:
            # One way to say it, so that equal shapes are equal.
            object.__setattr__(self, "v_head_dim", None)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} key-value heads"
            )

    def scattered(self, groups: int) -> AttentionShape:
        """Returns the shape of one head group, where each group has a server of its own.

        If groups outnumber the key-value heads, several groups share a head.
        """
        return replace(self, heads=self.heads // groups, kv_heads=max(self.kv_heads // groups, 1))

    @property
    def value_dim(self) -> int:
        """Elements of a value's head, and of an output's."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def flops_per_pair(self) -> float:
        """Operations of a visible pair, over all heads: a product with a key, and one with a
        value."""
        return 2.0 * self.heads * (self.head_dim + self.value_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's query, key, value and output, which are not padded."""
        elements = self.heads * (self.head_dim + self.value_dim)
        elements += self.kv_heads * (self.head_dim + self.value_dim)
        return elements * self.dtype_bytes

    @property
    def q_row_bytes(self) -> int:
        """Bytes of a query row or its gradient, padded."""
        return padded(self.heads * self.head_dim * self.dtype_bytes)

    @property
    def out_row_bytes(self) -> int:
        """Bytes of an output row or its gradient, padded."""
        return padded(self.heads * self.value_dim * self.dtype_bytes)

    @property
    def result_row_bytes(self) -> int:
        """Bytes of an output row and its LSE."""
        return self.out_row_bytes + self.lse_row_bytes

    @property
    def round_trip_bytes(self) -> int:
        """Bytes of a query row on its way to a server, and of its output and LSE back."""
        return self.q_row_bytes + self.result_row_bytes

    @property
    def q_inputs_row_bytes(self) -> int:
        """Bytes of a query's inputs of the backward kernel: the gradient of its output, the output
        and its LSE, the query."""
        return self.out_row_bytes + self.result_row_bytes + self.q_row_bytes

    @property
    def k_row_bytes(self) -> int:
        """Bytes of a key row or its gradient, padded."""
        return padded(self.kv_heads * self.head_dim * self.dtype_bytes)

    @property
    def v_row_bytes(self) -> int:
        """Bytes of a value row or its gradient, padded."""
        return padded(self.kv_heads * self.value_dim * self.dtype_bytes)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of a key row and a value row together."""
        return self.k_row_bytes + self.v_row_bytes

    @property
    def moved_kv_row_bytes(self) -> int:
        """Bytes that travel for a token's keys and values: theirs, or those of its latent and of
        the part of keys that heads share."""
        if self.kv_rank is None:
            return self.kv_row_bytes
        return sum(padded(each * self.dtype_bytes) for each in (self.kv_rank, self.rotated_dim))

    @property
    def expanded_dim(self) -> int:
        """Elements that a latent is expanded to: keys but for what heads share, and values."""
        return self.kv_heads * (self.head_dim - self.rotated_dim + self.value_dim)

    @property
    def expansion_flops(self) -> float:
        """Operations that expand a latent."""
        return 2.0 * (self.kv_rank or 0) * self.expanded_dim

    @property
    def kv_head_bytes(self) -> int:
        """Bytes of a key row and a value row of a single head, each padded."""
        return sum(padded(each * self.dtype_bytes) for each in (self.head_dim, self.value_dim))

    @property
    def lse_row_bytes(self) -> int:
        """Bytes of a row's LSE over all heads, padded."""
        return padded(self.heads * LSE_BYTES)


@dataclass(frozen=True)
class Messages:
    """A table: `source[i]` sends `sizes[i]` bytes, or rows, to another rank, `destination[i]`.

    Each pair of ranks is in it once at most. All columns are int64 `[pairs]`.
    """

    source: Int64s
    destination: Int64s
    sizes: Int64s
    world_size: int

    @property
    def back(self) -> Messages:
        """As many bytes in the other direction."""
        return replace(self, source=self.destination, destination=self.source)

    def sent(self) -> Int64s:
        """Returns the bytes that each rank sends, int64 `[world_size]`."""
        return sums(self.source, self.sizes, self.world_size)

    def received(self) -> Int64s:
        """Returns the bytes that each rank receives, int64 `[world_size]`."""
        return sums(self.destination, self.sizes, self.world_size)

    def matrix(self) -> Int64s:
        """Returns the bytes of each pair, int64 `[source rank, destination rank]`."""
        dense = np.zeros((self.world_size, self.world_size), dtype=np.int64)
        dense[self.source, self.destination] = self.sizes
        return dense

    @staticmethod
    def added(tables: Sequence[Messages]) -> Messages:
        """Adds up the bytes of each pair."""
        return Messages.of_matrix(np.sum([each.matrix() for each in tables], axis=0))

    @staticmethod
    def of_matrix(dense: Int64s) -> Messages:
        """Makes the table of bytes by source and destination, `matrix`'s inverse."""
        source, destination = np.nonzero(dense)
        return Messages(source, destination, dense[source, destination], len(dense))


@dataclass(frozen=True)
class PlanBytes:
    """Bytes of one layer, by phase and pair of ranks.

    Attributes:
        messages: who sends how much to whom, by the names in `PHASES`. Of thousands of ranks each
            exchanges with few.
    """

    messages: dict[str, Messages]

    @cached_property
    def phases(self) -> dict[str, Int64s]:
        """Matrices of all phases, int64 `[source rank, destination rank]` with diagonal 0."""
        return {name: each.matrix() for name, each in self.messages.items()}

    @property
    def total(self) -> int:
        """All bytes of all phases."""
        return sum(int(each.sizes.sum()) for each in self.messages.values())

    def sent(self) -> Int64s:
        """Returns the bytes that each rank sends, int64 `[world_size]`."""
        return np.sum([each.sent() for each in self.messages.values()], axis=0)

    def received(self) -> Int64s:
        """Returns the bytes that each rank receives, int64 `[world_size]`."""
        return np.sum([each.received() for each in self.messages.values()], axis=0)

    def forward(self) -> PlanBytes:
        """Returns the phases of the forward pass alone."""
        return PlanBytes({name: self.messages[name] for name in FORWARD_PHASES})


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
    shape = shape.scattered(plan.head_groups)
    owner, server, q, kv = rows_by_pair(plan.q_segments, plan.kv_segments, plan.world_size)

    def dispatched(sizes: Int64s) -> Messages:
        return Messages(owner, server, sizes, plan.world_size)

    inputs = q * shape.q_row_bytes + kv * shape.moved_kv_row_bytes
    # The gradient of the output, the final output and the final LSE.
    gradient = q * (shape.out_row_bytes + shape.result_row_bytes)
    return PlanBytes(
        {
            "dispatch": dispatched(inputs),
            "combine": dispatched(q * shape.result_row_bytes).back,
            "dispatch_backward": dispatched(
                gradient + inputs if backward == "resend" else gradient
            ),
            "combine_backward": dispatched(inputs).back,
        }
    )


def rows_by_pair(q: Segments, kv: Segments, ranks: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Returns the rows of each pair of ranks: source, server, queries and keys, int64 `[pairs]`."""
    q_source, q_server, q_rows = q.moved()
    kv_source, kv_server, kv_rows = kv.moved()
    pairs = np.concatenate([q_source * ranks + q_server, kv_source * ranks + kv_server])
    first, where = numbered(pairs)
    source, server = np.divmod(pairs[first], ranks)
    of_q, of_kv = np.zeros_like(source), np.zeros_like(source)
    of_q[where[: len(q_rows)]], of_kv[where[len(q_rows) :]] = q_rows, kv_rows
    return source, server, of_q, of_kv

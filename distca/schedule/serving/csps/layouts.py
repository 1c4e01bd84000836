"""SP-NTP and SP-TP where ranks split each layer's weights: what either sends, and which sends less.

Ranks that split weights keep keys and values by heads, all tokens' of a few heads each. In a
prefill each has a part of the sequence between the layers' blocks, and they come together in one of
two ways (CSPS, Section 3.2.1):

* **sp-tp**: an all-gather brings all rows to all ranks before the projections to queries, keys and
  values, and a reduce-scatter adds up what the output projections of the ranks' heads give;
* **sp-ntp**: an all-gather brings the whole weights of these projections to all ranks; queries,
  keys and values of all heads travel by an all-to-all to their heads' ranks, and outputs back.

MLPs are split in both, between an all-gather and a reduce-scatter. Where all ranks are sent the
same rows, and where sums are scattered, the ranks of a node first do it for others: a row goes once
to each other node, and once a node's sum leaves it (Section 3.2.4). There the paper has one rank of
a node send for all; here each sends its own rows to the ranks of its number in other nodes, so that
all links are used.

Appendix A compares a layer's elements, `4 d^2 (N - 1) + 4 L d (N - 1) / N` of SP-NTP with
`2 L d (N - 1)` of SP-TP, for as many heads of keys as of queries: SP-NTP sends less if
`L > 2 d N / (N - 2)`, so never on two ranks, where the paper has it that it always does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from distca.cost.volume import Messages, PlanBytes
from distca.plan.span import Int64s

Layout = Literal["sp-ntp", "sp-tp"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

LayoutChoice = Literal["sp-ntp", "sp-tp", "bytes", "paper"]
"""A layout, or how it is chosen: by the bytes of both, or by the paper's rule."""

SUM_BYTES = 4
"""Bytes of an element of a partial sum, which is in float32 until all are added up."""


def tokens_for_head_scatter(hidden_size: int, ranks: int) -> float:
    """Appendix A's rule: tokens above which SP-NTP sends less, where it gathers weights."""
    return 2.0 * hidden_size * ranks / (ranks - 2) if ranks > 2 else math.inf


def even_rows(tokens: int, ranks: int) -> Int64s:
    """Shares rows out over ranks, consecutive ones to each, int64 `[ranks]`."""
    return np.diff(np.arange(ranks + 1) * tokens // ranks)


def gathered_rows(rows: Int64s, ranks_per_node: int) -> tuple[Int64s, Int64s]:
    """Returns the rows that travel in an all-gather: first between nodes, then within them.

    A reduce-scatter is the same backwards: first within nodes, then between them.

    Args:
        rows: rows of each rank, int64 `[ranks]`.
        ranks_per_node: ranks of a node; it divides the number of ranks.

    Returns:
        Both exchanges, int64 `[source, destination]`.
    """
    ranks = len(rows)
    assert ranks % ranks_per_node == 0, "nodes have equally many ranks"
    node, number = np.divmod(np.arange(ranks), ranks_per_node)
    apart = node[:, None] != node
    between = np.where(apart & (number[:, None] == number), rows[:, None], 0)
    of_number = np.bincount(number, weights=rows).astype(np.int64)
    within = np.where(~apart & ~np.eye(ranks, dtype=bool), of_number[number][:, None], 0)
    return between, within


@dataclass(frozen=True)
class SplitLayer:
    """A layer whose weights ranks split, by heads and by the width of its MLP.

    Attributes:
        hidden_size: width of the residual stream.
        heads: query heads of the whole layer.
        kv_heads: key-value heads; of fewer than ranks, several ranks have the same one.
        head_dim: elements of a head.
        ranks: ranks that split it.
        dtype_bytes: bytes of an element of rows and weights.
        ranks_per_node: ranks of a node.
        biases: whether the projections to queries, keys and values have biases.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ranks: int
    dtype_bytes: int
    ranks_per_node: int
    biases: bool = False

    @property
    def copies(self) -> int:
        """Ranks that have the same head of keys."""
        return max(self.ranks // self.kv_heads, 1)

    @property
    def query_width(self) -> int:
        """Elements of a rank's queries of a token."""
        return self.heads // self.ranks * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of a rank's keys of a token."""
        return self.kv_heads * self.copies // self.ranks * self.head_dim

    @property
    def own_weights(self) -> int:
        """Weights of a rank's query and output projections."""
        return self.query_width * (2 * self.hidden_size + self.biases)

    @property
    def key_weights(self) -> int:
        """Weights of a rank's projections to keys and values, which its copies have, too."""
        return 2 * self.key_width * (self.hidden_size + self.biases)

    @property
    def key_senders(self) -> Int64s:
        """Who sends its weights of keys and values to whom, 0 or 1, int64 `[source, destination]`:
        of each head's copies one to each rank that has another head."""
        number = np.arange(self.ranks)
        alike = (number % self.copies)[:, None] == number % self.copies
        return (alike & ~np.eye(self.ranks, dtype=bool)).astype(np.int64)

    def scattered_rows(self, rows: Int64s) -> Int64s:
        """Returns the rows that travel from each rank to each other one's heads,
        `[source, destination]`."""
        return np.where(np.eye(self.ranks, dtype=bool), 0, rows[:, None])

    def attention_bytes(self, layout: Layout, rows: Int64s) -> PlanBytes:
        """Returns the bytes of a layer's attention for rows of each rank, int64 `[ranks]`."""
        if layout == "sp-tp":
            return self.block_bytes(rows)
        ones, size = np.ones(self.ranks, dtype=np.int64), self.dtype_bytes
        between, within = gathered_rows(ones, self.ranks_per_node)
        moved = self.scattered_rows(rows)
        return _plan_bytes(
            {
                "weights between nodes": between * (self.own_weights * size),
                "weights": within * (self.own_weights * size),
                "key weights": self.key_senders * (self.key_weights * size),
                "heads": moved * ((self.query_width + 2 * self.key_width) * size),
                "outputs": moved.T * (self.query_width * size),
            }
        )

    def block_bytes(self, rows: Int64s) -> PlanBytes:
        """Returns the bytes of an all-gather of rows and a reduce-scatter of their sums,
        likewise."""
        between, within = gathered_rows(rows, self.ranks_per_node)
        row, sums = (self.hidden_size * size for size in (self.dtype_bytes, SUM_BYTES))
        return _plan_bytes(
            {
                "all-gather between nodes": between * row,
                "all-gather": within * row,
                "reduce-scatter": within.T * sums,
                "reduce-scatter between nodes": between.T * sums,
            }
        )

    def embedding_bytes(self, rows: Int64s) -> PlanBytes:
        """Returns the bytes of reducing embeddings; each rank looks up its part of the vocabulary.

        At most one rank's value is not zero, so the sums need no float32.
        """
        between, within = gathered_rows(rows, self.ranks_per_node)
        row = self.hidden_size * self.dtype_bytes
        sizes = {"embeddings": within.T * row, "embeddings between nodes": between.T * row}
        return _plan_bytes(sizes)

    def chosen(self, choice: LayoutChoice, tokens: int) -> Layout:
        """Returns the layout of a prefill by its number of tokens."""
        if choice == "sp-ntp" or choice == "sp-tp":
            return choice
        if choice == "paper":
            above = tokens > tokens_for_head_scatter(self.hidden_size, self.ranks)
            return "sp-ntp" if above else "sp-tp"
        rows = even_rows(tokens, self.ranks)
        scattered, gathered = (self.attention_bytes(each, rows).total for each in LAYOUTS)
        return "sp-ntp" if scattered < gathered else "sp-tp"


def _plan_bytes(sizes: Mapping[str, Int64s]) -> PlanBytes:
    return PlanBytes({name: Messages.of_matrix(each) for name, each in sizes.items()})


@dataclass(frozen=True)
class SharedRows:
    """The rows of a step that ranks share between the blocks of layers.

    Attributes:
        layout: how they come together in attention.
        rows: rows of each rank, consecutive ones, int64 `[ranks]`.
        bytes_moved: bytes that all ranks send in the step.
    """

    layout: Layout
    rows: Int64s
    bytes_moved: int

    def bytes_by_sequence(self, tokens: Int64s) -> Int64s:
        """Shares the bytes out over sequences by their tokens, int64 `[sequences]`."""
        ends = np.cumsum(tokens)
        return np.diff(self.bytes_moved * ends // max(int(ends[-1]), 1), prepend=0)


@dataclass(frozen=True)
class SplitModel:
    """A model whose layers ranks split.

    Attributes:
        layer: one of them.
        layers: how many there are.
        choice: layout of prefills, or how it is chosen.
    """

    layer: SplitLayer
    layers: int
    choice: LayoutChoice

    def share(self, tokens: int) -> SharedRows | None:
        """Shares out the rows of a step with prefills; None: there are fewer than ranks, and each
        has all."""
        if tokens < self.layer.ranks:
            return None
        rows = even_rows(tokens, self.layer.ranks)
        layout = self.layer.chosen(self.choice, tokens)
        of_layer = self.layer.attention_bytes(layout, rows).total
        of_layer += self.layer.block_bytes(rows).total
        embedded = self.layer.embedding_bytes(rows).total
        return SharedRows(layout, rows, self.layers * of_layer + embedded)

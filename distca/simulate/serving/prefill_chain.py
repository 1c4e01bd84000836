"""Seconds of a prefill over a chain of ranks, and of one with all-gathers (KV-Runahead).

The costs are those of one rank for a whole prompt, `token_seconds * C + product_seconds * C * C`,
as the paper's single-GPU times have it (Table 3): linear layers, and every product of a query's row
with a key's, whether seen or not. Layers share them equally.

**Chain.** In each layer a rank computes queries, keys and values of its part, sends its rows to the
next rank at once, and attends to them; then it attends to each earlier part as its rows come, the
nearest first, and hands them on. Rows of a layer and the next share a link in order. A rank goes on
to its next layer by itself: there is no barrier.

**Chain that hands on whole caches** (`whole_caches`, the paper's code). A rank asks for the rows of
all earlier parts when it begins a layer, and receives them from the rank before once that rank has
them all. It joins them with its own rows, stacks keys and values, sends on the whole cache, and
attends.

**All-gather** (the paper's TSP): equal parts, each against the whole prompt's keys, once all of
them are there. The exchange is a ring of `ranks - 1` steps, as slow as its slowest link.

What launches cost is `Overheads`: those of a layer, of each part that comes, and of an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.plan.span import Floats, Int64s
from distca.simulate.serving.overheads import NO_OVERHEADS, Overheads


@dataclass(frozen=True)
class ChainCosts:
    """Costs of a model's prefill, and the links of a chain.

    Attributes:
        token_seconds: seconds of a token's linear layers, all layers together.
        product_seconds: seconds of a product of a query's row and a key's, all layers together.
        layers: layers of the model.
        kv_bytes: bytes of a token's keys and values in one layer.
        gb_per_s: gigabytes (10^9) a second from each rank to the next, `[ranks - 1]`.
        before_attention: part of the linear layers' time before attention.
        latency: seconds until a message begins to arrive.
        causal: whether products of queries with later keys are left out. The paper's kernels
            compute them: a part's own square, and with an all-gather the whole rectangle.
        whole_caches: whether a rank waits for the rows of all earlier parts at once.
        copy_seconds: with whole caches, seconds to copy a token's keys and values once in a layer:
            caches are copied when they are joined, and when they are stacked.
        overheads: what layers and exchanges cost beside their work.

    Raises:
        ValueError: a value is out of range.
    """

    token_seconds: float
    product_seconds: float
    layers: int
    kv_bytes: float
    gb_per_s: tuple[float, ...]
    before_attention: float = 0.25
    latency: float = 0.0
    causal: bool = False
    whole_caches: bool = False
    copy_seconds: float = 0.0
    overheads: Overheads = NO_OVERHEADS

    def __post_init__(self) -> None:
        if self.layers < 1 or not 0 <= self.before_attention <= 1:
            raise ValueError("a model has a layer or more, and its parts' times add up")
        seconds = self.token_seconds, self.product_seconds, self.copy_seconds
        rates = (*seconds, self.kv_bytes, self.latency)
        if not all(rate >= 0 for rate in rates) or not all(each > 0 for each in self.gb_per_s):
            raise ValueError("times and bytes must not be negative, and links have a speed above 0")

    @property
    def ranks(self) -> int:
        return len(self.gb_per_s) + 1

    def alone(self, tokens: int) -> float:
        """Returns the seconds of a whole prompt on one rank."""
        return self._layers_seconds(self._work(tokens))

    def _work(self, tokens: int) -> float:
        """Returns the seconds of a whole prompt's linear layers and products on one rank."""
        products = _own_products(np.array(float(tokens)), self.causal)
        return float(self.token_seconds * tokens + self.product_seconds * products)

    def _layers_seconds(self, work: float, exchange: float = 0.0, calls: int = 0) -> float:
        """Returns the seconds of all layers, where all ranks have the same work.

        Args:
            work: seconds of linear layers and products, all layers together.
            exchange: seconds of a layer's exchange.
            calls: collectives of a layer.
        """
        of = self.overheads
        a_layer = max(work / self.layers + of.layer_seconds + exchange, of.host_layer_seconds)
        return of.iteration_seconds + self.layers * (a_layer + calls * of.collective_seconds)

    def chain_seconds(self, parts: Int64s) -> Floats:
        """Returns the seconds to the first token of partitions.

        Args:
            parts: tokens of each rank's part, int64 `[partitions, ranks]`; the last may have none.

        Returns:
            When the last rank with tokens ends its last layer, float64 `[partitions]`.
        """
        ranks, of = parts.shape[1], self.overheads
        assert ranks == self.ranks, "a link leads from each rank to the next"
        part = parts.T.astype(np.float64)
        before = self.before_attention * self.token_seconds / self.layers * part
        after = (1 - self.before_attention) * self.token_seconds / self.layers * part
        after = after + of.layer_seconds
        ready = np.zeros_like(part) + of.iteration_seconds
        port = np.zeros_like(part)
        for layer in range(self.layers):
            run = self._whole_layer if self.whole_caches else self._layer
            ready = run(part, ready + before, ready, port) + after
            # Hosts launch ahead of the GPUs.
            ready = np.maximum(ready, of.iteration_seconds + (layer + 1) * of.host_layer_seconds)
        # Ranks without tokens at the end are waited for by nobody.
        last: Floats = ready[np.count_nonzero(parts, axis=1) - 1, np.arange(len(parts))]
        return last

    def _layer(self, part: Floats, projected: Floats, _began: Floats, port: Floats) -> Floats:
        """Returns when each rank has attended to all parts up to its own, `[ranks, partitions]`.

        Args:
            part: tokens of the ranks, `[ranks, partitions]`.
            projected: when each rank has its own rows.
            _began: when each rank began the layer.
            port: when the link to each rank is free; it is moved on.
        """
        product, of = self.product_seconds / self.layers, self.overheads
        attended, there = np.empty_like(part), list[Floats]()
        for rank in range(self.ranks):
            # When the rows of each part are here, the nearest part first.
            coming = [projected[rank]]
            now = projected[rank] + product * _own_products(part[rank], self.causal)
            for back, left in enumerate(there, start=1):
                earlier = rank - back
                seconds = part[earlier] * self.kv_bytes / (self.gb_per_s[rank - 1] * 1e9)
                port[rank] = np.maximum(port[rank], left) + seconds
                coming.append(port[rank] + self.latency + of.exchange_seconds)
                now = np.maximum(now, coming[-1]) + product * part[rank] * part[earlier]
                now = now + of.step_seconds
            attended[rank] = now
            there = coming
        return attended

    def _whole_layer(self, part: Floats, projected: Floats, began: Floats, _: Floats) -> Floats:
        """Returns the same as `_layer`, where whole caches are handed on."""
        product, of = self.product_seconds / self.layers, self.overheads
        attended, there = np.empty_like(part), np.zeros_like(part[0])
        for rank in range(self.ranks):
            earlier = part[:rank].sum(axis=0)
            has = projected[rank]
            if rank:
                seconds = earlier * self.kv_bytes / (self.gb_per_s[rank - 1] * 1e9)
                comes = np.maximum(began[rank], there) + seconds
                has = np.maximum(has, comes + self.latency + of.exchange_seconds) + of.step_seconds
            has = has + (1 + (rank > 0)) * self.copy_seconds * (earlier + part[rank])
            products = part[rank] * earlier + _own_products(part[rank], self.causal)
            attended[rank] = has + product * products
            there = has
        return attended

    def all_gather_seconds(self, tokens: int) -> float:
        """Returns the seconds to the first token with equal parts and an all-gather in each layer.

        With `causal`, each rank has an early and a late part, so that all have equally many
        products (zigzag).
        """
        ranks = self.ranks
        moved = tokens / ranks * self.kv_bytes
        slowest = min(self.gb_per_s, default=np.inf)
        gather = (ranks - 1) * (moved / (slowest * 1e9) + self.latency)
        return self._layers_seconds(self._work(tokens) / ranks, gather, int(ranks > 1))

    def lower_bound(self, tokens: int) -> float:
        """Returns the seconds that no chain falls below: free links, and equal times (Eqs. 1 to 3).

        The paper's bound is of products alone; this one has the linear layers, too.
        """
        products = tokens**2 / 2 * (1 + (0.0 if self.causal else 1 / self.ranks))
        return (self.token_seconds * tokens + self.product_seconds * products) / self.ranks


def _own_products(tokens: Floats, causal: bool) -> Floats:
    """Products of a part with itself: all, or those that are seen."""
    products: Floats = tokens * (tokens + 1) / 2 if causal else tokens * tokens
    return products


def fit_alone(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits the costs of one rank to measured prefills, by relative errors.

    Returns:
        `token_seconds` and `product_seconds`.

    Raises:
        ValueError: there are fewer than two measurements, or the fit has a negative cost.
    """
    if len(tokens) != len(seconds) or len(set(tokens)) < 2:
        raise ValueError("a fit needs the seconds of two lengths at least")
    length, time = np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    relative = np.stack([length, length**2], axis=1) / time[:, None]
    (token, product), *_ = np.linalg.lstsq(relative, np.ones_like(time), rcond=None)
    if token < 0 or product < 0:
        raise ValueError("these times don't rise as linear layers and attention do")
    return float(token), float(product)

"""Attention masks: which keys a query sees, a function of the two positions alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from distca.plan.span import Bools, Int64s

IntOrArray = TypeVar("IntOrArray", int, Int64s)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Mask:
    """Causal attention within a document, optionally with a sliding window or within chunks.

    Query position `i` sees the key positions `[max(0, i - window_left), i]`; with `window_left`
    None it sees `[0, i]`. `window_left` is the first number of Megatron-LM's `--window-size L,0`.
    With `attention_chunk` it sees those of `[0, i]` that lie in its own chunk of that many tokens,
    counted from the document's start, as in Llama 4.

    Raises:
        ValueError: `window_left` is negative, `attention_chunk` is not positive, one of them is no
            whole number, or both are given.
    """

    window_left: int | None = None
    attention_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.attention_chunk is not None:
            if not _is_whole(self.attention_chunk) or self.attention_chunk < 1:
                raise ValueError(
                    f"attention_chunk is {self.attention_chunk!r}: give at least 1 token"
                )
            if self.window_left is not None:
                raise ValueError("a mask has a window or chunks: give one of the two")
        if self.window_left is not None and (
            not _is_whole(self.window_left) or self.window_left < 0
        ):
            raise ValueError(
                f"window_left is {self.window_left!r}: give the number of earlier tokens that a "
                "query sees (0 or more), or None for full causal attention"
            )

    def first_key(self, query: IntOrArray) -> IntOrArray:
        """Returns the first key position that each query position sees."""
        if self.attention_chunk is not None:
            return query // self.attention_chunk * self.attention_chunk
        if self.window_left is None:
            return query * 0
        return np.maximum(query - self.window_left, 0)  # type: ignore[return-value]

    def pairs(
        self,
        q_start: IntOrArray,
        q_end: IntOrArray,
        kv_start: IntOrArray,
        kv_end: IntOrArray,
    ) -> IntOrArray:
        """Returns the exact number of visible (query, key) pairs of a rectangle.

        All arguments are positions of one document, ints or int64 arrays of one shape.
        """
        # Keys at or before the query, minus those before its window.
        visible = _pairs_at_or_before(q_start, q_end, kv_start, kv_end)
        if self.window_left is not None:
            shift = self.window_left + 1
            visible = visible - _pairs_at_or_before(
                q_start - shift, q_end - shift, kv_start, kv_end
            )
        if self.attention_chunk is not None:
            size = self.attention_chunk
            visible = visible - (
                _pairs_before_chunks(q_end, kv_start, kv_end, size)
                - _pairs_before_chunks(q_start, kv_start, kv_end, size)
            )
        return visible

    def is_full(self, q_start: Int64s, q_end: Int64s, kv_start: Int64s, kv_end: Int64s) -> Bools:
        """Tells for each rectangle whether all of its queries see all of its keys."""
        return (kv_end - 1 <= q_start) & (kv_start >= self.first_key(q_end - 1))


@dataclass(frozen=True)
class LayerMasks:
    """The masks of a model's layers, in a pattern that repeats.

    Attributes:
        masks: different masks, the one that sees most first.
        pattern: number of the mask of each layer of the pattern.
        of_last_stage: number of masks, the last ones, of layers that the last stage of a pipeline
            has behind those that all stages have. They stand there again, if other layers have
            them too: plans with them are of the last stage's tokens alone.
    """

    masks: tuple[Mask, ...] = (Mask(),)
    pattern: tuple[int, ...] = (0,)
    of_last_stage: int = 0

    @staticmethod
    def of(layers: Iterable[Mask]) -> LayerMasks:
        """Makes the masks of the layers of a pattern."""
        of_layers = tuple(layers)
        # What sees all comes before what sees the widest window or the largest chunks.
        masks = sorted(
            dict.fromkeys(of_layers),
            key=lambda mask: (
                mask != Mask(),
                -(mask.window_left or 0),
                -(mask.attention_chunk or 0),
            ),
        )
        return LayerMasks(tuple(masks), tuple(masks.index(mask) for mask in of_layers))

    @property
    def of_all_stages(self) -> LayerMasks:
        """Masks of the layers that all stages of a pipeline have."""
        if not self.of_last_stage:
            return self
        number = len(self.masks) - self.of_last_stage
        return LayerMasks(self.masks[:number], tuple(n for n in self.pattern if n < number))

    def of_layer(self, layer: int) -> Mask:
        """Returns the mask of a layer, numbered from 0."""
        return self.masks[self.pattern[layer % len(self.pattern)]]

    def counts(self) -> tuple[int, ...]:
        """Returns how many layers of the pattern each mask has."""
        return tuple(self.pattern.count(number) for number in range(len(self.masks)))

    def select(self, values: Sequence[Value], layer: int) -> Sequence[Value]:
        """Returns, of values that each mask has equally many of, those of a layer's mask."""
        each = len(values) // len(self.masks)
        first = self.pattern[layer % len(self.pattern)] * each
        return values[first : first + each]


def _pairs_at_or_before(
    q_start: IntOrArray, q_end: IntOrArray, kv_start: IntOrArray, kv_end: IntOrArray
) -> IntOrArray:
    """Counts pairs with `key <= query`: the sum of `clip(query + 1 - kv_start, 0, kv_len)`."""
    span = np.maximum(kv_end - kv_start, 0)
    return _ramp(q_end - kv_start, span) - _ramp(q_start - kv_start, span)


def _ramp(x: IntOrArray, top: IntOrArray) -> IntOrArray:
    """Returns the sum over `i < x` (from minus infinity) of `clip(i + 1, 0, top)`."""
    # Planning calls this very often with few rectangles, for which `np.clip` and `//` are slower.
    rising = np.minimum(np.maximum(x, 0), top)
    flat = np.maximum(x - top, 0)
    return (rising * (rising + 1) >> 1) + flat * top


def _pairs_before_chunks(
    q_end: IntOrArray, kv_start: IntOrArray, kv_end: IntOrArray, size: int
) -> IntOrArray:
    """Counts pairs of the queries `[0, q_end)` whose key lies before the query's chunk."""
    keys = np.maximum(kv_end - kv_start, 0)
    chunks, rest = q_end // size, q_end % size
    # Chunks that begin behind the first key, and those that begin behind the last.
    behind_first, behind_last = kv_start // size + 1, -(-(kv_start + keys) // size)
    rising = np.maximum(np.minimum(chunks, behind_last) - behind_first, 0)
    some = size * (rising * (2 * behind_first + rising - 1) // 2) - rising * kv_start
    every = np.maximum(chunks - np.maximum(behind_first, behind_last), 0) * keys
    of_rest = np.minimum(np.maximum(chunks * size - kv_start, 0), keys)
    return size * (some + every) + rest * of_rest


def _is_whole(given: object) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)

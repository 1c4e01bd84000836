"""What share of far keys and queries attention keeps, by layer, key-value head and level.

The paper drops a share `p` of the keys of level 1 (its level 2), and more of those that are farther
away, as many as let a token attend to twice as few of a region twice as far: `(1 - p') = (1 - p) /
2^n` of the keys `n` levels farther are kept. (It prints the formula the other way round, by which
far levels would keep more than all.) Even at `p = 0` that drops half of level 2, so nothing dropped
is a setting of its own.

Ratios are in a file, of JSON:

    {"format": 1, "keys": [[[ratio, ...], ...], ...], "queries": ...}

with a list for each layer, of a list for each key-value head, of the share of rows that it keeps in
level 0 (a rank's own), 1 (its node), 2 (its rack) and 3 (other racks), as many as there are;
`queries` may be left out, if all are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.json_files import read_text
from distca.plan.span import Floats, Int64s
from distca.schedule.serving.csps.levels import LEVELS
from distca.whole_file import write_text

OfHeads = tuple[tuple[float, ...], ...]
"""Shares of rows in a layer, by key-value head and level."""

Ratios = tuple[OfHeads, ...]
"""Shares of rows, by layer, key-value head and level."""

FORMAT = 1

_OR = "give a file of ratios, a share to drop, or --calibration, which `distca tune sparsity` makes"


def kept_count(ratio: Floats, rows: Int64s) -> Int64s:
    """How many of some rows are kept: `ratio * rows` rounded up, so of some rows at least one.

    What lies above a whole number by less than a millionth counts as that number, so that a tenth
    of 30 rows is 3.

    Args:
        ratio: share that is kept, in (0, 1].
        rows: rows, of the same shape or one that broadcasts with it.
    """
    return np.minimum(np.ceil(ratio * rows - 1e-6).astype(np.int64), rows)


@dataclass(frozen=True)
class Sparsity:
    """Shares of rows that attention keeps.

    The first layer, the last layer, and level 0, a rank's own rows, keep all. Of queries the
    last token's is always kept.

    Attributes:
        keys: share of keys and values.
        queries: share of queries, likewise.

    Raises:
        ValueError: the ratios are not of this form.
    """

    keys: Ratios
    queries: Ratios

    def __post_init__(self) -> None:
        sizes = {
            (len(of_layers), len(heads), len(levels))
            for of_layers in (self.keys, self.queries)
            for heads in of_layers or ((),)
            for levels in heads or ((),)
        }
        if len(sizes) != 1 or min(min(sizes)) < 1 or max(sizes)[2] > len(LEVELS):
            raise ValueError(
                "ratios of keys and queries are lists of as many layers, each of as many key-value "
                f"heads, each of the same 1 to {len(LEVELS)} levels"
            )
        for name, ratios in (("keys", self.keys), ("queries", self.queries)):
            table = np.array(ratios)
            if not ((table > 0) & (table <= 1)).all():
                raise ValueError(f"kept ratios of {name} are above 0 and at most 1")
            if (table[:, :, 0] != 1).any():
                raise ValueError(f"level 0, a rank's own {name}, keeps all: give 1 there")
            if (table[[0, -1]] != 1).any():
                raise ValueError(f"the first and the last layer keep all {name}: give 1 there")

    @staticmethod
    def nothing_dropped(layers: int, kv_heads: int, levels: int = len(LEVELS)) -> Sparsity:
        """Keeps all: dense attention, to the bit."""
        all_of_them = ((((1.0,) * levels,) * kv_heads),) * layers
        return Sparsity(all_of_them, all_of_them)

    @staticmethod
    def of_drop_ratio(
        drop: float,
        layers: int,
        kv_heads: int,
        levels: int = len(LEVELS),
        drop_of_queries: float = 0.0,
    ) -> Sparsity:
        """Drops a share of level 1 in all layers but the first and the last, and more of those
        farther away, by the paper's formula; 0: nothing at all.

        Args:
            drop: share of level 1's keys that is dropped, p.
            layers: layers of the model.
            kv_heads: key-value heads of a layer.
            levels: levels that there are.
            drop_of_queries: like `drop`, of queries.

        Raises:
            ValueError: a share is below 0, or not below 1.
        """
        dense = Sparsity.nothing_dropped(layers, kv_heads, levels)
        tables = []
        for share in (drop, drop_of_queries):
            if not 0 <= share < 1:
                raise ValueError(f"{share} of the rows can't be dropped: give 0 to below 1")
            kept = (1.0, *((1 - share) / 2**n if share else 1.0 for n in range(levels - 1)))
            inner = ((kept,) * kv_heads,) * max(layers - 2, 0)
            tables.append(dense.keys[:1] + inner + dense.keys[1:][-1:])
        return Sparsity(*tables)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.keys)

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return len(self.keys[0])

    @property
    def levels(self) -> int:
        """Levels that have ratios; those farther away keep what the last of them does."""
        return len(self.keys[0][0])

    @property
    def drops(self) -> bool:
        """Whether anything is dropped."""
        return any(map(self.drops_in, range(self.layers)))

    def drops_in(self, layer: int) -> bool:
        """Returns whether a layer drops anything."""
        both = self.keys[layer] + self.queries[layer]
        return any(ratio < 1 for levels in both for ratio in levels)

    def repeated(self, heads: int) -> Sparsity:
        """Returns the ratios of that many heads, neighbours being copies of one, as tensor-parallel
        ranks have them where they outnumber the heads."""
        times = max(heads // self.kv_heads, 1)
        tables = (
            tuple(tuple(head for head in of_heads for _ in range(times)) for of_heads in table)
            for table in (self.keys, self.queries)
        )
        return Sparsity(*tables)

    def of_busiest(self, parts: int) -> Sparsity:
        """Returns the ratios of one of that many equal parts of the heads: in each layer of that
        which keeps most keys, for which the others wait."""
        size = self.kv_heads // parts
        kept = np.array(self.keys).reshape(self.layers, parts, -1).sum(axis=2)
        first = (kept.argmax(axis=1) * size).tolist()
        tables = (
            tuple(of_heads[at : at + size] for of_heads, at in zip(table, first, strict=True))
            for table in (self.keys, self.queries)
        )
        return Sparsity(*tables)

    def check_fits(self, layers: int, kv_heads: int) -> None:
        """Checks that the ratios are of a model.

        Raises:
            ValueError: the model has other layers or heads.
        """
        if (self.layers, self.kv_heads) != (layers, kv_heads):
            raise ValueError(
                f"the sparsity is of {self.layers} layers of {self.kv_heads} key-value heads, but "
                f"the model has {layers} of {kv_heads}: give ratios for this model"
            )

    def save(self, path: Path) -> None:
        """Writes the ratios to a file, replaced if it exists."""
        saved = {"format": FORMAT, "keys": self.keys, "queries": self.queries}
        write_text(path, json.dumps(saved) + "\n")

    @staticmethod
    def load(path: Path) -> Sparsity:
        """Reads what `save` wrote; further entries of the file are left alone.

        Raises:
            ValueError: the file is missing, or has no ratios of this form.
        """
        text = read_text(path, _OR)
        try:
            saved = json.loads(text)
            if saved["format"] != FORMAT:
                raise ValueError(f"its format is {saved['format']}, not {FORMAT}")
            keys = _ratios(saved["keys"])
            if "queries" in saved:
                return Sparsity(keys, _ratios(saved["queries"]))
            kept = tuple(tuple((1.0,) * len(levels) for levels in heads) for heads in keys)
            return Sparsity(keys, kept)
        except (
            *(LookupError, TypeError, AttributeError, ValueError),
            *(RecursionError, OverflowError),
        ) as error:
            raise ValueError(
                f"{path} is no usable sparsity ({error or type(error).__name__}): {_OR}"
            ) from error


def _ratios(saved: Sequence[Sequence[Sequence[float]]]) -> Ratios:
    """Nested lists of numbers as ratios."""
    ratios = tuple(tuple(tuple(map(float, levels)) for levels in heads) for heads in saved)
    if not all(math.isfinite(ratio) for heads in ratios for levels in heads for ratio in levels):
        raise ValueError("a ratio is no finite number")
    return ratios

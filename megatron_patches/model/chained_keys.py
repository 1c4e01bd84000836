"""Keys and values that micro-batches of a chain lend to later ones, and their gradients.

Where latents of keys and values travel, these are lent with them.

A document may extend over several micro-batches, whose backward passes run in the opposite order of
their forward passes (`distca.schedule.training.tick_schedule`). So all gradients that later
micro-batches have for the keys of an earlier one are there, and add up, before its own backward
pass comes.
Autograd cannot add them, since each micro-batch has a graph of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Place = tuple[int, int]
"""A nano-batch in a chain: the number of its micro-batch, and its number there."""
KeyRows = tuple[torch.Tensor, ...]
"""Keys, values and, where these travel, their latents; or the gradients of all."""


@dataclass
class ChainedKeys:
    """Lent keys and values of one chain on one rank, by layer and by the nano-batch that lends.

    Attributes:
        lent: lent rows.
        gradients: sums of the gradients that have come, in at least 32 bits.
        returned: number of nano-batches that have added theirs.
    """

    lent: dict[tuple[int, Place], KeyRows] = field(default_factory=dict)
    gradients: dict[tuple[int, Place], KeyRows] = field(default_factory=dict)
    returned: dict[tuple[int, Place], int] = field(default_factory=dict)

    def add(self, at: tuple[int, Place], gradients: KeyRows) -> None:
        """Adds gradients of lent rows."""
        if at in self.gradients:
            for total, more in zip(self.gradients[at], gradients, strict=True):
                total += more
        else:
            dtype = torch.promote_types(gradients[0].dtype, torch.float32)
            self.gradients[at] = tuple(each.to(dtype, copy=True) for each in gradients)
        self.returned[at] = self.returned.get(at, 0) + 1

    def take(self, at: tuple[int, Place], borrowers: int) -> KeyRows:
        """Returns the whole gradients of lent rows, and forgets the rows."""
        returned = self.returned.pop(at, 0)
        assert returned == borrowers, f"keys {at} went back before {borrowers - returned} borrowers"
        del self.lent[at]
        return self.gradients.pop(at)


@dataclass(frozen=True)
class ChainPart:
    """Description of what a nano-batch, or a whole micro-batch, borrows and lends in its chain.

    Attributes:
        keys: keys of the chain.
        place: nano-batch that this describes.
        borrows: nano-batches of earlier micro-batches whose lent rows follow the own keys.
        borrowers: number of nano-batches of later micro-batches that borrow.
        lent_rows: own rows that are lent, int64; None: nothing is lent.
    """

    keys: ChainedKeys
    place: Place
    borrows: tuple[Place, ...]
    borrowers: int
    lent_rows: torch.Tensor | None

    def lend(self, layer: int, rows: KeyRows) -> KeyRows:
        """Lends rows to later micro-batches.

        Args:
            layer: number of the layer.
            rows: own keys `[tokens, kv_heads, head_dim]`, values, and what else is lent.

        Returns:
            The same, with the gradients of those that borrow.
        """
        if self.lent_rows is None:
            return rows
        return _Lend.apply(self, layer, *rows)  # type: ignore[no-any-return,no-untyped-call]

    def extend(self, layer: int, rows: KeyRows) -> KeyRows:
        """Returns own rows followed by those that are borrowed."""
        if not self.borrows:
            return rows
        return _Extend.apply(self, layer, *rows)  # type: ignore[no-any-return,no-untyped-call]


class _Lend(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, part: ChainPart, layer: int, *own: torch.Tensor
    ) -> KeyRows:
        ctx.part, ctx.at = part, (layer, part.place)
        rows = part.lent_rows
        assert rows is not None
        # All rows need no copy: the layer keeps them anyway, where it is not recomputed.
        part.keys.lent[ctx.at] = tuple(
            each.detach() if len(rows) == len(each) else each.detach().index_select(0, rows)
            for each in own
        )
        return tuple(each.view_as(each) for each in own)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        part: ChainPart = ctx.part
        rows, more = part.lent_rows, part.keys.take(ctx.at, part.borrowers)
        assert rows is not None
        whole = []
        for own, borrowed in zip(gradients, more, strict=True):
            total = (own.index_select(0, rows) + borrowed).to(own.dtype)
            whole.append(own.index_copy(0, rows, total))
        return None, None, *whole


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, part: ChainPart, layer: int, *own: torch.Tensor
    ) -> KeyRows:
        ctx.part, ctx.layer = part, layer
        lent = [part.keys.lent[layer, place] for place in part.borrows]
        ctx.sizes = [len(own[0]), *(len(theirs[0]) for theirs in lent)]
        return tuple(
            torch.cat([each, *theirs])
            for each, theirs in zip(own, zip(*lent, strict=True), strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        part: ChainPart = ctx.part
        own, *lent = zip(*(torch.split(each, ctx.sizes) for each in gradients), strict=True)
        for place, theirs in zip(part.borrows, lent, strict=True):
            part.keys.add((ctx.layer, place), theirs)
        return None, None, *own

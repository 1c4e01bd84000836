"""Keys and values that servers make of latents, and the gradients that go back through it.

Multi-latent attention expands a token's latent to the keys and values of all heads by a weight,
and all heads share a rotated part of the key. Where all servers have the layer's weight, as those
of one pipeline stage do, latents and rotated parts travel instead of what they are expanded to. An
owner has its own rows expanded already; a server expands what it receives. On the way back it has
gradients of keys and values. It makes of them those of the latents, which the owners add up, and
that of the weight, which data-parallel ranks add up in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distca.attention.merge import sum_parts
from distca.runtime.exchange import Rows
from distca.runtime.messages import PackedRows
from distca.runtime.row_kernels import ServedRows
from distca.runtime.workspace import Workspace


@dataclass(frozen=True)
class SentLatents:
    """The latents of a rank's tokens, and the weight that expands them.

    Attributes:
        latent: latents `[local key rows, kv_rank]`.
        rotated_dim: elements of a key's head that all heads share, the last ones.
        weight: weight `[kv_heads * (own key elements + v_head_dim), kv_rank]`, head by head; None:
            this rank has none, and receives no rows.
    """

    latent: torch.Tensor
    rotated_dim: int
    weight: torch.Tensor | None

    def travelling(self, k_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns latents and shared parts, whose rows travel, of keys that they belong to."""
        return self.latent, k_THD[:, 0, -self.rotated_dim :].contiguous()


def expand(kv: ServedRows, weight: torch.Tensor, scratch: Workspace) -> None:
    """Writes the keys and values of received latents.

    Args:
        kv: memory of the received keys and values, and latents that were received.
        weight: weight that expands them, outside of autograd's graph.
        scratch: memory for temporaries.
    """
    assert kv.received is not None
    assert kv.latents is not None
    latent, rotated = kv.latents.tensors
    with scratch.borrowed():
        k, v = kv.received.tensors
        own = k.shape[2] - rotated.shape[1]
        both = scratch.take((len(k), len(weight)), latent.dtype)
        torch.mm(latent, weight.t(), out=both)
        heads = both.view(len(k), k.shape[1], own + v.shape[2])
        k[..., :own] = heads[..., :own]
        k[..., own:] = rotated[:, None]
        v.copy_(heads[..., own:])


class LatentGradients:
    """Gradients of what a server received, latents and shared parts, made of those of keys and
    values.

    Args:
        rows: rows of keys and values.
        parts: gradients of keys, and of values, of all kernel calls, one after the other.
        received: latents that were received.
        weight: weight that expanded them.
        scratch: memory for temporaries, which must stay borrowed while this is used.
    """

    def __init__(
        self,
        rows: Rows,
        parts: Sequence[torch.Tensor],
        received: PackedRows,
        weight: torch.Tensor,
        scratch: Workspace,
    ) -> None:
        self._latent, rotated = received.tensors
        self._weight = weight
        dk, dv = (_of_received(rows, each, scratch) for each in parts)
        own = dk.shape[2] - rotated.shape[1]
        self._shared = dk[..., own:]
        self._expanded = scratch.take((rows.received, len(weight)), dk.dtype)
        heads = self._expanded.view(rows.received, dk.shape[1], own + dv.shape[2])
        heads[..., :own] = dk[..., :own]
        heads[..., own:] = dv

    def write(self, into: PackedRows, piece: slice) -> None:
        """Writes the gradients of some latents and rotated parts."""
        latent, rotated = into.tensors
        torch.mm(self._expanded[piece], self._weight, out=latent)
        torch.sum(self._shared[piece], dim=1, out=rotated)

    def of_weight(self) -> torch.Tensor:
        """Returns the gradient of the weight, in new memory."""
        return torch.mm(self._expanded.t(), self._latent)


def _of_received(rows: Rows, parts: torch.Tensor, scratch: Workspace) -> torch.Tensor:
    """Gradients of received rows: the sum of all calls' `parts`."""
    sums = rows.received_sums
    if sums is None:
        return parts[rows.local : rows.served]
    if sums.begins is None:
        return scratch.gather(parts, sums.parts)
    return sum_parts(parts, sums)

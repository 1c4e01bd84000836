"""All-to-alls by which neighbouring ranks share the heads of core attention.

Rows of all heads of a rank become rows of some heads of all ranks, and back: what DeepSpeed calls
Ulysses (Jacobs et al., 2023, https://arxiv.org/abs/2309.14509), and Megatron `--cp-comm-type a2a`.
The ranks that share heads are one attention server: its plan has the rows of all of them, and each
computes it for its heads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from distca.cost.volume import SHARED_HEADS


@dataclass(frozen=True)
class SharedHeads:
    """The ranks that share heads with this one.

    Attributes:
        group: their process group, in the order of their rows.
        bytes_sent: bytes that this rank has sent so far, by phase (`SHARED_HEADS`).
    """

    group: dist.ProcessGroup
    bytes_sent: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def of_rank(self, per_head: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a tensor with one element for each head, `[heads]`."""
        return per_head.chunk(self.size)[self.group.rank()]

    def gather_rows(self, *tensors_THD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gathers all ranks' rows of this rank's heads, in one message to each. Collective.

        Args:
            tensors_THD: `[rows, heads, head_dim]` each, of one dtype, with the same rows and
                numbers of heads that the size divides.

        Returns:
            `[size * rows, heads / size, head_dim]` of each: the first rank's rows, the second's,
            and so on.
        """
        size, rows = self.size, len(tensors_THD[0])
        # A rank's heads are neighbours.
        parts = [each.reshape(rows, size, -1) for each in tensors_THD]
        widths = [each.shape[-1] for each in parts]
        by_rank = torch.cat(parts, dim=-1).transpose(0, 1)
        received: torch.Tensor = _AllToAll.apply(by_rank, self)  # type: ignore[no-untyped-call]
        split = torch.split(received.reshape(size * rows, -1), widths, dim=-1)
        return tuple(
            each.reshape(size * rows, tensor.shape[1] // size, tensor.shape[2])
            for each, tensor in zip(split, tensors_THD, strict=True)
        )

    def gather_heads(self, tensor_THD: torch.Tensor) -> torch.Tensor:
        """Gathers all heads of this rank's rows; the opposite of `gather_rows`. Collective.

        Args:
            tensor_THD: `[size * rows, heads, head_dim]`.

        Returns:
            `[rows, size * heads, head_dim]`.
        """
        rows = len(tensor_THD) // self.size
        by_rank = tensor_THD.reshape(self.size, rows, *tensor_THD.shape[1:])
        received: torch.Tensor = _AllToAll.apply(by_rank, self)  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).reshape(rows, -1, tensor_THD.shape[2])

    def exchange(self, parts: torch.Tensor, phase: str) -> torch.Tensor:
        """Sends the n-th part of a tensor to the n-th rank; returns what came. Collective."""
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self.bytes_sent[phase] += sent.nbytes // self.size * (self.size - 1)
        return received


class _Context(FunctionCtx):
    heads: SharedHeads


class _AllToAll(torch.autograd.Function):
    """`SharedHeads.exchange`, whose gradients go back the same way."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _Context, parts: torch.Tensor, heads: SharedHeads
    ) -> torch.Tensor:
        ctx.heads = heads
        return heads.exchange(parts, SHARED_HEADS["forward"])

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: _Context, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return ctx.heads.exchange(gradient, SHARED_HEADS["backward"]), None

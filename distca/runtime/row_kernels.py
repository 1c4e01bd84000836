"""What moves rows between tensors, messages and kernel calls, and makes rows of their parts.

`torch_rows.py` does it by torch's operators. It is the reference, and what runs on CPUs.
`fused_rows.py` does it by fused kernels, one launch for each method. `row_choice.py` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from distca.attention.kernel import Outputs
from distca.runtime.exchange import CallRows
from distca.runtime.messages import KindLayout
from distca.runtime.row_sources import MergedRows, RowSource, SummedRows
from distca.runtime.served_rows import ServedRows
from distca.runtime.workspace import Workspace

RecvRows = torch.Tensor | Sequence[torch.Tensor] | None
"""Memory for a kind's rows that arrive: words of packed rows, or each tensor; None: none arrive."""


class RowKernels(Protocol):
    """Operations on rows. Messages are words, `distca.runtime.messages.WORD`."""

    def pack(
        self,
        messages: torch.Tensor,
        kinds: Sequence[tuple[KindLayout, RowSource]],
        scratch: Workspace,
    ) -> None:
        """Writes the rows of each kind into messages.

        Args:
            messages: messages that are sent.
            kinds: where the rows of queries, and of keys, lie in messages; what they are made of.
            scratch: memory for temporaries.
        """
        ...

    def unpack(self, messages: torch.Tensor, kinds: Sequence[tuple[KindLayout, RecvRows]]) -> None:
        """Reads the rows of each kind from messages to memory for them."""
        ...

    def take(
        self, kinds: Sequence[tuple[ServedRows, CallRows]], scratch: Workspace
    ) -> list[torch.Tensor]:
        """Returns a kernel call's rows of each tensor of each kind.

        Those of one piece stay where they lie, and others are copied to scratch memory.
        """
        ...

    def merge(self, source: MergedRows, scratch: Workspace) -> Outputs:
        """Returns merged outputs and LSE, in new memory."""
        ...

    def sum(self, sources: Sequence[SummedRows]) -> list[torch.Tensor]:
        """Returns the rows of each tensor of each source, in new memory."""
        ...

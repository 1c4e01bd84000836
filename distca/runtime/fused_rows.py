"""`RowKernels` by fused kernels: each method is one launch, however many ranks and tensors it has.

The exceptions: rows that a function computes take its own operators first, and a method that has
no rows launches nothing. Nothing but these rows needs memory on the way into messages, and merged
rows go where they belong at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from distca.attention.fused import FusedKernels, RowJob, RowMemory, load_fused_kernels
from distca.attention.kernel import Outputs
from distca.attention.merge import Sums
from distca.runtime.exchange import CallRows, Gather, Piece
from distca.runtime.messages import KindLayout, PackedRows, as_numbers
from distca.runtime.row_kernels import RecvRows, RowKernels, ServedRows, TorchRowKernels
from distca.runtime.row_sources import MergedRows, RowSource, SummedRows
from distca.runtime.workspace import Workspace


def select_row_kernels(device_type: str) -> RowKernels:
    """Makes the row kernels of a device: fused ones on GPUs where triton is installed.

    Args:
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: triton is installed but cannot be used.
    """
    kernels = load_fused_kernels(device_type)
    if kernels is None:
        return TorchRowKernels()
    return FusedRowKernels(kernels)


class FusedRowKernels:
    """See `RowKernels`.

    Args:
        kernels: launches of the fused kernels.
    """

    def __init__(self, kernels: FusedKernels) -> None:
        self._kernels = kernels

    def pack(
        self,
        messages: torch.Tensor,
        kinds: Sequence[tuple[KindLayout, RowSource]],
        scratch: Workspace,
    ) -> None:
        """See `RowKernels.pack`."""
        jobs: list[RowJob] = []
        with scratch.borrowed():
            for found, source in kinds:
                if not found.rows:
                    continue
                if isinstance(source, MergedRows):
                    jobs += self._merged(source, found.memories(messages), found.rows)
                elif isinstance(source, SummedRows):
                    jobs += _summed(source, found.memories(messages))
                elif len(found.pieces) == 1:
                    # Written where it belongs.
                    ((piece, words),) = found.views(messages)
                    source.write(PackedRows.at(words, found.format), piece, scratch)
                else:
                    rows = PackedRows.take(scratch, found.format, found.rows)
                    source.write(rows, slice(0, found.rows), scratch)
                    words, into = as_numbers(rows.words), found.memory(messages)
                    jobs.append(RowJob(RowMemory(words), into, found.rows))
            self._kernels.make_rows(jobs)

    def unpack(self, messages: torch.Tensor, kinds: Sequence[tuple[KindLayout, RecvRows]]) -> None:
        """See `RowKernels.unpack`."""
        jobs: list[RowJob] = []
        for found, target in kinds:
            if not found.rows or target is None:
                continue
            if isinstance(target, torch.Tensor):
                pairs = [(found.memory(messages), as_numbers(target))]
            else:
                pairs = list(zip(found.memories(messages), target, strict=True))
            jobs += (RowJob(source, RowMemory(into), found.rows) for source, into in pairs)
        self._kernels.make_rows(jobs)

    def take(
        self, kinds: Sequence[tuple[ServedRows, CallRows]], scratch: Workspace
    ) -> list[torch.Tensor]:
        """See `RowKernels.take`."""
        taken: list[torch.Tensor] = []
        jobs: list[RowJob] = []
        for served, rows in kinds:
            if isinstance(rows, Piece):
                taken += served.take(rows, scratch)
                continue
            for number in range(len(served.local)):
                jobs.append(_taken(served, number, rows, scratch))
                taken.append(jobs[-1].into.rows)
        self._kernels.make_rows(jobs)
        return taken

    def merge(self, source: MergedRows, scratch: Workspace) -> Outputs:
        """See `RowKernels.merge`."""
        rows = source.own.stop if source.merge is None else source.merge.rows.shape[0]
        out, lse = (each.new_empty((rows, *each.shape[1:])) for each in source.parts.tensors)
        self._kernels.make_rows(self._merged(source, [RowMemory(out), RowMemory(lse)], rows))
        return out, lse

    def sum(self, sources: Sequence[SummedRows]) -> list[torch.Tensor]:
        """See `RowKernels.sum`."""
        made: list[torch.Tensor] = []
        jobs: list[RowJob] = []
        for source in sources:
            rows = source.rows
            into = [each.new_empty((rows, *each.shape[1:])) for each in source.tensors]
            jobs += _summed(source, [RowMemory(each) for each in into])
            made += into
        self._kernels.make_rows(jobs)
        return made

    def _merged(self, source: MergedRows, into: Sequence[RowMemory], rows: int) -> list[RowJob]:
        """Launches a merge; returns the jobs of rows that need none."""
        merge, tensors = source.merge, source.parts.tensors
        if merge is None:
            tensors, sums = [each[source.own] for each in tensors], None
        elif merge.merges is None:
            sums = Sums(merge.rows, None)
        else:
            (out, lse), (into_out, into_lse) = tensors, into
            self._kernels.merge_rows(out, lse, merge, into_out, into_lse)
            return []
        return [
            RowJob(RowMemory(tensor), target, rows, sums)
            for tensor, target in zip(tensors, into, strict=True)
        ]


def _summed(source: SummedRows, into: Sequence[RowMemory]) -> Iterator[RowJob]:
    for tensor, target in zip(source.tensors, into, strict=True):
        yield RowJob(RowMemory(tensor), target, source.rows, source.sums)


def _taken(served: ServedRows, number: int, rows: CallRows, scratch: Workspace) -> RowJob:
    """The job that copies a call's rows of a tensor, those of both memories at once."""
    assert not isinstance(rows, Piece)
    local = served.local[number]
    other = None if served.received is None else RowMemory(served.received.tensors[number])
    index = rows.rows if isinstance(rows, Gather) else rows.served
    source: RowMemory | None = RowMemory(local)
    if isinstance(rows, Gather):
        source, other = (other if rows.received else source), None
    assert source is not None
    into = RowMemory(scratch.rows(local, index.shape[0]))
    return RowJob(source, into, index.shape[0], Sums(index, None), other, local.shape[0])

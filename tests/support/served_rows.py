"""Served rows by which the rows of a kernel call are told."""

from __future__ import annotations

import numpy as np
import torch

from distca.runtime.exchange import CallRows
from distca.runtime.messages import WORD, PackedRows, RowFormat, row_types
from distca.runtime.row_kernels import ServedRows
from distca.runtime.workspace import Workspace


def numbered_rows(local: int, received: int) -> ServedRows:
    """Rows of two tensors that hold the numbers of served rows, and those times -1."""
    numbers = torch.arange(local + received)
    tensors = [numbers.view(-1, 1).expand(-1, 6).float(), -numbers.view(-1, 1, 1).double()]
    own = [each[:local].clone() for each in tensors]
    if not received:
        return ServedRows(own, None)
    row = RowFormat.of(row_types(own))
    arrived = PackedRows.at(torch.zeros((received, row.words), dtype=WORD), row)
    for target, tensor in zip(arrived.tensors, tensors, strict=True):
        target.copy_(tensor[local:])
    return ServedRows(own, arrived)


def taken_rows(rows: CallRows, local: int, received: int) -> np.ndarray:
    """Numbers of the served rows that a call takes; both tensors' rows agree."""
    scratch = Workspace(torch.device("cpu"))
    scratch.reserve(2**20)
    first, second = numbered_rows(local, received).take(rows, scratch)
    assert (first == first[:, :1]).all()
    assert (first[:, 0] == -second[:, 0, 0]).all()
    return first[:, 0].long().numpy()

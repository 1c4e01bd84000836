"""Megatron's index of a dataset (`.idx`), read without Megatron."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.plan.span import Int64s

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = "<QBQQ"
_HEADER_BYTES = len(_MAGIC) + struct.calcsize(_HEADER)
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes of a token by Megatron's code of its type: uint8, int8, int16, int32, int64, float64,
float32, uint16."""


@dataclass(frozen=True)
class Index:
    """The tables of an index.

    Attributes:
        token_bytes: bytes of a token in the `.bin` file.
        lengths: tokens of each sequence, int64 `[sequences]`.
        pointers: where each sequence starts in the `.bin` file, in bytes, int64 `[sequences]`.
        documents: the first sequence of each document, and the number of sequences, int64
            `[documents + 1]`.
    """

    token_bytes: int
    lengths: Int64s
    pointers: Int64s
    documents: Int64s

    def document_lengths(self) -> Int64s:
        """Tokens of each document, all its sequences together, int64 `[documents]`."""
        before = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.diff(before[self.documents])


def read_index(path: Path) -> Index:
    """Reads an index and checks that it holds together.

    Raises:
        ValueError: it is no index, is cut off, or has impossible tables.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
            raise ValueError(
                f"{path} is no index of an indexed dataset, or is cut off: make it again"
            )
        version, code, sequences, edges = struct.unpack(_HEADER, header[len(_MAGIC) :])
        expected = _HEADER_BYTES + sequences * (4 + 8) + edges * 8
        size = path.stat().st_size
        if version != 1 or code not in TOKEN_BYTES or size < expected:
            raise ValueError(
                f"{path} is corrupt or cut off ({size} bytes, version {version}; {sequences} "
                f"sequences need {expected} bytes): make it again"
            )
        lengths = np.fromfile(file, dtype="<i4", count=sequences).astype(np.int64)
        pointers = np.fromfile(file, dtype="<i8", count=sequences).astype(np.int64)
        documents = np.fromfile(file, dtype="<i8", count=edges).astype(np.int64)
    ordered = len(documents) > 0 and documents[0] == 0 and documents[-1] == sequences
    if (
        not ordered
        or (np.diff(documents) < 0).any()
        or min(lengths.min(initial=0), pointers.min(initial=0)) < 0
    ):
        raise ValueError(f"{path} is corrupt (its documents are no ranges): make it again")
    return Index(TOKEN_BYTES[code], lengths, pointers, documents)

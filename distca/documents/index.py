"""Megatron's indexed datasets (`.bin` and `.idx`), read and written without Megatron."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from distca.plan.span import Int64s

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = "<QBQQ"
_HEADER_BYTES = len(_MAGIC) + struct.calcsize(_HEADER)
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes of a token by Megatron's code of its dtype: uint8, int8, int16, int32, int64, float64,
float32, uint16."""

LARGEST_TOKEN = 2**31 - 1
"""Largest token id that `IndexedWriter` writes: an int32."""


@dataclass(frozen=True)
class Index:
    """The tables of an index.

    Attributes:
        token_bytes: bytes of a token in the `.bin` file.
        lengths: tokens of each sequence, int64 `[sequences]`.
        pointers: first byte of each sequence in the `.bin` file, int64 `[sequences]`.
        documents: first sequence of each document, and the number of sequences, int64
            `[documents + 1]`.
    """

    token_bytes: int
    lengths: Int64s
    pointers: Int64s
    documents: Int64s

    def document_lengths(self) -> Int64s:
        """Returns the tokens of each document, in all its sequences, int64 `[documents]`."""
        before = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.diff(before[self.documents])


def check_files_exist(prefix: str) -> None:
    """Checks that both files of an indexed dataset exist.

    Args:
        prefix: path without `.bin` or `.idx`.

    Raises:
        ValueError: one of them does not; the message names it.
    """
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            raise ValueError(
                f"{prefix}{suffix} does not exist: data are given by the prefix of an indexed "
                "dataset (make one with `distca prepare`)"
            )


def read_index(path: Path) -> Index:
    """Reads an index and checks its consistency.

    Raises:
        ValueError: the file is not an index, is cut off or too long, or has impossible tables.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
            raise ValueError(
                f"{path} is not an index of a Megatron dataset, or is cut off: make it again with "
                "`distca prepare`"
            )
        version, code, sequences, edges = struct.unpack(_HEADER, header[len(_MAGIC) :])
        expected = _HEADER_BYTES + sequences * (4 + 8) + edges * 8
        size = path.stat().st_size
        if version != 1 or code not in TOKEN_BYTES or size < expected:
            raise ValueError(
                f"{path} is corrupt or cut off ({size} bytes, version {version}; {sequences} "
                f"sequences need {expected} bytes): make it again"
            )
        # Multimodal datasets have a byte more for each sequence.
        if size not in (expected, expected + sequences):
            raise ValueError(
                f"{path} has {size} bytes, but its {sequences} sequences take {expected}: it is "
                "corrupt, or two processes wrote it; make it again"
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


class IndexedWriter:
    """Writes a dataset's tokens, one sequence a document, and then its index.

    Args:
        tokens: path of the `.bin` file.
        vocab_size: bound of the token ids; small vocabularies take two bytes a token, as
            Megatron's own tools write them, others four.

    Attributes:
        lengths: tokens of the documents so far.
    """

    def __init__(self, tokens: Path, vocab_size: int) -> None:
        self.lengths: list[int] = []
        self._code, self._dtype = (8, "<u2") if vocab_size < 65_500 else (4, "<i4")
        self._file = tokens.open("wb")

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add_document(self, ids: Sequence[int]) -> None:
        """Appends a document's token ids."""
        self._file.write(np.array(ids, dtype=self._dtype).tobytes())
        self.lengths.append(len(ids))

    def write_index(self, path: Path) -> None:
        """Writes the `.idx` file of all documents so far."""
        lengths = np.array(self.lengths, dtype=np.int64)
        starts = (np.cumsum(lengths) - lengths) * TOKEN_BYTES[self._code]
        count = len(lengths)
        header = struct.pack(_HEADER, 1, self._code, count, count + 1)
        tables = (lengths.astype("<i4"), starts.astype("<i8"), np.arange(count + 1, dtype="<i8"))
        path.write_bytes(_MAGIC + header + b"".join(table.tobytes() for table in tables))

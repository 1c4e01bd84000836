"""A model that is loaded to a simulated GPU: how much of its weights the host has at a time.

Its arguments are the model's folder, and numbers of ranks that share its layers. For each number
this is the first rank. It writes to standard output, as JSON, for each: most bytes of weights on
the host at a time, and the bytes of all weights on the GPU.
"""

from __future__ import annotations

import json
import sys
import weakref
from typing import Any
from unittest import mock

import torch

from distca.checkpoints.stored_weights import StoredTensor
from distca.inference.models import read_model
from distca.inference.tensor_parallel import TensorRanks


def main(argv: list[str]) -> list[dict[str, int]]:
    """Loads the model for each number of ranks."""
    return [_loaded(argv[0], int(size)) for size in argv[1:]]


def _loaded(folder: str, size: int) -> dict[str, int]:
    here: dict[int, int] = {}
    most = [0]
    read = StoredTensor.__getitem__

    def noted(self: StoredTensor, where: Any) -> torch.Tensor:
        part = read(self, where)
        here[id(part)] = part.nbytes
        weakref.finalize(part, here.pop, id(part), None)
        most[0] = max(most[0], sum(list(here.values())))
        return part

    model = read_model(folder, torch.bfloat16, size)
    with mock.patch.object(StoredTensor, "__getitem__", noted):
        loaded = model.load(torch.device("cuda", 0), "sdpa", TensorRanks(0, size))
    assert all(each.is_cuda for each in (*loaded.parameters(), *loaded.buffers()))
    return {"host": most[0], "gpu": sum(each.nbytes for each in loaded.parameters())}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])))

"""A rank of two that uses two communicators in another order than its peer.

Its arguments are its number and a folder. It writes what NCCL says to `rank N` there.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def first_one(group: dist.ProcessGroup) -> None:
    """Waits for a collective."""
    dist.all_reduce(torch.ones(3, device="cuda"), group=group)


def then_other(group: dist.ProcessGroup) -> None:
    """Waits for a collective of another group."""
    dist.all_reduce(torch.ones(3, device="cuda"), group=group)


def main(rank: int, folder: Path) -> None:
    """Waits in vain."""
    limit = timedelta(seconds=4)
    file = dist.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", None, limit, 2, rank, file)
    one, other = dist.new_group(timeout=limit), dist.new_group(timeout=limit)
    assert one is not None
    assert other is not None
    first_one(one)
    try:
        if rank:
            then_other(other)
        else:
            first_one(one)
    except RuntimeError as error:
        (folder / f"rank {rank}").write_text(str(error))
    # Gloo's threads still run a collective that never ends: destructors at an ordinary exit meet
    # them now and then, and C++ ends the process with "terminate called".
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

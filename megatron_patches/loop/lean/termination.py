"""The signal that lets a run of the lean loop end at an iteration's end."""

from __future__ import annotations

import signal
from typing import Any

import torch
import torch.distributed as dist


class TerminationSignal:
    """A handler of SIGTERM that lets the run end at an iteration's end."""

    def __init__(self) -> None:
        self._came = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: Any) -> None:
        self._came = True

    def came_on_any_rank(self) -> bool:
        """Whether any rank got the signal. Collective."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        came = torch.tensor([int(self._came)], device=device)
        dist.all_reduce(came, op=dist.ReduceOp.MAX)
        return bool(came.item())

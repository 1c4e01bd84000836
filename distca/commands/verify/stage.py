"""A stage of `distca verify`: what it is given, and what comes of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

State = Literal["ok", "not run", "failed"]

Figures = dict[str, float]
"""What a stage measured, by name."""

LONG_RUN = 0.01
"""Seconds of a run that can be timed."""

FAST_TFLOPS = 10.0
"""Rate of matrix products from which a device is a GPU that computes by itself."""

SEND = "send us verify.json of `distca verify --output DIR`"

_Gathered = TypeVar("_Gathered")


@dataclass(frozen=True)
class Context:
    """One of the processes that verify a machine together.

    Attributes:
        rank: number of this process.
        size: processes.
        local_rank: number of this process on its machine.
        local_size: processes of its machine.
        device: its GPU, or the CPU.
        control: group of all ranks, over gloo: it works where NCCL does not.
        folder: empty folder of this process.
        output: folder for the files that describe the machine; None: they are not written.
        found: figures of the stages before, by stage.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup
    folder: Path
    output: Path | None
    found: Mapping[str, Figures]

    @property
    def on_gpu(self) -> bool:
        """Whether this process has a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of rows: GPUs' kernels have no float32."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def synchronize(self) -> None:
        """Waits until the GPU has done its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @property
    def is_fast(self) -> bool:
        """Whether jobs are of a size that keeps GPUs busy: the stage of costs found them fast."""
        return self.found.get("costs", {}).get("product_tflops", 0.0) > FAST_TFLOPS

    def largest_size(self, least: int, most: int, run: Callable[[int], object]) -> int:
        """Doubles a size until a run takes long, on any rank. Collective.

        Args:
            least: first size.
            most: largest size.
            run: function that runs with a size.
        """
        size = least
        while size < most:
            run(size)
            self.synchronize()
            begin = time.perf_counter()
            run(size)
            self.synchronize()
            if self.largest(time.perf_counter() - begin) > LONG_RUN:
                break
            size *= 2
        return size

    def gather(self, mine: _Gathered) -> list[_Gathered]:
        """Gathers an object of each rank. Collective."""
        everyone = [mine] * self.size
        dist.all_gather_object(everyone, mine, group=self.control)
        return everyone

    def largest(self, mine: float) -> float:
        """Returns the largest number of all ranks; NaN if one is. Collective."""
        return float(np.max(self.gather(mine)))


@dataclass(frozen=True)
class Found:
    """What a stage found.

    Attributes:
        text: end of its line.
        figures: what it measured.
    """

    text: str
    figures: Figures


@dataclass(frozen=True)
class Stage:
    """A stage.

    Attributes:
        name: name, which begins its line.
        seconds: most that it may take on a machine without other work.
        run: function that runs it on each rank. Collective.
        cure: what to do where it does not end in time, or ends by an error that it does not expect.
    """

    name: str
    seconds: float
    run: Callable[[Context], Found]
    cure: str


@dataclass(frozen=True)
class Line:
    """What came of a stage.

    Attributes:
        stage: name of the stage.
        state: "ok"; "not run": this machine cannot run it; "failed".
        text: what was found, or why it was not run, or what is wrong.
        cure: what to do; empty unless it failed.
        seconds: time that it took.
        figures: what it measured.
        details: where it failed, and what a command printed that it ran.
    """

    stage: str
    state: State
    text: str
    cure: str
    seconds: float
    figures: Figures
    details: str = ""


class Fault(Exception):
    """Raised by a stage that finds something wrong.

    Args:
        text: what is wrong.
        cure: what to do.
        printed: what a command printed that failed.
    """

    def __init__(self, text: str, cure: str, printed: str = "") -> None:
        super().__init__(text)
        self.text, self.cure, self.printed = text, cure, printed


class NotRun(Exception):
    """Raised by a stage that this machine cannot run; the message says why."""


def described(error: BaseException, stage: Stage) -> tuple[str, str]:
    """Returns what an error says, in one line, and what to do."""
    if isinstance(error, Fault):
        return error.text, error.cure
    text = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return f"not enough memory: {text}", "end other processes of this GPU (nvidia-smi)"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "distca" in each.filename] or list(frames)
    where = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {text}{where}", stage.cure

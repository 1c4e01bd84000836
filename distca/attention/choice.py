"""The choice of a GPU's attention kernel: the fastest that it runs, and that is installed.

Nothing but the installed packages decides. A package that is installed and cannot be used is
refused rather than passed over: slower kernels than expected are found late.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from distca.attention import flash
from distca.attention.paged import PagedKernel

logger = logging.getLogger(__name__)

LARGEST_HEAD_DIM = 256
HEAD_DIM_STEP = 8

Capability = tuple[int, int]


@dataclass(frozen=True)
class GpuKernel:
    """A kernel that GPUs may have.

    Attributes:
        generation: version of FlashAttention.
        make: makes the kernel; fails where the package is broken.
        suits: tells whether it is for a GPU, by its major compute capability, and a head dimension.
        package: package that has it; None: torch.
        least: oldest version of the package that has the functions that we call.
        install: what to do for it.
        block: rows; a pool's blocks must be multiples of it.
        softcaps: whether it caps scores.
    """

    generation: int
    make: Callable[[], PagedKernel]
    suits: Callable[[int, int], bool]
    package: str | None = None
    least: tuple[int, ...] = ()
    install: str = ""
    block: int = 1
    softcaps: bool = True

    @property
    def version(self) -> str | None:
        """Version of the installed package, or of torch; None: it is not installed."""
        try:
            return importlib.metadata.version(self.package) if self.package else torch.__version__
        except importlib.metadata.PackageNotFoundError:
            return None

    def __str__(self) -> str:
        return f"FlashAttention {self.generation} ({self.package or 'torch'} {self.version})"

    def load(self) -> PagedKernel:
        """Makes the kernel.

        Raises:
            ValueError: the installed package is too old or broken; the message says what to do.
        """
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.version or ""))
        cure = f"{self.install}, or uninstall {self.package}: then another kernel is used"
        if numbers < self.least:
            least = ".".join(map(str, self.least))
            raise ValueError(f"{self.package} {self.version} is too old, {least} is needed: {cure}")
        try:
            return self.make()
        except Exception as error:  # A broken package's import raises anything.
            raise ValueError(
                f"{self.package or 'torch'} {self.version} is installed but cannot be used "
                f"({error}): {cure}"
            ) from error


GPU_KERNELS = (
    GpuKernel(
        3,
        flash.FlashAttn3Kernel,
        lambda major, head_dim: major == 9,
        "flash-attn-3",
        install="pip install flash-attn-3 from the index that has torch's CUDA builds",
    ),
    GpuKernel(
        4,
        flash.FlashAttn4Kernel,
        # Its kernels for 256 on Blackwell are others, with bounds of their own.
        lambda major, head_dim: major == 9 or (major == 10 and head_dim <= 128),
        "flash-attn-4",
        install="pip install --pre flash-attn-4",
    ),
    GpuKernel(
        2,
        flash.FlashAttn2Kernel,
        lambda major, head_dim: True,
        "flash-attn",
        (2, 7),
        install="pip install --no-build-isolation 'flash-attn>=2.7'",
        block=256,
    ),
    GpuKernel(2, flash.TorchFlashKernel, lambda major, head_dim: True, block=256, softcaps=False),
)
"""Kernels of all GPUs, the fastest first."""


def check_head_dim(head_dim: int) -> None:
    """Checks that some kernel for GPUs has a head dimension.

    Raises:
        ValueError: none has.
    """
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= LARGEST_HEAD_DIM:
        raise ValueError(
            f"FlashAttention has no heads of {head_dim} elements: choose --kv-channels (by default "
            "--hidden-size / --num-attention-heads) as a multiple of "
            f"{HEAD_DIM_STEP} up to {LARGEST_HEAD_DIM}"
        )


def kernels_for(capability: Capability, head_dim: int) -> list[GpuKernel]:
    """Kernels for a GPU and a head dimension, the fastest first, whether installed or not.

    Raises:
        ValueError: there are none.
    """
    check_head_dim(head_dim)
    if capability < (8, 0):
        raise ValueError(
            "FlashAttention needs GPUs of compute capability 8.0 or later (Ampere), and this one "
            f"has {capability[0]}.{capability[1]}: use others"
        )
    return [kernel for kernel in GPU_KERNELS if kernel.suits(capability[0], head_dim)]


def choose(
    capability: Capability, head_dim: int, softcaps: bool = False
) -> tuple[GpuKernel, GpuKernel | None]:
    """Chooses a GPU's kernel.

    Args:
        capability: compute capability of the GPU.
        head_dim: elements of a head.
        softcaps: whether it must cap scores.

    Returns:
        The fastest one that is installed, and one of a later generation to install; None: it is of
        the latest already.

    Raises:
        ValueError: no kernel runs there, or none that caps scores is installed.
    """
    suitable = [
        kernel for kernel in kernels_for(capability, head_dim) if kernel.softcaps or not softcaps
    ]
    chosen = next((kernel for kernel in suitable if kernel.version is not None), None)
    if chosen is None:
        cures = ", or ".join(kernel.install for kernel in suitable)
        raise ValueError(f"torch's own FlashAttention has no soft cap of scores: {cures}")
    faster = suitable[0] if suitable[0].generation > chosen.generation == 2 else None
    return chosen, faster


def default_block_size() -> int:
    """Returns the rows of a block where nobody chose: FlashAttention 2 reads multiples of 256."""
    return 256 if torch.cuda.is_available() else 16


def check_block_size(block_size: int, head_dim: int) -> None:
    """Checks that the kernel of this process's GPU, if it has one, reads a pool's blocks.

    Args:
        block_size: rows of a block, `--block-size`.
        head_dim: elements of a head.

    Raises:
        ValueError: it reads others alone, or no kernel runs there.
    """
    if not torch.cuda.is_available():
        return
    chosen, faster = choose(torch.cuda.get_device_capability(), head_dim)
    if block_size % chosen.block:
        other = f", or another kernel: {faster.install}" if faster else ""
        raise ValueError(
            f"--block-size {block_size}: {chosen} needs a multiple of {chosen.block} tokens: "
            f"give one{other}"
        )


def advice(faster: GpuKernel) -> str:
    """Returns what to install for a faster kernel."""
    return f"FlashAttention {faster.generation} is faster on this GPU: {faster.install}"


def load_gpu_kernel(head_dim: int, softcaps: bool = False, sm_margin: int = 0) -> PagedKernel:
    """Makes the kernel of this process's GPU, and logs which one that is; see `choose`.

    Args:
        head_dim: elements of a head.
        softcaps: whether it must cap scores.
        sm_margin: multiprocessors that it leaves to others.

    Raises:
        ValueError: no kernel runs there, or the chosen package cannot be used, or it leaves none.
    """
    capability = torch.cuda.get_device_capability()
    chosen, faster = choose(capability, head_dim, softcaps)
    kernel = chosen.load()
    if sm_margin:
        if not isinstance(kernel, flash.FlashAttn3Kernel):
            raise ValueError(
                f"{chosen} leaves no multiprocessors free; only FlashAttention 3 can: remove "
                "--distca-sm-margin"
            )
        kernel = flash.FlashAttn3Kernel(sm_margin)
    logger.info("core attention's kernel: %s%s", chosen, f"; {advice(faster)}" if faster else "")
    return kernel

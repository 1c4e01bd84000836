"""Stage: versions that fit together, the same on all ranks, and memory that is free."""

from __future__ import annotations

import importlib.metadata
import platform
import socket

import torch

from distca import __version__
from distca.commands.doctor import examine
from distca.commands.verify.stage import Context, Fault, Found
from distca.machine import cpu_name

_PACKAGES = (
    *("transformers", "megatron-core", "transformer-engine", "triton", "accelerate"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "nvshmem4py-cu13"),
)
"""Packages that decide what a rank runs."""
LEAST_FREE = 1 << 30
"""Bytes of a GPU's memory that the other stages need: an eighth of what small GPUs have."""


def check_environment(context: Context) -> Found:
    """Looks for problems that `distca doctor` knows, and compares the ranks."""
    problems = [each for each in examine() if each.state == "problem"]
    if problems:
        first = problems[0]
        raise Fault(f"{first.name}: {first.found}", first.cure)
    versions = context.gather((__version__, torch.__version__, platform.python_version()))
    if len(set(versions)) > 1:
        other = next(rank for rank, each in enumerate(versions) if each != versions[0])
        raise Fault(
            f"rank {other} has {_named(versions[other])}, and rank 0 {_named(versions[0])}",
            "install the same versions on all machines",
        )
    packages = context.gather({name: _version(name) for name in _PACKAGES})
    for rank, its in enumerate(packages):
        for name, version in its.items():
            if version != packages[0][name]:
                raise Fault(
                    f"rank {rank} has {name} {version}, and rank 0 {packages[0][name]}",
                    "install the same packages on all machines",
                )
    machines = len(set(context.gather(socket.gethostname())))
    if not context.on_gpu:
        text = f"{_counted(context.size, 'rank')} on CPUs ({cpu_name()})"
        return Found(f"{text}, {_named(versions[0])}", {"ranks": context.size})
    free, total = torch.cuda.mem_get_info(context.device)
    if free < LEAST_FREE:
        raise Fault(
            f"GPU {context.local_rank} of {socket.gethostname()} has {free / 1e9:.1f} GB free of "
            f"{total / 1e9:.1f}, and {LEAST_FREE / 1e9:.1f} are needed",
            "end other processes of this GPU (nvidia-smi), or choose GPUs by CUDA_VISIBLE_DEVICES",
        )
    names = sorted(set(context.gather(torch.cuda.get_device_name(context.device))))
    least = -context.largest(-free) / 1e9
    where = f" of {machines} machines" if machines > 1 else ""
    return Found(
        f"{context.size} x {', '.join(names)}{where}, {least:.1f} of {total / 1e9:.1f} GB free, "
        f"{_named(versions[0])}, CUDA {torch.version.cuda}",
        {"ranks": context.size, "free_gb": least, "memory_gb": total / 1e9},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _named(versions: tuple[str, str, str]) -> str:
    ours, of_torch, python = versions
    return f"distca {ours}, torch {of_torch}, Python {python}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")

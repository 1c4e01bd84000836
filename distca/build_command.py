"""`distca build`: compiles what is otherwise compiled at first use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from distca.transport.compiled import default_cache, host_library
from distca.transport.compiled_cuda import (
    ARCHITECTURES,
    kernels_of_mapped_peers,
    kernels_with_nvshmem,
)

PARTS = ("shm", "nvshmem", "nvshmem-network")


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="distca build",
        description="Compiles the native code of the transports. A run compiles what it lacks by "
        "itself; do it ahead where its machines have no compiler, or not to wait.",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(PARTS)}: shared memory; GPUs that map each other's memory; GPUs over a "
        "network. Default: all.",
    )
    parser.add_argument(
        "--architectures",
        type=int,
        nargs="+",
        metavar="SM",
        default=None,
        help="Compute capabilities, such as 90. Default: those of this machine's GPUs, or "
        f"{' '.join(map(str, ARCHITECTURES))} where there are none.",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=None,
        metavar="FOLDER",
        # Alike for everybody, since the documentation has it.
        help=f"Where they go. Default: ~/{default_cache().relative_to(Path.home())}",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 1 if a part could not be compiled."""
    parser = build_parser()
    options = parser.parse_args(argv)
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}: choose of {', '.join(PARTS)}")
    architectures = options.architectures or local_architectures() or list(ARCHITECTURES)
    steps: list[tuple[str, Callable[[], Path]]] = []
    for part in options.parts or PARTS:
        if part == "shm":
            steps.append((part, lambda: host_library(cache=options.cache)))
            continue
        compile_kernels = kernels_of_mapped_peers if part == "nvshmem" else kernels_with_nvshmem
        for architecture in architectures:
            steps.append(
                (
                    f"{part} sm_{architecture}",
                    lambda c=compile_kernels, a=architecture: c(a, options.cache),  # type: ignore[misc]
                )
            )
    failed = False
    for name, build in steps:
        try:
            sys.stdout.write(f"{name}: {build()}\n")
        except RuntimeError as error:
            failed = True
            sys.stdout.write(f"{name}: not compiled: {error}\n")
        sys.stdout.flush()
    return int(failed)


def local_architectures() -> list[int]:
    """The compute capabilities of this machine's GPUs."""
    found = {torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())}
    return sorted(10 * major + minor for major, minor in found)

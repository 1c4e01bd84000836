"""`distca build`: compiles native code that is otherwise compiled at first use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from distca.attention.paged_cpu import paged_library
from distca.commands.command_line import Parser, write_on
from distca.native import default_cache
from distca.transport.compiled import host_library
from distca.transport.compiled_cuda import (
    ARCHITECTURES,
    kernels_of_mapped_peers,
    kernels_with_nvshmem,
)

PARTS = ("decode", "shm", "nvshmem", "nvshmem-network")


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser(
        "build",
        """\
Compiles the native code that moves rows between ranks, and that of decodes on CPUs. A run compiles
missing parts itself. Compile ahead if its machines have no compiler, or to start runs faster.
""",
        """\
examples:
  distca build shm
  distca build nvshmem --architectures 90 --cache /shared/distca
""",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="Parts to compile. decode: the kernel that decodes on this CPU; shm: the "
        "transport over shared memory; nvshmem: the transport between GPUs of one machine; "
        "nvshmem-network: the transport between GPUs over a network. Default: all.",
    )
    parser.add_argument(
        "--architectures",
        type=int,
        nargs="+",
        metavar="SM",
        default=None,
        help="Compute capabilities of the GPUs, such as 90 for H100. Default: those of this "
        f"machine's GPUs, or {' '.join(map(str, ARCHITECTURES))} if it has none.",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=None,
        metavar="FOLDER",
        # Relative to the home folder, so that the documentation shows the same for everybody.
        help="Folder for the compiled files. Default: "
        f"~/{default_cache().relative_to(Path.home())}.",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 1 if a part could not be compiled."""
    parser = build_parser()
    options = parser.parse(argv)
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    architectures = options.architectures or local_architectures() or list(ARCHITECTURES)
    steps: list[tuple[str, Callable[[], Path]]] = []
    for part in options.parts or PARTS:
        if part in ("decode", "shm"):
            library = paged_library if part == "decode" else host_library
            steps.append((part, lambda library=library: library(cache=options.cache)))  # type: ignore[misc]
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
            write_on(f"{name}: {build()}\n")
        except RuntimeError as error:
            failed = True
            write_on(f"{name}: not compiled: {error}\n")
    return int(failed)


def local_architectures() -> list[int]:
    """Lists the compute capabilities of this machine's GPUs."""
    found = {torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())}
    return sorted(10 * major + minor for major, minor in found)

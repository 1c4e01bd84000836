"""The native code of the shared-memory transport."""

from __future__ import annotations

import platform
from pathlib import Path

from distca.native import HOST_FLAGS, host_compiler, kept, run

PROTOCOL = Path(__file__).parent / "protocol"
"""Folder of the native sources."""


def compiler() -> str:
    """Returns the path of the C++ compiler that the transport needs.

    Raises:
        RuntimeError: no compiler is installed.
    """
    return host_compiler("the shared-memory transport", "give --distca-transport collective")


def host_library(sources: Path = PROTOCOL, cache: Path | None = None) -> Path:
    """Returns the path of the shared-memory transport's library, compiled if it is not cached.

    Args:
        sources: folder of the sources.
        cache: folder of compiled files; None: `default_cache()`.

    Raises:
        RuntimeError: no compiler is installed, it fails, or the cache cannot be written.
    """
    found = compiler()
    source = sources / "shared_memory.cpp"
    key = (run([found, "--version"]), platform.machine(), *HOST_FLAGS)

    def build(into: Path) -> None:
        run([found, *HOST_FLAGS, str(source), "-o", str(into)])

    return kept("shared_memory.so", sources, key, build, cache)

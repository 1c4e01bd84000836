"""Builds the extension, and gives the environment of processes that have simulated GPUs."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NATIVE = Path(__file__).parent / "native"
NAME = "simgpu_native"
DEVICES, CAPACITY, LIBRARY = "SIMGPU_DEVICES", "SIMGPU_CAPACITY", "SIMGPU_LIBRARY"


class CannotBuildError(Exception):
    """Raised if there is no compiler, or it refuses; the message says which."""


@dataclass(frozen=True)
class Machine:
    """What simulated GPUs a process has.

    Attributes:
        devices: how many, at most 16.
        capacity: bytes of each one's memory.
        packages: packages of kernels that are installed, of those in `installed`. torch's own
            FlashAttention 2 is always there.
    """

    devices: int = 1
    capacity: int = 4 << 30
    packages: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Variables of a process that has these GPUs, as do all that it starts.

        Raises:
            CannotBuildError: the extension cannot be built here.
        """
        here = Path(__file__).parent
        folders = [here / "site", *packages_at(self.packages), ROOT, ROOT / "tests"]
        return os.environ | {
            LIBRARY: str(build()),
            DEVICES: str(self.devices),
            CAPACITY: str(self.capacity),
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "OMP_NUM_THREADS": "1",
            # Compiled functions would call the real driver.
            "TORCHDYNAMO_DISABLE": "1",
        }

    def run(
        self, command: list[str], seconds: float = 240, folder: Path = ROOT, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command with these GPUs, and returns what it wrote.

        Args:
            command: what `python -m` runs is imported from `folder` first.
            seconds: time after which it has failed.
            folder: folder in which it runs.
            more: further variables.
        """
        return subprocess.run(
            command,
            cwd=folder,
            env=self.environment() | more,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def run_ranks(self, commands: Sequence[list[str]], seconds: float = 500, **more: str) -> None:
        """Runs a command for each rank, all at once. Raises `AssertionError` if one fails."""
        environment = self.environment() | more
        ranks = [
            subprocess.Popen(each, env=environment, stderr=subprocess.PIPE) for each in commands
        ]
        try:
            for rank in ranks:
                _, errors = rank.communicate(timeout=seconds)
                assert rank.returncode == 0, errors.decode()[-4000:]
        finally:
            for rank in ranks:
                rank.kill()


def packages_at(names: Sequence[str]) -> list[str]:
    """Folders of packages of kernels, from which they are imported."""
    return [str(Path(__file__).parent / "installed" / each) for each in names]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Folder where extensions are kept for all checkouts of this user."""
    home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "distca" / "simgpu"


@functools.cache
def build() -> Path:
    """Compiles the extension, unless it lies in the cache; takes under a minute.

    Raises:
        CannotBuildError: there is no compiler, or it refuses.
    """
    compiler = shutil.which("g++")
    torch = importlib.util.find_spec("torch")
    if compiler is None or torch is None or torch.origin is None:
        raise CannotBuildError("needs g++ and torch")
    sources = sorted(NATIVE.iterdir())
    # Without importing torch: it would take seconds.
    version = importlib.metadata.version("torch")
    told = [version, sysconfig.get_config_var("SOABI") or "", *(s.read_text() for s in sources)]
    key = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
    library = cache_folder() / f"{version}-{key}" / f"{NAME}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    place = Path(torch.origin).parent
    include = place / "include"
    headers = [include, include / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(compiler, "-std=c++20", "-fPIC", "-shared", "-w", str(NATIVE / "extension.cpp")),
            *(f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
            *(f"-isystem{each}" for each in headers),
            *(f"-L{place / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
            *(f"-Wl,-rpath,{place / 'lib'}", "-o", str(made)),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise CannotBuildError(f"g++ refuses with torch {version}: {ran.stderr[:2000]}")
        # Two processes may build at once.
        made.replace(library)
    return library


def built_or_skip() -> None:
    """Compiles the extension, or skips the test with the reason."""
    try:
        build()
    except CannotBuildError as error:
        pytest.skip(f"no simulated GPU: {error}")

"""The device transport's kernels, compiled at first use and cached.

Where all peers' memory is mapped (NVLink, PCIe), the kernels need no library, and NVRTC compiles
them in a moment. For peers on other machines, nvcc links them with NVSHMEM's device library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from distca.native import kept, run
from distca.transport.compiled import PROTOCOL
from distca.wording import install

ARCHITECTURES = (80, 90, 100)
"""The compute capabilities that `distca build` compiles for: A100, H100 and H200, B200."""

SOURCE = PROTOCOL / "device.cu"
NVCC_FLAGS = ("-std=c++17", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v")


def nvidia_packages() -> Iterator[Path]:
    """The folders into which NVIDIA's wheels are installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(folder)


_OTHER_HEADERS = "CUDA compiler and CUDA toolkit headers are incompatible"
"""What CUDA's headers say to a compiler of another version."""


def find_nvcc() -> Path | None:
    """Returns the path of nvcc, from NVIDIA's wheels, else from the CUDA toolkit; None: not
    installed."""
    for folder in nvidia_packages():
        for found in sorted(folder.glob("*/bin/nvcc"), reverse=True):
            return found
    on_path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return None if on_path is None else Path(on_path)


def find_nvshmem() -> Path | None:
    """Returns the folder with NVSHMEM's `include` and `lib`; None: not installed."""
    for folder in nvidia_packages():
        if (folder / "nvshmem" / "lib" / "libnvshmem_device.a").exists():
            return folder / "nvshmem"
    return None


def nvrtc_version() -> str | None:
    """Returns the version of the NVRTC that cuda-core can call; None: not installed."""
    # torch's CUDA builds bring cuda-bindings alone.
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return None
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, OSError, RuntimeError):
        return None
    return f"{major}.{minor}" if int(status) == 0 else None


def kernels_of_mapped_peers(architecture: int, cache: Path | None = None) -> Path:
    """Returns the cubin for ranks whose peers' memory is all mapped.

    Args:
        architecture: compute capability, such as 90.
        cache: folder of compiled files; None: the user's cache.

    Raises:
        RuntimeError: neither NVRTC nor nvcc is installed, or the compiler fails.
    """
    version = nvrtc_version()
    if version is None:
        return by_nvcc(architecture, nvshmem=False, cache=cache)

    def build(into: Path) -> None:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            std="c++17", arch=f"sm_{architecture}", include_path=[str(PROTOCOL)]
        )
        cubin = Program(SOURCE.read_text(), "c++", options).compile("cubin")
        into.write_bytes(cubin.code)

    key = ("nvrtc", version, str(architecture))
    return kept(f"mapped_sm_{architecture}.cubin", PROTOCOL, key, build, cache)


def kernels_with_nvshmem(architecture: int, cache: Path | None = None) -> Path:
    """Returns the cubin for ranks some of whose peers are reached over a network.

    Raises:
        RuntimeError: nvcc or NVSHMEM is not installed, or nvcc fails.
    """
    return by_nvcc(architecture, nvshmem=True, cache=cache)


def by_nvcc(architecture: int, nvshmem: bool, cache: Path | None = None) -> Path:
    """Returns the path of a cubin; nvcc's report on each kernel lies beside it, as `.log`.

    Args:
        architecture: compute capability, such as 90.
        nvshmem: link NVSHMEM's device library.
        cache: folder of compiled files; None: the user's cache.

    Raises:
        RuntimeError: nvcc or NVSHMEM is not installed, or nvcc fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            "the kernels of the device transport are compiled at first use, but there is no nvcc: "
            f"{install('nvshmem-cu13')}, or install a CUDA toolkit"
        )
    command = [str(nvcc), *NVCC_FLAGS, f"-arch=sm_{architecture}", "-cubin"]
    key = [run([str(nvcc), "--version"]), *command]
    if nvshmem:
        library = find_nvshmem()
        if library is None:
            raise RuntimeError(
                "peers on other machines need NVSHMEM's device library, but it is not installed: "
                f"{install('nvshmem-cu13')} (or nvshmem-cu12)"
            )
        command += ["-rdc=true", "-dlink", "-DDISTCA_NVSHMEM", "-isystem", f"{library}/include"]
        command += [f"-L{library}/lib", "-lnvshmem_device"]
        key += [*command, nvshmem_version() or "of unknown version"]

    def build(into: Path) -> None:
        try:
            messages = run([*command, str(SOURCE), "-o", str(into)])
        except RuntimeError as error:
            if _OTHER_HEADERS not in str(error):
                raise
            cuda = torch.version.cuda or "13.0"
            packages = ("cuda-nvcc", "cuda-crt", "cuda-cccl", "nvvm")
            wanted = " ".join(f"'nvidia-{package}=={cuda}.*'" for package in packages)
            raise RuntimeError(
                f"{nvcc} is of another version than the CUDA headers that torch installed: "
                f"pip install {wanted}"
            ) from error
        into.with_suffix(".log").write_text(messages)
        into.with_suffix(".log").replace(into.parent / f"{name}.log")

    name = f"{'nvshmem' if nvshmem else 'mapped'}_sm_{architecture}"
    return kept(f"{name}.cubin", PROTOCOL, key, build, cache)


def nvshmem_version() -> str | None:
    """Returns the version of the NVSHMEM wheel; None: not installed."""
    for major in (13, 12):
        try:
            return importlib.metadata.version(f"nvidia-nvshmem-cu{major}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

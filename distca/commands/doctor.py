"""`distca doctor`: finds what DistCA can use, what is missing and what to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from distca import __version__
from distca.commands.command_line import Parser
from distca.native import default_cache, run
from distca.transport.compiled import compiler as host_compiler
from distca.transport.compiled_cuda import (
    find_nvcc,
    find_nvshmem,
    nvrtc_version,
    nvshmem_version,
)
from distca.wording import install

_INFERENCE = ("transformers", "accelerate", "tokenizers", "safetensors", "msgspec", "pyzmq")
"""Packages without which `distca generate` or `distca prefill` cannot start."""
_CONVERSION = ("mbridge", "transformers", "safetensors")
"""Packages that `distca convert` needs beside Megatron."""

State = Literal["ok", "missing", "problem"]

# The versions that the checks of this repository were run with: docs/moving_a_job.md lists them.
PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 13), (2, 15))
MEGATRONS = ((0, 17, 1), (0, 19, 2))


# NVSHMEM from this version on needs neither the driver's setting nor GDRCopy for its IBGDA.
_RINGS_BY_ITSELF = (3, 4, 5)


@dataclass(frozen=True)
class Finding:
    """Finding about one package, tool or piece of hardware.

    Attributes:
        name: name of the item.
        state: "ok"; "missing": features that need it cannot be used; "problem": it does not fit.
        found: version, place or number that was found.
        cure: purpose of the item and what to do; empty if it is present.
    """

    name: str
    state: State
    found: str
    cure: str = ""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser(
        "doctor",
        """\
Shows what is installed on this machine, what is missing, what needs it, and how to install it.
"problem" marks parts that do not work together; the command then ends with status 1.
""",
        """\
examples:
  distca doctor
  distca doctor --profile profile.json
""",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        default=None,
        metavar="FILE",
        help="File from `distca profile` that is checked, too.",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 1 if there is a problem."""
    findings = list(examine(build_parser().parse(argv).profile))
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        sys.stdout.write(f"{finding.state:8} {finding.name:{width}}  {finding.found}\n")
        if finding.cure:
            sys.stdout.write(f"{'':8} {'':{width}}  {finding.cure}\n")
    return int(any(finding.state == "problem" for finding in findings))


def examine(profile: Path | None = None) -> Iterator[Finding]:
    """Looks for everything that DistCA can use.

    Args:
        profile: file of kernel times to check, too.
    """
    yield Finding("distca", "ok", __version__)
    python = f"{platform.python_version()} on {platform.machine()}"
    yield Finding("Python", "ok", python, _untried(platform.python_version(), PYTHONS))
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    found = f"{torch.__version__}, built for {built_for}"
    yield Finding("torch", "ok", found, _untried(torch.__version__, TORCHES))
    yield _gpus()
    yield from _megatron()
    yield _greenlet()
    if torch.cuda.is_available():
        yield from _attention_kernels()
        yield _package("transformer-engine", "pip install 'transformer-engine[pytorch]'")
    else:
        yield Finding("attention kernel, transformer-engine", "ok", "not needed without a GPU")
    yield _group("to generate and to prefill", _INFERENCE, install("inference"))
    yield _group("to convert models", _CONVERSION, install("convert"))
    yield _package("tokenizers", "pip install tokenizers, for `distca prepare`")
    yield _package("matplotlib", f"{install('plot')}, for --plot")
    yield _compiler()
    yield _cache()
    yield _shared_memory()
    yield from _device_transport()
    yield _profile(profile)
    yield _network()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, cure: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, "missing", "not installed", cure)
    return Finding(name, "ok", version)


def _group(name: str, packages: Sequence[str], cure: str) -> Finding:
    """Looks for packages that are needed together."""
    missing = [package for package in packages if _version(package) is None]
    if missing:
        return Finding(name, "missing", f"not installed: {', '.join(missing)}", cure)
    return Finding(name, "ok", ", ".join(packages))


def _megatron() -> Iterator[Finding]:
    """Looks for megatron-core, and for the training loop that its newer wheels hold."""
    cure = f"{install('megatron')} to train; planning does not need it"
    version = _version("megatron-core")
    if version is None:
        yield Finding("megatron-core", "missing", "not installed", cure)
        return
    if _numbers(version, 3) < MEGATRONS[0]:
        yield Finding("megatron-core", "problem", f"{version} is too old", cure)
    else:
        yield Finding("megatron-core", "ok", version, _untried(version, MEGATRONS))
    if importlib.util.find_spec("megatron.training") is not None:
        yield Finding("Megatron-LM's loop", "ok", "there")
    else:
        yield Finding(
            "Megatron-LM's loop",
            "missing",
            "not installed: training needs it",
            "megatron-core has it from 0.17 on, which needs Python 3.12 or later",
        )


def _numbers(version: str, count: int) -> tuple[int, ...]:
    """Returns the first numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:count])


def _untried(version: str, tried: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Returns what to know of a version outside those that were tried; empty inside."""
    oldest, newest = tried
    if oldest <= _numbers(version, len(oldest)) <= newest:
        return ""
    first, last = (".".join(map(str, each)) for each in tried)
    return f"tried so far: {first}" + (f" to {last}" if last != first else "")


def _greenlet() -> Finding:
    version = _version("greenlet")
    if version is not None:
        return Finding("greenlet", "ok", version)
    # Training needs greenlet for ping-pong, which is on by default; planning does not.
    trains = _version("megatron-core") is not None
    cure = "pip install greenlet, or give --no-distca-ping-pong"
    return Finding("greenlet", "problem" if trains else "missing", "not installed", cure)


def _gpus() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        return Finding("GPUs", "ok", ", ".join(names))
    if Path("/dev/nvidia0").exists():
        found, cure = "there, but this torch is for CPUs", "install a CUDA build of torch"
        if torch.version.cuda is not None:
            found = f"there, but torch cannot use them with CUDA {torch.version.cuda}"
            cure = "look at nvidia-smi; install a driver for that CUDA, or torch for an older one"
        return Finding("GPUs", "problem", found, cure)
    return Finding("GPUs", "missing", "none: --distca runs on CPUs, by gloo or shared memory")


def _attention_kernels() -> Iterator[Finding]:
    """Looks for the attention kernel of each kind of GPU, for the usual size of heads."""
    from distca.attention.choice import advice, choose

    numbers = range(torch.cuda.device_count())
    for major, minor in sorted({torch.cuda.get_device_capability(n) for n in numbers}):
        name = f"attention kernel, sm_{major}{minor}"
        try:
            chosen, faster = choose((major, minor), head_dim=128)
            chosen.load()
        except ValueError as error:
            yield Finding(name, "problem", "none that can be used", str(error))
            continue
        if faster is None:
            yield Finding(name, "ok", str(chosen))
        else:
            yield Finding(name, "missing", str(chosen), advice(faster))


def _compiler() -> Finding:
    try:
        compiler = host_compiler()
        version = run([compiler, "--version"]).splitlines()[0]
    except RuntimeError as error:
        return Finding("C++ compiler", "missing", "none", str(error))
    return Finding("C++ compiler", "ok", f"{compiler}: {version}")


def _cache() -> Finding:
    folder = default_cache()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if os.access(existing, os.W_OK):
        return Finding("compiled files", "ok", f"kept in {folder}")
    return Finding("compiled files", "problem", f"{folder} is not writable", "make it writable")


def _shared_memory() -> Finding:
    name = "--distca-transport shm"
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").exists():
        return Finding(name, "ok", "processes can share memory")
    return Finding(name, "missing", "needs Linux with /proc", "give --distca-transport collective")


def _device_transport() -> Iterator[Finding]:
    """Looks for what `--distca-transport nvshmem` needs."""
    major = (torch.version.cuda or "13").split(".")[0]
    cure = f"{install(f'nvshmem-cu{major}')} for --distca-transport nvshmem"
    version, library = nvshmem_version(), find_nvshmem()
    if version is None or library is None:
        yield Finding("NVSHMEM", "missing", "not installed", cure)
    else:
        yield Finding("NVSHMEM", "ok", f"{version} in {library}")
        yield _transfers_between_machines(version)
    python = _version(f"nvshmem4py-cu{major}")
    other = _version(f"nvshmem4py-cu{'12' if major == '13' else '13'}")
    if python is not None:
        yield Finding("nvshmem4py", "ok", python)
    elif other is not None and torch.version.cuda is not None:
        yield Finding(
            "nvshmem4py", "problem", f"is not for torch's CUDA {torch.version.cuda}", cure
        )
    else:
        yield Finding("nvshmem4py", "missing", "not installed", cure)
    nvrtc, nvcc = nvrtc_version(), find_nvcc()
    if nvrtc is not None:
        yield Finding("NVRTC", "ok", nvrtc)
    else:
        yield Finding("NVRTC", "missing", "not installed", f"{cure}; nvcc does as well")
    if nvcc is not None:
        yield Finding("nvcc", "ok", f"{nvcc}: {run([str(nvcc), '--version']).splitlines()[-2]}")
    else:
        yield Finding(
            "nvcc",
            "missing",
            "not found",
            "pip install nvidia-cuda-nvcc nvidia-cuda-cccl, or a CUDA toolkit, for "
            "--distca-transport nvshmem between machines",
        )


def _transfers_between_machines(nvshmem: str, root: Path = Path("/")) -> Finding:
    """Looks for what lets GPUs start NVSHMEM's transfers between machines (IBGDA).

    Whether they do is seen when it starts: the log of a job says so.

    Args:
        nvshmem: version of NVSHMEM.
        root: folder in which the machine's `/sys`, `/proc` and `/dev` lie.
    """
    name = "nvshmem between machines"
    folder = root / "sys/class/infiniband"
    cards = sorted(card.name for card in folder.iterdir()) if folder.is_dir() else []
    # NVSHMEM knows ConnectX cards by these names.
    cards = [card for card in cards if "mlx5" in card or "ibp" in card]
    if not cards:
        found = "no ConnectX network card (mlx5): a thread of the host would start transfers"
        return Finding(name, "missing", found)
    parameters = root / "proc/driver/nvidia/params"
    if parameters.exists() and "PeerMappingOverride=1" in parameters.read_text():
        return Finding(name, "ok", f"GPUs can start transfers (IBGDA), by {', '.join(cards)}")
    cure = (
        'for GPUs only: options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;" in '
        "/etc/modprobe.d, and a restart"
    )
    if (root / "dev/gdrdrv").exists() or _numbers(nvshmem, 3) >= _RINGS_BY_ITSELF:
        found = f"GPUs can start transfers (IBGDA) by {', '.join(cards)}, which the host then rings"
        return Finding(name, "ok", found, cure)
    return Finding(name, "missing", "a thread of the host would start transfers", cure)


def _profile(path: Path | None) -> Finding:
    from distca.cost.profile import Profile

    if path is None:
        return Finding(
            "profile",
            "missing",
            "none given: plans balance query-key pairs",
            "`distca profile --output FILE` measures this machine; give it as --distca-profile",
        )
    try:
        profile = Profile.load(path)
    except (OSError, ValueError) as error:
        return Finding("profile", "problem", str(error), f"distca profile --output {path}")
    shape = profile.shape
    heads = f"{shape.heads} query heads, {shape.kv_heads} key-value heads of {shape.head_dim}"
    return Finding("profile", "ok", f"{path}: {heads}, {8 * shape.dtype_bytes} bits a number")


def _network() -> Finding:
    names = [name for _, name in socket.if_nameindex()]
    cards = Path("/sys/class/infiniband")
    cards_found = sorted(card.name for card in cards.iterdir()) if cards.is_dir() else []
    found = f"interfaces {', '.join(names) or 'none'}; "
    found += f"InfiniBand or RoCE {', '.join(cards_found) or 'none'}"
    lockable, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cure = ""
    if cards_found and lockable != resource.RLIM_INFINITY:
        cure = f"ulimit -l unlimited: these need locked memory, which is at most {lockable} bytes"
    return Finding("network", "ok", found, cure)

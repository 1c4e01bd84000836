"""Compiling the transports' native code, without a GPU; and the commands around it."""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from distca import native
from distca.commands import doctor
from distca.commands.main import main
from distca.transport import channels, compiled, compiled_cuda, device


@pytest.fixture(scope="module")
def cubins() -> list[Path]:
    """All kernels for all architectures, by the nvcc of NVIDIA's wheels."""
    if compiled_cuda.find_nvcc() is None or compiled_cuda.find_nvshmem() is None:
        pytest.skip("needs NVIDIA's compiler: pip install 'distca[cuda-compile]'")
    every = [(arch, nvshmem) for arch in compiled_cuda.ARCHITECTURES for nvshmem in (False, True)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda which: compiled_cuda.by_nvcc(*which), every))


def test_cuda_sources_compile_without_spills(cubins: list[Path]) -> None:
    """Warnings are errors (`-Werror all-warnings`); of each kernel ptxas tells what it spills."""
    kernels = {"send", "wait", "release", "wait_for_room", "set_ready"}
    for cubin in cubins:
        assert cubin.read_bytes()[:4] == b"\x7fELF"
        log = cubin.with_suffix(".log").read_text()
        used = re.findall(
            r"Compiling entry function 'distca_(\w+)' for 'sm_(\d+)'.*?"
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
            r"Used (\d+) registers",
            log,
            re.DOTALL,
        )
        network = {"gpu_initiated"} if cubin.stem.startswith("nvshmem") else set()
        assert {name for name, *_ in used} == kernels | network, log
        for name, arch, stack, stores, loads, registers in used:
            assert cubin.stem.endswith(f"sm_{arch}")
            assert (stores, loads) == ("0", "0"), (cubin, name, log)
            # NVSHMEM's function that puts and sets a flag takes more arguments than registers hold.
            calls = name == "send" and cubin.stem.startswith("nvshmem")
            assert int(stack) <= (8 if calls else 0), (cubin, name, log)
            # A block of 512 threads fits an SM's 65536 registers.
            assert int(registers) <= 128, (cubin, name)


@pytest.mark.parametrize("architecture", compiled_cuda.ARCHITECTURES)
def test_bulk_copies_from_hopper_on(architecture: int, tmp_path: Path) -> None:
    """The tensor memory accelerator is used where there is one, in the order that is right: see
    `bulk_copy.cuh`.
    """
    nvcc = compiled_cuda.find_nvcc()
    if nvcc is None:
        pytest.skip("needs NVIDIA's compiler: pip install 'distca[cuda-compile]'")
    ptx = tmp_path / "device.ptx"
    command = [str(nvcc), "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-ptx"]
    native.run([*command, str(compiled_cuda.SOURCE), "-o", str(ptx)])
    kernels = re.split(r"\.entry distca_(\w+)", ptx.read_text())
    found = dict(zip(kernels[1::2], kernels[2::2], strict=True))
    for name, body in found.items():
        assert ("cp.async.bulk" in body) == (name == "send" and architecture >= 90), name
    if architecture < 90:
        return
    body = found["send"]
    # Each once at least, and those behind the loop after those in it.
    order = [
        r"mbarrier\.init\.",
        r"ld\.acquire\.sys\.",
        r"fence\.proxy\.async;",
        r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes",
        r"mbarrier\.try_wait\.parity\.",
        r"cp\.async\.bulk\.global\.shared::cta\.bulk_group",
        r"cp\.async\.bulk\.commit_group;",
        r"cp\.async\.bulk\.wait_group\.read 1;",
        r"cp\.async\.bulk\.wait_group 0;",
        r"membar\.sys;|fence\.\w+\.sys;",
        r"st\.release\.sys\.",
    ]
    places = [match.start() for match in (re.search(step, body) for step in order) if match]
    assert len(places) == len(order)
    assert places == sorted(places)


def test_network_cards_work_while_blocks_copy(tmp_path: Path) -> None:
    """Puts to peers on other machines are issued first, and waited for last."""
    nvcc, library = compiled_cuda.find_nvcc(), compiled_cuda.find_nvshmem()
    if nvcc is None or library is None:
        pytest.skip("needs NVIDIA's compiler: pip install 'distca[cuda-compile]'")
    ptx = tmp_path / "device.ptx"
    command = [str(nvcc), "-std=c++17", "-O3", "-arch=sm_90", "-ptx", "-rdc=true"]
    command += ["-DDISTCA_NVSHMEM", "-isystem", f"{library}/include"]
    native.run([*command, str(compiled_cuda.SOURCE), "-o", str(ptx)])
    body = re.split(r"\.entry distca_(\w+)", ptx.read_text())
    send = body[body.index("send") + 1].split(".visible")[0]
    steps = [r"transfer_put_signal", r"cp\.async\.bulk\.wait_group 0;", r"transfer_quiet"]
    places = [send.rindex(re.findall(step, send)[-1]) for step in steps]
    assert places == sorted(places)


def test_a_cuda_warning_is_an_error(tmp_path: Path, monkeypatch) -> None:
    if compiled_cuda.find_nvcc() is None:
        pytest.skip("needs NVIDIA's compiler: pip install 'distca[cuda-compile]'")
    for file in compiled.PROTOCOL.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    with (tmp_path / "device.cu").open("a") as source:
        source.write("__global__ void unclear() { int unused; }\n")
    monkeypatch.setattr(compiled_cuda, "SOURCE", tmp_path / "device.cu")
    with pytest.raises(RuntimeError, match="unused"):
        compiled_cuda.by_nvcc(90, nvshmem=False, cache=tmp_path / "cache")


def test_a_compiler_of_another_version_than_torchs_headers_is_named(monkeypatch, tmp_path) -> None:
    def run(command: list[str]) -> str:
        if "--version" in command:
            return "13.5"
        raise RuntimeError(f"nvcc failed:\n#error {compiled_cuda._OTHER_HEADERS}, please check")

    monkeypatch.setattr(compiled_cuda, "find_nvcc", lambda: Path("/somewhere/nvcc"))
    monkeypatch.setattr(compiled_cuda, "run", run)
    monkeypatch.setattr(compiled_cuda.torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match=r"pip install 'nvidia-cuda-nvcc==13\.0\.\*' "):
        compiled_cuda.by_nvcc(90, nvshmem=False, cache=tmp_path / "cache")


def test_nvrtc_compiles_the_same_source(tmp_path: Path) -> None:
    if compiled_cuda.nvrtc_version() is None:
        pytest.skip("needs NVRTC and cuda-core, which come with 'distca[nvshmem-cu13]'")
    cubin = compiled_cuda.kernels_of_mapped_peers(90, tmp_path)
    assert b"distca_send" in cubin.read_bytes()


def test_python_and_native_code_agree_on_the_control_memory() -> None:
    library = ctypes.CDLL(str(compiled.host_library()))
    library.distca_control_bytes.restype = ctypes.c_uint64
    for ranks in (1, 3, 8, 512):
        found = library.distca_control_bytes(ranks, channels.CHANNELS)
        assert found == device.control_bytes(ranks)
    words = (compiled.PROTOCOL / "words.h").read_text()
    names = re.search(r"struct Failure \{(.*?)\};", words, re.DOTALL)
    assert names is not None
    assert tuple(re.findall(r"Word (\w+);", names[1])) == channels.Failure._fields
    rank = re.search(
        r"struct Rank \{(.*?)\};", (compiled.PROTOCOL / "device.cuh").read_text(), re.DOTALL
    )
    assert rank is not None
    members = re.findall(r"(?:Word|char|unsigned|Failure|const|\*) (\w+(?:, \w+)*);", rank[1])
    assert tuple(", ".join(members).split(", ")) == device._Rank._fields
    outcomes = re.search(r"enum class Outcome : int \{(.*?)\};", words, re.DOTALL)
    assert outcomes is not None
    for name, value in re.findall(r"(\w+) = (\d+),", outcomes[1]):
        assert getattr(channels, name.upper()) == int(value)


def test_what_was_built_is_kept(tmp_path: Path) -> None:
    made: list[Path] = []

    def build(into: Path) -> None:
        made.append(into)
        into.write_text("built")

    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "a.h").write_text("1")

    def keep(*key: str) -> Path:
        return native.kept("name", tmp_path / "sources", key, build, tmp_path / "cache")

    assert keep("a") == keep("a")
    assert len(made) == 1
    assert keep("b") != keep("a")
    (tmp_path / "sources" / "a.h").write_text("2")
    keep("a")
    assert len(made) == 3
    assert not list(tmp_path.glob("cache/*/unfinished*"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="Make it writable"):
        native.kept("name", tmp_path / "sources", "a", build, tmp_path / "file")


@pytest.mark.parametrize("part", ["shm", "decode"])
def test_build(tmp_path: Path, capsys, part: str) -> None:
    assert main(["build", part, "--cache", str(tmp_path)]) == 0
    path = capsys.readouterr().out.split(": ")[1].strip()
    assert Path(path).is_relative_to(tmp_path)
    assert Path(path).exists()
    with pytest.raises(SystemExit):
        main(["build", "everything"])


def test_build_says_what_is_missing(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(compiled_cuda, "find_nvcc", lambda: None)
    arguments = ["build", "nvshmem-network", "--architectures", "90", "--cache", str(tmp_path)]
    assert main(arguments) == 1
    assert "not compiled: " in capsys.readouterr().out


def test_doctor(capsys, tmp_path: Path) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ok +torch +" + re.escape(torch.__version__), said, re.MULTILINE)
    for name in (
        "GPUs",
        "C++ compiler",
        "NVSHMEM",
        "nvcc",
        "profile",
        "network",
        "attention kernel",
    ):
        assert name in said
    (tmp_path / "broken.json").write_text("{")
    assert main(["doctor", "--profile", str(tmp_path / "broken.json")]) == 1
    assert re.search(r"^problem +profile", capsys.readouterr().out, re.MULTILINE)


def test_doctor_tells_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *args, **kwargs: None)
    monkeypatch.setattr(compiled_cuda, "nvidia_packages", lambda: iter(()))
    findings = {finding.name: finding for finding in doctor.examine()}
    for name, cure in (("C++ compiler", "install one"), ("nvcc", "pip install nvidia-cuda-nvcc")):
        assert findings[name].state == "missing"
        assert cure in findings[name].cure


@pytest.mark.parametrize(
    ("cuda", "installed", "state"),
    [
        ("13.0", {"nvshmem4py-cu13": "0.4.1"}, "ok"),
        ("13.0", {"nvshmem4py-cu12": "0.4.1"}, "problem"),
        ("12.8", {"nvshmem4py-cu13": "0.4.1"}, "problem"),
        ("13.0", {}, "missing"),
        (None, {"nvshmem4py-cu12": "0.4.1"}, "missing"),
    ],
)
def test_doctor_finds_nvshmem_of_another_cuda(monkeypatch, cuda, installed, state) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(doctor, "_version", installed.get)
    (found,) = (each for each in doctor._device_transport() if each.name == "nvshmem4py")
    assert found.state == state


@pytest.mark.parametrize(("trains", "state"), [(True, "problem"), (False, "missing")])
def test_doctor_misses_greenlet_where_training_needs_it(monkeypatch, trains, state) -> None:
    versions = {"megatron-core": "0.16.1"} if trains else {}
    monkeypatch.setattr(doctor, "_version", versions.get)
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["greenlet"].state == state
    assert "--no-distca-ping-pong" in findings["greenlet"].cure


def test_a_compiler_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match="no-such-compiler cannot be run"):
        native.run(["no-such-compiler", "--version"])


@pytest.mark.parametrize(
    ("built_for", "cure"), [(None, "a CUDA build of torch"), ("13.0", "install a driver")]
)
def test_doctor_sees_gpus_that_torch_cannot_use(monkeypatch, built_for, cure) -> None:
    exists = Path.exists
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0" or exists(path))
    gpus = next(finding for finding in doctor.examine() if finding.name == "GPUs")
    assert gpus.state == "problem"
    assert cure in gpus.cure

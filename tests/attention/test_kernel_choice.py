"""Which kernel a GPU gets, by its capability, the size of heads, and the installed packages."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.attention import KernelTasks, select_kernel
from distca.attention.choice import (
    GPU_KERNELS,
    advice,
    check_block_size,
    check_head_dim,
    choose,
)
from distca.attention.paged import KeyTable, PagedKeys
from distca.attention.softcap import SoftCapped
from distca.commands import doctor
from support.attention_cases import CASES, SCALE, assert_close, make_inputs, reference
from support.fake_flash import MODULES, FakePackages

ROOT = Path(__file__).parents[2]
FA2, FA3, FA4 = {"flash-attn": "2.8.3"}, {"flash-attn-3": "3.0.0"}, {"flash-attn-4": "4.0.0b36"}
HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.fixture
def packages(tmp_path, monkeypatch) -> FakePackages:
    found = FakePackages(tmp_path / "packages", monkeypatch)
    (tmp_path / "packages").mkdir()
    return found


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


@pytest.mark.parametrize(
    ("capability", "head_dim", "installed", "kernel", "to_install"),
    [
        (HOPPER, 128, FA2 | FA3 | FA4, "FlashAttn3Kernel", None),
        (HOPPER, 256, FA2 | FA4, "FlashAttn4Kernel", None),
        (HOPPER, 128, FA2, "FlashAttn2Kernel", "flash-attn-3"),
        (HOPPER, 128, {}, "TorchFlashKernel", "flash-attn-3"),
        (BLACKWELL, 128, FA2 | FA3 | FA4, "FlashAttn4Kernel", None),
        # FlashAttention 4 has other kernels for the largest heads on Blackwell.
        (BLACKWELL, 192, FA2 | FA3 | FA4, "FlashAttn2Kernel", None),
        (BLACKWELL, 64, FA3, "TorchFlashKernel", "flash-attn-4"),
        ((8, 0), 128, FA2 | FA3 | FA4, "FlashAttn2Kernel", None),
        ((12, 0), 128, FA3 | FA4, "TorchFlashKernel", None),
        # An older one's refusal matters only where it would be used.
        (HOPPER, 128, {"flash-attn": "2.6.3"} | FA3, "FlashAttn3Kernel", None),
    ],
)
def test_the_best_kernel_of_those_installed(
    packages, monkeypatch, caplog, capability, head_dim, installed, kernel, to_install
) -> None:
    packages.install(installed)
    on_gpu(monkeypatch, capability)
    with caplog.at_level(logging.INFO):
        assert type(select_kernel("cuda", head_dim)).__name__ == kernel
    chosen, faster = choose(capability, head_dim)
    assert (faster and faster.package) == to_install
    (line,) = caplog.messages
    assert line.startswith(f"core attention's kernel: {chosen}")
    assert f"FlashAttention {chosen.generation} (" in line
    assert (faster is not None and advice(faster) in line) == (to_install is not None)
    if head_dim == 128:
        (found,) = [each for each in doctor.examine() if each.name.startswith("attention kernel")]
        assert found.state == ("ok" if faster is None else "missing")
        assert found.found == str(chosen)
        assert (to_install or "") in found.cure


@pytest.mark.parametrize(
    ("installed", "source", "says"),
    [
        ({"flash-attn": "2.6.3"}, None, r"flash-attn 2\.6\.3 is too old, 2\.7 is needed: pip inst"),
        (FA2, "raise ImportError('undefined symbol')", r"2\.8\.3 .*undefined symbol.*uninstall"),
        (FA2, "", "_flash_attn_varlen_forward.*or uninstall flash-attn:"),
        (FA3, "", r"flash-attn-3 3\.0\.0 is installed but.*or uninstall flash-attn-3:"),
        (FA4, "import no_such_cutlass", "no_such_cutlass.*or uninstall flash-attn-4:"),
    ],
)
def test_a_package_that_cannot_be_used_is_refused(
    packages, monkeypatch, installed, source, says
) -> None:
    (name,) = installed
    packages.install(installed, {} if source is None else {name: source})
    on_gpu(monkeypatch, HOPPER)
    with pytest.raises(ValueError, match=says):
        select_kernel("cuda", 128)
    (found,) = [each for each in doctor.examine() if each.name.startswith("attention kernel")]
    assert (found.state, found.name) == ("problem", "attention kernel, sm_90")
    assert name in found.cure


def test_version_3_alone_leaves_multiprocessors_free(packages, monkeypatch) -> None:
    packages.install(FA3 | FA4)
    on_gpu(monkeypatch, BLACKWELL)
    with pytest.raises(ValueError, match=r"FlashAttention 4 .* remove --distca-sm-margin"):
        select_kernel("cuda", 128, sm_margin=8)
    on_gpu(monkeypatch, HOPPER)
    for given, margin in ({}, 0), ({"sm_margin": 8}, 8):
        kernel, told = select_kernel("cuda", 128, **given), []
        for name in ("_forward", "_backward"):
            theirs = getattr(kernel, name)

            def noted(*values, theirs=theirs, told=told, **options):
                told.append(options["sm_margin"])
                return theirs(*values, **options)

            monkeypatch.setattr(kernel, name, noted)
        _, case, causal, window = CASES[0]
        (*rows, dout), edges = make_inputs(case, 4, 2, 16, torch.float32)
        tasks = KernelTasks(*edges, causal, window, SCALE)
        kernel.backward(dout, *rows, *kernel.forward(*rows, tasks), tasks)
        assert told == [margin, margin]


@pytest.mark.parametrize("head_dim", [0, 4, 100, 264, 512])
def test_heads_that_no_kernel_has_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"heads of {head_dim} elements: choose --kv-channels"):
        check_head_dim(head_dim)
    with pytest.raises(ValueError, match="multiple of 8 up to 256"):
        choose(HOPPER, head_dim)
    for possible in (8, 80, 256):
        check_head_dim(possible)


@pytest.mark.parametrize(
    ("capability", "installed", "why"),
    [
        (HOPPER, FA2, r"FlashAttention 2 \(flash-attn 2\.8\.3\) .* another kernel: pip .*-attn-3"),
        (
            (8, 0),
            {},
            r"FlashAttention 2 \(torch .*\) needs a multiple of 256 tokens: give one$",
        ),
        (HOPPER, FA3, None),
        (BLACKWELL, FA4, None),
    ],
)
def test_blocks_that_a_kernel_does_not_read_are_refused(
    packages, monkeypatch, capability, installed, why
) -> None:
    check_block_size(16, 128)  # There is no GPU.
    packages.install(installed)
    on_gpu(monkeypatch, capability)
    check_block_size(512, 128)
    if why is None:
        check_block_size(16, 128)
        return
    for block_size in (16, 128, 384):
        with pytest.raises(ValueError, match=f"--block-size {block_size}: {why}"):
            check_block_size(block_size, 128)


def test_scores_with_a_soft_cap_need_a_package(packages, monkeypatch) -> None:
    on_gpu(monkeypatch, (8, 0))
    with pytest.raises(ValueError, match=r"no soft cap of scores: pip .* 'flash-attn>=2\.7'"):
        select_kernel("cuda", 128, softcaps=True)
    packages.install(FA2)
    assert type(select_kernel("cuda", 128, softcaps=True)).__name__ == "FlashAttn2Kernel"


def test_gpus_without_flash_attention_are_refused() -> None:
    with pytest.raises(ValueError, match=r"8\.0 or later \(Ampere\), and this one has 7\.5"):
        choose((7, 5), 128)


@pytest.mark.parametrize("package", MODULES)
@pytest.mark.parametrize(("name", "case", "causal", "window"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_calls_mean_the_tasks(
    packages, monkeypatch, package, name, case, causal, window, softcap
) -> None:
    """The stand-ins take what the real functions take, and compute what it means there."""
    packages.install({package: "9.9"})
    on_gpu(monkeypatch, HOPPER)
    kernel = select_kernel("cuda", 16, softcap is not None)
    tensors, edges = make_inputs(case, 4, 2, 16, torch.float32)
    q, k, v, dout = tensors
    tasks = KernelTasks(*edges, causal, window, SCALE, softcap)
    out, lse = kernel.forward(q, k, v, tasks)
    gradients = kernel.backward(dout, q, k, v, out, lse, tasks)
    # Memory that is given is written, also where its rows lie apart.
    apart = [torch.full((len(x), 2, *x.shape[1:]), 7.0)[:, 0] for x in (out, lse, q, k, v)]
    into = kernel.forward(q, k, v, tasks, tuple(apart[:2]))
    into += kernel.backward(dout, q, k, v, *into, tasks, tuple(apart[2:]))
    for given, written, found in zip(apart, into, (out, lse, *gradients), strict=True):
        assert given.data_ptr() == written.data_ptr()
        assert torch.equal(given, found)
    expected_out, expected_lse, expected_gradients = reference(
        tensors, edges, causal, window, softcap
    )
    assert_close(out, expected_out, 3e-6)
    assert_close(lse, expected_lse, 3e-6)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(found, expected, 3e-6)


@pytest.mark.parametrize("package", MODULES)
@pytest.mark.parametrize("window", [None, 5])
def test_calls_mean_the_lines_of_a_table(packages, monkeypatch, package, window) -> None:
    """A query of each line, which is the last of its keys; the host knows nothing of them."""
    packages.install({package: "9.9"})
    on_gpu(monkeypatch, HOPPER)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(4, 4, 16), torch.randn(2, 6 * 256, 2, 16)
    host = np.array([[4, 1], [0, 0], [2, 5], [3, 0]], dtype=np.int32)
    used = np.array([300, 1, 512, 7])
    first = np.zeros_like(used) if window is None else np.maximum(used - 1 - window, 0)
    keys = PagedKeys(torch.from_numpy(host), host, first, used, 256)
    each = torch.arange(5, dtype=torch.int32)
    edges = each, torch.tensor([0, *np.cumsum(used - first)], dtype=torch.int32)
    tasks = KernelTasks(*edges, False, None, SCALE)
    expected = SoftCapped(select_kernel("cpu"), 2.0).forward_paged(q, k, v, tasks, keys)
    kernel = SoftCapped(select_kernel("cuda", 16, softcaps=True), 2.0)
    assert kernel.reads_table(16)
    table = KeyTable(torch.from_numpy(host), torch.from_numpy(used).int(), each, 256)
    found = kernel.forward_table(q, k, v, table, SCALE, window)
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine, theirs.double(), 3e-6)


@pytest.mark.parametrize("package", MODULES)
@pytest.mark.parametrize("first", [0, 3], ids=["whole", "windowed"])
@pytest.mark.parametrize("queries", [(1, 0, 1, 2), (1, 0, 1, 1)], ids=["several", "at most one"])
def test_calls_mean_the_pools_rows(
    packages, monkeypatch, package, first: int, queries: tuple[int, ...]
) -> None:
    """Keys in blocks, whole lines of a table or parts of them: those that torch on CPUs has."""
    packages.install({package: "9.9"})
    on_gpu(monkeypatch, HOPPER)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(sum(queries), 4, 16), torch.randn(2, 6 * 256, 2, 16)
    host = np.array([[4, 1], [0, 0], [2, 5], [3, 0]], dtype=np.int32)
    used = np.array([300, 0, 512, 7])
    keys = PagedKeys(torch.from_numpy(host), host, np.minimum(first, used), used, 256)
    lengths = np.array(queries), keys.used - keys.first
    edges = [torch.tensor([0, *np.cumsum(each)], dtype=torch.int32) for each in lengths]
    tasks = KernelTasks(*edges, False, None, SCALE)
    expected = SoftCapped(select_kernel("cpu"), 2.0).forward_paged(q, k, v, tasks, keys)
    into = torch.full((len(q), 2, 4, 16), 7.0)[:, 0], torch.full((len(q), 4), 7.0)
    kernel = SoftCapped(select_kernel("cuda", 16, softcaps=True), 2.0)
    for found in (kernel.forward_paged(q, k, v, tasks, keys, into), into):
        for mine, theirs in zip(found, expected, strict=True):
            assert_close(mine, theirs.double(), 3e-6)


def test_the_page_of_the_first_run_installs_kernels_as_messages_say() -> None:
    page = (ROOT / "docs" / "first_gpu_run.md").read_text().replace("`", "")
    commands = [kernel.install for kernel in GPU_KERNELS if kernel.package]
    assert len(commands) == 3
    assert [command for command in commands if command not in page] == []

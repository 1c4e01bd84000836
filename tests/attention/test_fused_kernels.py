"""Fused kernels by Triton's interpreter, compiled without a GPU, and when they are chosen."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from distca.attention import fused
from distca.attention.fused import FusedKernels, load_fused_kernels
from distca.runtime.fused_rows import FusedRowKernels, select_row_kernels
from distca.runtime.row_kernels import TorchRowKernels

ROOT = Path(__file__).parents[2]
NAMES = re.findall(r"@check\ndef (\w+)", (ROOT / "tests/support/fused_checks.py").read_text())
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton: pip install triton")


def _run(module: str, **more: str) -> dict[str, Any]:
    """What a process of its own found, without GPUs."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    ran = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""} | more,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """How each check failed, or None."""
    return _run("support.fused_checks", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_interpreted(interpreted: dict[str, str | None], name: str) -> None:
    assert interpreted[name] is None, interpreted[name]


@needs_triton
def test_each_compiles_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    """For sm_80, sm_90 and sm_100, each once for all plans. Rows are read and written 16 bytes at a
    time, and what is summed in float32 is rounded to the nearest."""
    found = _run("support.fused_compiled", TRITON_CACHE_DIR=str(tmp_path))
    assert {name.split(",")[0] for name in found} == {"sm_80", "sm_90", "sm_100"}
    for name, its in found.items():
        assert its["target"], name
        assert its["binary"], name
        assert its["serves any plan"], name
        assert min(its["wide loads"], its["wide stores"]) > 0, name
        if "bfloat16" in name and any(
            each in name for each in ("make_rows 2", "merge", "normal", "gate", "combine")
        ):
            assert its["rounds to nearest"], name
        if "bfloat16" in name and "rotate" in name:
            # Of 32 pairs a thread rounds four products and two sums each.
            assert its["bfloat16 arithmetic"] == 32 * 6, name


@pytest.fixture
def anew() -> Iterator[None]:
    """The choice is made anew."""
    fused._load.cache_clear()
    yield
    fused._load.cache_clear()


@pytest.fixture
def version(anew: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version of triton that is installed, with kernels that work; None: it is not."""

    def install(number: str | None, tried: Any = lambda kernels: None) -> None:
        def find(_: str) -> ModuleType:
            if number is None:
                raise ModuleNotFoundError("No module named 'triton'", name="triton")
            return ModuleType("kernels")

        monkeypatch.setattr(fused, "_version", lambda: number)
        monkeypatch.setattr(fused.importlib, "import_module", find)
        monkeypatch.setattr(fused, "_try", tried)

    return install


def test_a_cpu_has_none() -> None:
    assert load_fused_kernels("cpu") is None
    assert isinstance(select_row_kernels("cpu"), TorchRowKernels)


def test_a_gpu_has_them_where_triton_is_installed(version: Any) -> None:
    version("3.7.1")
    assert isinstance(load_fused_kernels("cuda"), FusedKernels)
    assert isinstance(select_row_kernels("cuda"), FusedRowKernels)
    assert load_fused_kernels("cuda") is load_fused_kernels("cuda")


@pytest.mark.parametrize(
    ("number", "why"),
    [(None, "triton is not installed"), ("3.3.1", "triton 3.3.1 is older than 3.4")],
)
def test_torch_moves_rows_where_it_is_missing_or_old(
    version: Any, caplog: pytest.LogCaptureFixture, number: str | None, why: str
) -> None:
    version(number)
    with caplog.at_level(logging.INFO):
        assert load_fused_kernels("cuda") is None
    assert caplog.messages == [f"rows move by torch's operators: {why}"]
    assert isinstance(select_row_kernels("cuda"), TorchRowKernels)


def test_a_triton_that_is_broken_is_refused(version: Any) -> None:
    def tried(_: FusedKernels) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease set CC")

    version("3.7.1", tried)
    expected = (
        r"triton 3\.7\.1 is installed but cannot be used \(Failed to find C compiler\.\): mend"
    )
    with pytest.raises(ValueError, match=expected):
        load_fused_kernels("cuda")

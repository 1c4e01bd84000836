"""Waits that are dropped from our code are seen on simulated GPUs."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

from support.simgpu.machine import ROOT, Machine, built_or_skip
from support.simgpu.sent_rows import EXPECTED
from support.simgpu.wait_mutants import Mutant, mutants

OUTBOX = "distca/prefill/outbox.py"


def _line(text: str) -> int:
    lines = (ROOT / OUTBOX).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


SENDS_BY_TCP = range(_line("class _OnItsWay"), _line("class _Slot"))
"""Lines of what rows by TCP need; those by NIXL need NIXL."""
MUTANTS = [each for each in mutants((ROOT / OUTBOX).read_text()) if each.line in SENDS_BY_TCP]
SHORT = random.Random(0).sample(MUTANTS, 2)


def _run(folder: Path, source: str) -> bool:
    """Whether rows come as they were sent and nothing races, with another file."""
    shutil.copytree(ROOT / "distca", folder / "distca", ignore=shutil.ignore_patterns("*.pyc"))
    (folder / OUTBOX).write_text(source)
    ran = Machine().run([sys.executable, "-m", "support.simgpu.sent_rows"], folder=folder)
    return ran.returncode == 0 and json.loads(ran.stdout) == EXPECTED


def test_mutants_are_other_programs() -> None:
    source = """
def send(a, b):
    a.wait_stream(b)
    with torch.cuda.stream(a):
        x.record_stream(a)
    return a.query()
"""
    found = {(each.line, each.what) for each in mutants(source)}
    assert found == {
        *((3, "no wait_stream"), (3, "wait_stream turned round")),
        *((4, "no stream"), (5, "no record_stream"), (6, "no query")),
    }
    for each in mutants(source):
        compile(each.source, "mutant", "exec")
        assert each.source != source


def test_the_code_as_it_is_passes(tmp_path: Path) -> None:
    built_or_skip()
    assert _run(tmp_path, (ROOT / OUTBOX).read_text())


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            each,
            id=f"{each.line} {each.what}",
            marks=() if each in SHORT else pytest.mark.full,
        )
        for each in MUTANTS
    ],
)
def test_a_mutant_is_seen(tmp_path: Path, mutant: Mutant) -> None:
    built_or_skip()
    assert not _run(tmp_path, mutant.source)

"""Flags that are refused before Megatron-LM is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patches.flags.early import check_our_flags
from support.pretraining import ROOT

# Flags, and the line about them.
REFUSED = [
    ("--distca-tolerence 0.1", "there is no --distca-tolerence: did you mean --distca-tolerance?"),
    ("--distca-nosuch --distca-x", "there is no --distca-nosuch: --help lists all flags; there is"),
    ("--distca-tolerance=1", "--distca-tolerance 1.0 is out of range: give a number from 0 and"),
    ("--distca-tolerance some", "argument --distca-tolerance: invalid float value: 'some'"),
    ("--lr 1 --distca-chain", "argument --distca-chain: expected one argument"),
    ("--distca-scheduler best", "argument --distca-scheduler: invalid choice: 'best'"),
    ("--distca --distca-profile none", "--distca-profile none does not exist: make one with"),
]


@pytest.mark.parametrize(("flags", "line"), REFUSED)
def test_wrong_flags_are_refused(flags: str, line: str) -> None:
    with pytest.raises(ValueError, match="--distca") as refused:
        check_our_flags(["--num-layers", "2", *flags.split()])
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    "flags",
    ["--nosuch 3", "--lr -1 --distca --no-distca-ping-pong", "--distca-nosuch --help", "--sft"],
)
def test_the_rest_is_left_to_the_whole_check(flags: str) -> None:
    check_our_flags(flags.split())


@pytest.mark.parametrize("start", [["pretrain_gpt.py"], ["-m", "megatron_patches.check_run"]])
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--distca-tolerence 1", REFUSED[0][1]),
        ("--distca --data-path {folder}/none", "none.idx does not exist"),
    ],
)
def test_megatron_is_not_imported_before(
    start: list[str], flags: str, line: str, tmp_path: Path
) -> None:
    own = ["--ranks", "2", "--"] if start[0] == "-m" else []
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *start, *own, *flags.format(folder=tmp_path).split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    imports = [each for each in done.stderr.splitlines() if each.startswith("import time:")]
    modules = {each.rpartition("|")[2].strip() for each in imports}
    assert "megatron_patches.flags.early" in modules
    assert not {"megatron.core", "megatron.training"} & modules
    (said,) = [each for each in done.stderr.splitlines() if "error: " in each]
    assert line in said
    assert done.returncode == 2

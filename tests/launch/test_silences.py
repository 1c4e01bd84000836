"""What takes long says every ten seconds that it goes on."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.pretraining import ROOT


def test_a_pipe_says_how_long_nothing_came() -> None:
    """Lines come through as they are, also those that come in parts."""
    given = "echo first; sleep 2.4; printf 'sec'; sleep 1.4; echo ond; printf '\\\\t last'"
    done = subprocess.run(
        ["bash", "-c", f"source launch/common.sh; ({given}) | passing_on 1 training"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "first\nsecond\n\\t last")
    said = done.stderr.splitlines()
    assert 2 <= len(said) <= 4
    assert all(re.fullmatch(r"  0:0\d, training", line) for line in said), said


@pytest.mark.parametrize("module", ["megatron_patches.launch", "megatron_patches.convert.__main__"])
def test_progress_begins_before_what_takes_long_is_imported(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'megatron.core'}} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

"""Megatron-LM's script with the two lines, run on live ranks of the installed version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.own_loop import FLAGS, sizes
from support.pretraining import LOSS, ROOT, run_command
from support.whole_runs import write_documents


def test_megatrons_script_with_distca_trains_as_ours_does(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "documents", [500, 470, 130, 300] * 20)
    flags = [*FLAGS, "--data-path", data, *sizes(256, data_parallel=2), "--distca"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "tests/support/two_lines.py", *flags],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    found = LOSS.findall(done.stdout)
    assert len(found) == 2
    expected = LOSS.findall(run_command(2, flags))
    assert [float(loss) for _, loss in found] == pytest.approx(
        [float(loss) for _, loss in expected], rel=1e-6
    )

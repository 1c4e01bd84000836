"""Training without a checkout: the module that an installed wheel has, and its help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.pretraining import FLAGS, LOSS, ROOT, TOKENIZER, run


def test_help_lists_our_flags_among_megatrons(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_patches.pretrain", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--num-layers" in done.stdout
    assert "--distca-tolerance" in done.stdout


def test_the_module_trains_as_the_script_does(corpus: str, tmp_path: Path) -> None:
    flags = ["--distca", "--train-iters", "3"]
    losses, _ = run(2, corpus, *flags)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "megatron_patches.pretrain"]
    done = subprocess.run(
        [*command, *TOKENIZER, *FLAGS, "--data-path", corpus, *flags],
        # Where there is no pretrain_gpt.py.
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {int(iteration): loss for iteration, loss in LOSS.findall(done.stdout)}
    assert losses
    assert {iteration: found[iteration] for iteration in losses} == losses

"""What a process does when training is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.pretraining import FLAGS, TOKENIZER

SCRIPT = """
import atexit, sys
import torch.distributed as dist

# Registered first, it runs last, before the interpreter ends its threads.
atexit.register(lambda: print("groups at the end:", dist.is_initialized()))
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
from megatron_patches.pretrain import main
main()
print("groups after training:", dist.is_initialized())
"""


def test_process_groups_end_before_the_interpreter(corpus: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "1", "--no-python", sys.executable, "-c", SCRIPT]
    command += [*TOKENIZER, *FLAGS, "--data-path", corpus, "--distca", "--train-iters", "2"]
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        command, capture_output=True, text=True, cwd=root, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "groups after training: True" in ran.stdout
    assert "groups at the end: False" in ran.stdout

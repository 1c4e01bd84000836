"""Launch scripts, run as sbatch or a user does."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --num-query-groups 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --seq-length 256 --max-position-embeddings 512 --distca-max-document-length 512
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 129
    --split 80,20,0
    --lr-warmup-iters 1 --log-interval 1 --eval-iters 0
""".split()
"""Flags of a small model that the scripts train."""
# Starts as many processes as Slurm would, on this machine.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) SLURM_NTASKS=${1#*=} ;; esac
    shift
done
processes=()
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    processes+=($!)
done
status=0
for process in "${processes[@]}"; do wait "$process" || status=$?; done
exit "$status"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo localhost; else echo "scontrol $*"; fi
"""


def launch(
    script: str, *flags: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A script as sbatch or a user starts it, to its end."""
    command = ["bash", str(ROOT / "launch" / script), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def pretrain_flags(line: str) -> list[str]:
    words = shlex.split(line)
    return words[words.index("pretrain_gpt.py") + 1 :]


def slurm_environment(folder: Path) -> dict[str, str]:
    """The environment of a job of two tasks on one node; stand-ins for Slurm lie in the folder."""
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }

"""Whole runs of `pretrain_gpt.py`, each in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from support.forks import ROOT, launch
from support.versions import null_tokenizer

LOSS = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) \|")
FLAGS = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0.1 --micro-batch-size 1 --global-batch-size 4
    --lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1
    --split 80,10,10 --log-interval 1
    --eval-interval 1000 --eval-iters 0 --seq-length 256 --make-vocab-size-divisible-by 129
    --max-position-embeddings 4096
""".split()
# As many tokens as the tokenizer of bytes has, which the corpus was written with.
TOKENIZER = null_tokenizer(257)


def start(
    processes: int,
    corpus: str,
    *flags: str,
    output: IO[str] | int = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Starts a run by torchrun, in processes that import everything for themselves."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "pretrain_gpt.py"]
    return subprocess.Popen(
        [*command, *_arguments(corpus, flags)],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        | dict(environment or {}),
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _arguments(corpus: str, flags: Sequence[str]) -> list[str]:
    return [*TOKENIZER, *FLAGS, "--data-path", corpus, *flags]


def run(processes: int, corpus: str, *flags: str, status: int = 0) -> tuple[dict[int, str], str]:
    """The losses as they were printed, by iteration, and the whole output.

    Without the second one, which is a mean: Megatron-LM adds the first iteration to it.
    """
    output = run_command(processes, _arguments(corpus, flags), status)
    lines = LOSS.findall(output)
    return {int(i): loss for i, loss in lines[:1] + lines[2:]}, output


def separate(losses: Mapping[int, float]) -> dict[int, float]:
    """The losses of iterations, of which Megatron-LM prints the first two's mean second."""
    first, second, *_ = sorted(losses)
    return {**losses, second: 2 * losses[second] - losses[first]}


def run_command(processes: int, arguments: Sequence[str], status: int = 0) -> str:
    """Runs a command line to its end on ranks that are forks, and returns what it printed."""
    code, output = run_script("pretrain_gpt.py", processes, arguments)
    assert (code == 0) == (status == 0), output[-3000:]
    return output


def run_script(script: str, processes: int, arguments: Sequence[str]) -> tuple[int, str]:
    """Runs a script to its end on ranks that are forks.

    Args:
        script: path of the script from the root.
        processes: number of ranks.
        arguments: arguments of the script.

    Returns:
        The exit code of the first rank that failed, or 0, and what all ranks printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        launcher = launch(processes, arguments, printed, script)
        try:
            launcher.join(timeout=300)
            code = launcher.exitcode
        finally:
            for pid in descendants(launcher.pid):
                os.kill(pid, signal.SIGKILL)
            launcher.kill()
        output = printed.read_text()
    assert code is not None, f"it did not end: {output[-3000:]}"
    return code, output


def kill_all(process: subprocess.Popen[str]) -> None:
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    if not children.exists():
        return []
    found = [int(child) for child in children.read_text().split()]
    return found + [grandchild for child in found for grandchild in descendants(child)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

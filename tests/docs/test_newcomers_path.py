"""A newcomer's path, timed: commands are copied from the pages into a shell, in a fresh checkout.

README, demo, own data, simulation, own training, report, Slurm script. Without `--full` the demo's
commands are only printed and nothing is simulated, since both take minutes.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from support.documented import ROOT, read_page

MOST_CPU_SECONDS = 900
"""Of the whole path: the demo with 20 iterations takes about 200, the simulation 30."""


def command_of(page: str, pattern: str) -> str:
    """Returns the one command of a page that a pattern matches, as it is typed."""
    found = {each.text for each in read_page(ROOT / page).commands}
    (only,) = (text for text in found if re.fullmatch(pattern, text))
    return only


class Shell:
    """A user's shell in a checkout that is set up.

    Args:
        folder: folder of the checkout.
        record: notes a figure of the test.
    """

    def __init__(self, folder: Path, record: object) -> None:
        self.folder, self._record = folder, record
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
        for name in listed.stdout.decode().splitlines():
            if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/results/")):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        # The environment of the tests is what it would make.
        (folder / "launch" / "setup.sh").write_text("#!/usr/bin/env bash\n")
        (folder / ".venv").symlink_to(sys.prefix)
        self.env = os.environ | {
            "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def type(self, command: str) -> str:
        """Types a command, fails unless it ends well, and returns what it printed."""
        begin, cpu = time.monotonic(), _cpu_seconds()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}\n{output[-3000:]}"
        assert callable(self._record)
        took = f"{time.monotonic() - begin:.0f} s, {_cpu_seconds() - cpu:.0f} of CPU"
        self._record(command.split(" --")[0], took)
        return output


def _cpu_seconds() -> float:
    """CPU seconds of all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_path_from_the_front_page_to_a_cluster(
    tmp_path: Path, full: bool, record_property: object
) -> None:
    folder = tmp_path / "distca"
    shell = Shell(folder, record_property)
    begin = _cpu_seconds()

    demo = command_of("docs/quick_start.md", r"launch/demo\.sh --train-iters 20")
    if full:
        assert "busiest over mean, core attention" in shell.type(demo)
        assert (folder / "demo" / "report.png").stat().st_size > 0
        report = command_of("docs/quick_start.md", r"distca report .*")
        assert "DistCA" not in shell.type(report).splitlines()[0]
        assert (folder / "report.html").stat().st_size > 0
    else:
        assert "pretrain_gpt.py --distca" in shell.type(f"{demo} --dry-run")

    # Own data: a folder of texts.
    (folder / "texts").mkdir()
    for page in (folder / "docs").glob("*.md"):
        shutil.copy(page, folder / "texts")
    shell.type(command_of("docs/quick_start.md", r"distca prepare .* --train-tokenizer 32000"))
    assert (folder / "corpus.idx").exists()

    simulation = command_of("README.md", r"distca simulate --distribution pretrain .*")
    if full:
        assert re.match(r"(Use|Don't use) DistCA", shell.type(simulation))
    plan = command_of("docs/planning.md", r"distca plan --lengths corpus\.idx .*")
    # As many tokens as a newcomer has.
    few = re.sub(
        r"--servers \d+ --tokens-per-server \d+", "--servers 4 --tokens-per-server 4096", plan
    )
    assert "load max/mean" in shell.type(few)

    training = command_of(
        "docs/quick_start.md", r"python -m megatron_patches\.launch .* pretrain_gpt\.py --distca .*"
    )
    printed = shell.type(f"{training} --tensorboard-dir logs/boards")
    assert "iteration 20/20 | lm loss: " in printed
    summary = command_of("docs/launching.md", r"distca report logs --html report\.html")
    assert "iterations 1 to 20, loss " in shell.type(summary)

    cluster = command_of(
        "docs/launching.md", r"bash launch/slurm/pretrain_4d\.sh .* --save checkpoints"
    )
    (folder / "llama").symlink_to("corpus_tokenizer")
    assert "--ntasks=64" in shell.type(cluster)
    assert _cpu_seconds() - begin < MOST_CPU_SECONDS

"""Runs of `pretrain_gpt.py` that are killed at random moments, and gone on with."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_patches.loop.checkpoint_folder import (
    TRACKER,
    checkpoint_name,
    find_corruption,
    latest_iteration,
)
from support.pretraining import LOSS, descendants, start

MARK = "DISTCA_TEST_STORM"
WAYS = ("rank", "launcher", "terminate", "interrupt")
LONGEST_DELAY = {"save": 0.15, "start": 8.0, "step": 0.5}
PATIENCE = 300.0


@dataclass(frozen=True)
class Kill:
    """How and when a run is ended.

    Attributes:
        way: who gets what: a rank or the launcher SIGKILL, or the launcher SIGTERM or SIGINT.
        moment: during what.
        delay: seconds after that began.
        victim: number of the rank that is killed, from the random draw.
        gracefully: whether the run has `--exit-signal-handler`.
    """

    way: str
    moment: str
    delay: float
    victim: int
    gracefully: bool


def draw_kills(seed: int, count: int) -> list[Kill]:
    """Draws a storm: ways and moments come in turn, with all others, and the rest at random."""
    generator = random.Random(seed)
    moments = list(LONGEST_DELAY)
    return [
        Kill(
            WAYS[number % len(WAYS)],
            moment := moments[number % len(moments)],
            generator.uniform(0, LONGEST_DELAY[moment]),
            generator.randrange(100),
            number % 8 in (2, 3, 5, 6),
        )
        for number in range(count)
    ]


@dataclass
class Storm:
    """Runs of one job, killed one after another.

    Attributes:
        processes: number of ranks.
        corpus: prefix of the data.
        flags: flags of all runs.
        save: folder of the checkpoints.
        printed: what each run printed.
        ends: seconds from each kill to the launcher's end.
        lasting: seconds from each launcher's end to that of the last process of its job.
    """

    processes: int
    corpus: str
    flags: Sequence[str]
    save: Path
    printed: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    lasting: list[float] = field(default_factory=list)

    def losses(self) -> list[list[tuple[int, str]]]:
        """Returns what each run printed of its iterations, in order."""
        return [[(int(i), loss) for i, loss in LOSS.findall(run)] for run in self.printed]

    def run(self, kill: Kill | None) -> None:
        """Goes on with the job until it is killed, or to its end; checks what it leaves.

        Raises:
            AssertionError: a process is left, or the tracker names no whole checkpoint.
        """
        mark = uuid.uuid4().hex
        flags = [*self.flags, "--save", str(self.save), "--load", str(self.save)]
        flags += ["--save-interval", "1"]
        if kill is not None and kill.gracefully:
            flags.append("--exit-signal-handler")
        path = self.save.parent / f"output-{mark}"
        with path.open("w") as output:
            process = start(
                self.processes, self.corpus, *flags, output=output, environment={MARK: mark}
            )
        try:
            if kill is not None:
                self._wait_for(kill, process, path)
                self._strike(kill, process)
            struck = time.monotonic()
            process.wait(PATIENCE)
            if kill is not None:
                self.ends.append(time.monotonic() - struck)
            self.lasting.append(_seconds_until_gone(mark))
        finally:
            for pid in _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            self.printed.append(path.read_text())
        assert kill is not None or process.returncode == 0, self.printed[-1][-3000:]
        latest = latest_iteration(self.save)
        if latest is not None:
            assert find_corruption(checkpoint_name(self.save, latest)) is None

    def go_back_to(self, iteration: int) -> None:
        """Lets the job go on from an older checkpoint; newer ones are in its way."""
        assert checkpoint_name(self.save, iteration).exists()
        (self.save / TRACKER).write_text(str(iteration))

    def _wait_for(self, kill: Kill, process: subprocess.Popen[str], output: Path) -> None:
        known = self._saved()
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None:
            if kill.moment == "start" and len(self._ranks(process)) == self.processes:
                break
            if kill.moment == "step" and LOSS.search(output.read_text()):
                break
            if kill.moment == "save" and self._saved() != known:
                break
            assert time.monotonic() < deadline, output.read_text()[-3000:]
            time.sleep(0.002 if kill.moment == "save" else 0.05)
        time.sleep(kill.delay)

    def _saved(self) -> set[str]:
        names = os.listdir(self.save) if self.save.exists() else []
        return {name for name in names if "iter_" in name}

    def _ranks(self, process: subprocess.Popen[str]) -> list[int]:
        return [pid for pid in descendants(process.pid) if b"pretrain_gpt.py" in _command(pid)]

    def _strike(self, kill: Kill, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            if kill.way == "rank":
                # The run may just have ended.
                ranks = self._ranks(process) or [process.pid]
                os.kill(ranks[kill.victim % len(ranks)], signal.SIGKILL)
        number = {
            "launcher": signal.SIGKILL,
            "terminate": signal.SIGTERM,
            "interrupt": signal.SIGINT,
        }.get(kill.way)
        if number is not None:
            process.send_signal(number)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _marked(mark: str) -> list[int]:
    """Processes that have a mark in their environment, which children inherit."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def _seconds_until_gone(mark: str) -> float:
    begin = time.monotonic()
    while left := _marked(mark):
        waited = time.monotonic() - begin
        assert waited < 10, f"left: {[_command(pid) for pid in left]}"
        time.sleep(0.05)
    return time.monotonic() - begin

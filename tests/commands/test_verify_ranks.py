"""How the ranks of `distca verify` start, and what is said where they do not, or fail."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from distca.commands.verify import environment, ranks
from distca.commands.verify.stage import Fault, Line

_HANGS = """
import multiprocessing
import time
from unittest import mock

from distca.commands.verify import ranks
from distca.commands.verify.stage import Stage


def fork(started, function, *arguments, pipe):
    process = multiprocessing.get_context("fork").Process(target=function, args=(*arguments, pipe))
    process.start()
    started.append(process)
    pipe.close()


def hang_or_fail(context):
    if context.rank == 0:
        raise ValueError("wrong")
    time.sleep(60)


stages = [Stage("links", 60, hang_or_fail, "cure")]
with (
    mock.patch.object(ranks, "chosen", lambda names: stages),
    mock.patch.object(ranks, "start_process", fork),
):
    ranks.verify_machine(2, ["links"], None, lambda line: print(line.text, line.details))
"""


def test_a_failure_has_the_stacks_of_the_other_ranks(tmp_path: Path) -> None:
    """Also of one that hangs in the stage in which another fails."""
    script = tmp_path / "hangs.py"
    script.write_text(_HANGS)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    failed, rank_0, rank_1 = re.split(r"^rank \d:$", done.stdout, flags=re.MULTILINE)
    assert failed.startswith("rank 0: ValueError: wrong")
    assert "in hang_or_fail" in failed
    assert "in _serve" in rank_0
    assert re.search(r'hangs.py", line \d+ in hang_or_fail', rank_1)


@pytest.mark.parametrize(
    ("started", "line"),
    [
        ((0,), "rank 1: it did not start in 0.2 s"),
        ((0, 1), "rank 0: it did not find the other ranks in 0.2 s"),
    ],
)
def test_ranks_that_do_not_find_each_other_end_in_time(
    started: tuple[int, ...], line: str, monkeypatch, tmp_path: Path
) -> None:
    """As if a process were stopped before it joins."""
    monkeypatch.setattr(ranks, "_SECONDS_TO_JOIN", 0.2)
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    for rank in started:
        theirs[rank].send(ranks._STARTED)
    told: list[Line] = []
    ranks._follow([mock.Mock(pid=None)] * 2, ours, ["environment"], tmp_path, told.append)
    assert [each.text for each in told] == [line]


def test_ranks_that_have_joined_may_take_longer(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "_SECONDS_TO_JOIN", 0.1)
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)

    def run() -> None:
        for each in theirs:
            each.send(ranks._STARTED)
            each.send(ranks._JOINED)
        time.sleep(0.5)
        theirs[0].send(Line("environment", "ok", "", "", 0.0, {}))
        for each in theirs:
            each.send(None)

    thread = threading.Thread(target=run)
    thread.start()
    told: list[Line] = []
    ranks._follow([mock.Mock(pid=None)] * 2, ours, ["environment"], tmp_path, told.append)
    thread.join()
    assert [each.state for each in told] == ["ok"]


def test_ranks_with_other_packages_are_named() -> None:
    """Rank 1 lacks one, as on a machine of its own."""

    def gather(mine: Any) -> list[Any]:
        return [mine, mine | {"transformers": "not installed"} if isinstance(mine, dict) else mine]

    context = mock.Mock(gather=gather, on_gpu=False, size=2)
    with mock.patch.object(environment, "examine", list):
        with pytest.raises(Fault) as raised:
            environment.check_environment(context)
        assert re.fullmatch(
            r"rank 1 has transformers not installed, and rank 0 [\d.]+", raised.value.text
        )
        context.gather = lambda mine: [mine] * 2
        environment.check_environment(context)

"""Progress of commands: lines where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distca import progress as shown_by
from distca.progress import Progress, progress, track


def test_a_line_has_the_time_the_count_and_what_is_done() -> None:
    points = Progress("points", 1200, 3)
    points.update()
    points.describe("128 tokens")
    assert points.line(65.9) == "1:05, 4 of 1,200 points, 128 tokens, about 21:53:36 left"
    some = Progress("bytes", 2_500_000_000, scaled=True)
    some.update(1_500)
    assert some.line(0) == "0:00, 1.5 k of 2.5 G bytes"
    assert Progress("runs").line(1) == "0:01, 0 runs"
    stages = Progress("stages", 10, estimates=False)
    stages.update(9)
    stages.describe("training, for 15 min at most")
    assert stages.line(112) == "1:52, 9 of 10 stages, training, for 15 min at most"


def test_the_time_that_is_left_counts_down_while_one_part_takes_long() -> None:
    points = Progress("points", 4)
    points.update()
    lefts = [points.line(seconds).rpartition(", ")[2] for seconds in (10, 35, 39.9, 40, 1000)]
    assert lefts == [
        "about 0:30 left",
        "about 0:05 left",
        "about 0:00 left",
        "longer than estimated",
        "longer than estimated",
    ]
    points.update()
    assert points.line(1000).endswith("about 16:40 left")


def test_what_is_being_done_may_change_with_time() -> None:
    words = iter(["first", "second"])
    points = Progress("points")
    points.describe(lambda: next(words))
    assert points.line(0) == "0:00, 0 points, first"
    assert points.line(0) == "0:00, 0 points, second"


def test_lines_come_also_while_one_part_takes_long() -> None:
    out = io.StringIO()
    with progress("distca x", "points", 3, every=0.02, stream=out) as shown:
        shown.update()
        time.sleep(0.3)
    lines = out.getvalue().splitlines()
    assert len(lines) >= 3
    assert set(lines) == {"distca x: 0:00, 1 of 3 points"}
    time.sleep(0.1)
    assert out.getvalue().splitlines() == lines


def test_the_first_line_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_by, "_SECONDS_TO_FIRST_LINE", 0.05)
    out = io.StringIO()
    with progress("distca x", every=100.0, stream=out):
        time.sleep(0.4)
    assert out.getvalue() == "distca x: 0:00\n"


def test_work_that_is_short_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([1, 2, 3], "distca x", "points")) == [1, 2, 3]
    assert capsys.readouterr().err == ""


class _Gone(io.StringIO):
    """A stream that nobody reads any more."""

    tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_that_has_gone_ends_nothing() -> None:
    gone = _Gone()
    with progress("x", every=0.01, stream=gone):
        time.sleep(0.2)
    assert gone.tries > 1


def test_a_terminal_has_a_bar_whose_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_by, "_SECONDS_BETWEEN_BARS", 0.02)
    leader, follower = pty.openpty()
    with open(follower, "w") as out, progress("x", "points", 4, stream=out) as shown:
        shown.update(3)
        shown.describe("128 tokens")
        time.sleep(0.2)
    text = os.read(leader, 100_000).decode()
    os.close(leader)
    assert "128 tokens:  75%|" in text
    assert "| 3/4 [" in text
    assert text.count("128 tokens") > 2


@pytest.mark.parametrize("command", ["prepare", "profile"])
def test_commands_tell_lines_when_piped(command: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text((json.dumps({"text": "some words " * 50}) + "\n") * 3000)
    corpus, times = str(tmp_path / "corpus"), str(tmp_path / "profile.json")
    flags, count = {
        "prepare": (
            ["--input", str(texts), "--output-prefix", corpus, "--train-tokenizer", "300"],
            r"[\d.]+( [kM])? of 1\.7 M bytes, (train tokenizer|tokenize)",
        ),
        "profile": (
            [*"--heads 2 --kv-heads 1 --head-dim 8 --max-length 64 --output".split(), times],
            r"\d+ of 56 points",
        ),
    }[command]
    often = "from distca import progress; progress.SECONDS_BETWEEN_LINES = 0.01;"
    start = f"{often} import sys; from distca.commands.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", start, command, *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # The text has few pairs of tokens.
    lines = [each for each in done.stderr.splitlines() if " entries instead of " not in each]
    assert lines
    line = rf"distca {command}: 0:\d\d, {count}(, about \d+:\d\d left|, longer than estimated)?"
    assert all(re.fullmatch(line, each) for each in lines), lines

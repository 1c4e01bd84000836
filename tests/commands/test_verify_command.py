"""`distca verify`: what it prints, reports and refuses, and how it is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distca.commands.main import main
from distca.commands.verify import (
    command,
)
from distca.commands.verify import (
    report as reports,
)
from distca.commands.verify.stage import Line
from support.full_disk import full_disk

LINES = [
    Line("environment", "ok", "fine", "", 0.1, {"ranks": 2}),
    Line("links", "not run", "one rank", "", 0.0, {}),
    Line("kernels", "failed", "wrong", "mend it", 2.0, {}),
]


@pytest.fixture
def broken(monkeypatch) -> None:
    """A machine on which the third stage fails."""

    def verify_machine(ranks: int, names: Any, output: Any, tell: Any) -> None:
        for line in LINES:
            tell(line)

    monkeypatch.setattr(command, "verify_machine", verify_machine)


def test_lines_end_with_the_first_failure(broken, capsys) -> None:
    stages = ["environment", "links", "kernels", "training"]
    assert main(["verify", "--stages", *stages]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok       environment    0.1 s  fine",
        "not run  links          0.0 s  one rank",
        "failed   kernels        2.0 s  wrong",
        "                               mend it",
        "kernels failed; not run: training",
    ]


def test_stages_that_could_not_run_are_not_counted(monkeypatch, capsys) -> None:
    def verify_machine(ranks: int, names: Any, output: Any, tell: Any) -> None:
        for line in LINES[:2]:
            tell(line)

    monkeypatch.setattr(command, "verify_machine", verify_machine)
    assert main(["verify", "--stages", "environment", "links"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("nothing failed in 1 of 10 stages; not run: links, kernels, ")


def test_a_failure_is_in_the_report(broken, monkeypatch, tmp_path: Path, capsys) -> None:
    """The folder has all that one sends, though the command ends with 1."""
    monkeypatch.setattr(command, "describe_machine", lambda: {"printed": {"nvidia-smi": "none"}})
    assert main(["verify", "--output", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"the report, which is what to send us: {tmp_path}/verify.json"
    found = json.loads((tmp_path / "verify.json").read_text())
    assert (found["failed"], found["printed"]) == ("kernels", {"nvidia-smi": "none"})
    assert (found["running"], found["interrupted"]) == (None, False)
    assert [path.name for path in tmp_path.iterdir()] == ["verify.json"]


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL],
)
def test_a_report_says_where_the_command_was_stopped(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It takes the place of an older one before the first stage; that has another name then."""
    path = tmp_path / "verify.json"
    path.write_text("{}")
    command = [sys.executable, "-m", "distca", "verify", "--ranks", "1", "--output", str(tmp_path)]
    started = subprocess.Popen(
        [*command, "--stages", "environment", "training"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Training takes long.
    assert started.stdout is not None
    assert started.stdout.readline().split()[:2] == ["ok", "environment"]
    end = time.monotonic() + 60
    while json.loads(path.read_text()).get("running") != "training" and time.monotonic() < end:
        time.sleep(0.05)
    started.send_signal(number)
    _, errors = started.communicate(timeout=60)
    told = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}.get(number)
    assert started.returncode == (-number if told is None else 128 + number)
    assert told is None or errors.splitlines()[-1] == f"distca verify: {told}"
    found = json.loads(path.read_text())
    assert [line["stage"] for line in found["stages"]] == ["environment"]
    assert found["running"] == "training"
    assert found["interrupted"] is (told is not None)
    assert {each.name for each in tmp_path.iterdir()} == {"verify.json", "verify.1.json"}
    assert (tmp_path / "verify.1.json").read_text() == "{}"


_FAILS = """
import sys
from distca.commands.main import main
from distca.commands.verify import command
from distca.commands.verify.stage import Line

def verify_machine(ranks, names, output, tell):
    for stage, state in (("environment", "ok"), ("links", "ok"), ("kernels", "failed")):
        tell(Line(stage, state, "text", "", 0.0, {}))

command.verify_machine = verify_machine
command.describe_machine = dict
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_failure_counts_though_nobody_reads_it(flags: list[str], tmp_path: Path) -> None:
    """The stages go on after the reader has gone, and the report has them all."""
    command = [sys.executable, "-c", _FAILS, "verify", "--output", str(tmp_path), *flags]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    started.stdout.close()
    started.stdout = None
    _, errors = started.communicate(timeout=60)
    assert (started.returncode, errors) == (1, "")
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["failed"] == "kernels"
    assert len(found["stages"]) == 3


def test_json(broken, capsys) -> None:
    assert main(["verify", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == "kernels"
    assert report["not_reached"][0] == "transports"
    assert report["stages"][0]["figures"] == {"ranks": 2}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "65"], "--ranks 65: give at most 64 on CPUs"),
        (["--stages", "all"], "invalid choice"),
        (["--output", ""], "--output: give a folder, such as machine"),
    ],
)
def test_bad_flags(flags: list[str], says: str, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["verify", *flags])
    assert raised.value.code == 2
    assert says in capsys.readouterr().err


def test_a_file_in_the_way_is_refused_before_the_first_stage(tmp_path: Path, capsys) -> None:
    (tmp_path / "profile.json").mkdir()
    with pytest.raises(SystemExit) as raised:
        main(["verify", "--output", str(tmp_path)])
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"--output {tmp_path}: profile.json is a folder there" in printed.err


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Nothing half written stays, and what was there before does."""
    (tmp_path / "verify.json").write_text("{}")
    says = rf"^{tmp_path}/verify.json cannot be written: .*: make room or give another --output$"
    with pytest.raises(ValueError, match=says), full_disk():
        reports.save_report(tmp_path, [], [], {})
    assert [path.name for path in tmp_path.iterdir()] == ["verify.json"]
    assert (tmp_path / "verify.json").read_text() == "{}"


@pytest.mark.parametrize("value", [None, "two"])
def test_half_of_torchruns_variables_are_refused(monkeypatch, value: str | None, capsys) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(SystemExit) as raised:
        main(["verify"])
    assert raised.value.code == 2
    found = "is not set" if value is None else "is 'two'"
    assert capsys.readouterr().err == (
        f"distca verify: TORCHELASTIC_RUN_ID is set, as torchrun does, but WORLD_SIZE {found}: "
        "start this by torchrun, or unset TORCHELASTIC_RUN_ID\n"
    )


def test_a_rank_without_torchrun_is_no_rank(monkeypatch, tmp_path: Path) -> None:
    """The report is there before the first stage."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(command, "describe_machine", dict)

    def verify_machine(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "verify_machine", verify_machine)
    assert main(["verify", "--output", str(tmp_path)]) == 130
    assert json.loads((tmp_path / "verify.json").read_text())["interrupted"]

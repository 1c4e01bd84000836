"""The launcher of ranks: what it checks before it starts any, and how it ends."""

from __future__ import annotations

import json
import re
import signal
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from distca import progress
from megatron_patches import launch, launcher
from megatron_patches.check_run import STEPS, check
from megatron_patches.check_run import main as check_main
from support.pretraining import FLAGS, ROOT, TOKENIZER

SCRIPT = str(ROOT / "pretrain_gpt.py")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Namespace]:
    """What would be started by torchrun."""
    runs: list[Namespace] = []
    monkeypatch.setattr(launcher, "run", runs.append)
    return runs


def test_wrong_flags_start_no_rank(
    corpus: str, started: list[Namespace], capfd: pytest.CaptureFixture[str]
) -> None:
    given = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--train-iters", "3"]
    wrong = [*given, "--lr-warmup-iters", "200"]
    assert launch.main(["--nproc-per-node", "2", SCRIPT, *wrong]) == 2
    assert started == []
    out, err = capfd.readouterr()
    assert out == ""
    # On a loaded machine a line every 10 s says what it checks.
    assert [line for line in err.splitlines() if ", checking" not in line] == [
        "checking flags and files",
        "error: --lr-warmup-iters 200 must be less than --train-iters 3",
    ]


def test_lines_say_what_is_being_checked(
    started: list[Namespace], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_TO_FIRST_LINE", 0.1)
    assert launch.main([SCRIPT, "--num-layers", "none"]) == 2
    assert started == []
    first = capfd.readouterr().err.splitlines()[1]
    assert re.fullmatch(r".*launch: 0:\d\d, checking.*", first), first


def test_each_step_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "data.idx").touch()
    (tmp_path / "data.bin").touch()
    data = str(tmp_path / "data")
    with pytest.raises(ValueError, match=r"data\.idx is not an index"):
        check([*TOKENIZER, *FLAGS, "--data-path", data, "--train-iters", "3"], 2, told.append)
    assert told == list(STEPS)


@pytest.mark.parametrize(
    "flags", ["--data-path none", "--data-path=none", "--train-data-path 1 {there} 2 none"]
)
def test_missing_data_is_found_before_megatron_is_imported(flags: str, corpus: str) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match=r"^none\.idx does not exist"):
        check([*FLAGS, *flags.format(there=corpus).split()], 2, told.append)
    assert told == [STEPS[0]]


@pytest.mark.parametrize("flags", ["--data-path s3://bucket/none", "--data-path none --sft"])
def test_names_of_other_sources_are_left_to_the_whole_check(flags: str) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="--nosuch"):
        check([*FLAGS, "--nosuch", *flags.split()], 2, told.append)
    assert "flags" in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", None),
        ("--data-path {folder}/none", "none.idx does not exist"),
        ("--load {folder} --exit-on-missing-checkpoint", "has no checkpoint"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/none", "none"),
        ("--save {folder}/file --save-interval 2", "File exists"),
    ],
)
def test_one_process_finds_what_is_wrong(
    flags: str,
    message: str | None,
    corpus: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    more = flags.format(folder=tmp_path).split()
    given = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--train-iters", "3", *more]
    assert check_main(["--ranks", "2", "--", *given]) == (0 if message is None else 2)
    lines = capsys.readouterr().err.splitlines()
    if message is None:
        assert lines == [
            "checking: flags of DistCA and names of data (checks so far passed; 5 left)",
            "checking: importing Megatron-LM (checks so far passed; 4 left)",
            "checking: flags (checks so far passed; 3 left)",
            "checking: tokenizer (checks so far passed; 2 left)",
            "checking: data, checkpoint and folders (checks so far passed; 1 left)",
            "checking: all checks passed",
        ]
    else:
        assert lines[-1].startswith("error: ")
        assert message in lines[-1]


def test_other_scripts_are_not_checked(started: list[Namespace], tmp_path: Path) -> None:
    script = str(tmp_path / "pretrain_gpt.py")
    assert launch.main(["--nproc-per-node", "2", script, "--nosuch"]) == 0
    (args,) = started
    assert (args.training_script, args.training_script_args) == (script, ["--nosuch"])


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (SignalException("ended", signal.SIGTERM), 143, "error: a.py was ended by SIGTERM\n"),
        (KeyboardInterrupt(), 130, "error: a.py was ended by SIGINT\n"),
        (
            RendezvousConnectionError("port 9 is taken"),
            2,
            "error: the ranks cannot be started: port 9 is taken\n",
        ),
    ],
)
def test_ends_in_one_line(
    error: BaseException,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: Namespace) -> None:
        raise error

    monkeypatch.setattr(launcher, "run", run)
    assert launch.main(["a.py"]) == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("killed", "seconds", "line"),
    [
        # The one that lost it saves, which takes a while, and says so before it ends.
        (signal.SIGKILL, 0, "rank 1 of a.py was killed by SIGKILL: the machine may have run out"),
        (signal.SIGSEGV, 1, "rank 1 of a.py was killed by SIGSEGV"),
        # The launcher ends the other ranks: by SIGTERM, and 30 seconds later by SIGKILL.
        (signal.SIGTERM, 0, "rank 0 of a.py ended with exit code 1: lost rank 1"),
        (signal.SIGKILL, 30, "rank 0 of a.py ended with exit code 1: lost rank 1"),
        # NCCL and torch abort a rank that lost another one.
        (signal.SIGABRT, 0, "rank 0 of a.py ended with exit code 1: lost rank 1"),
    ],
)
def test_a_rank_that_was_killed_is_the_cause(
    killed: signal.Signals,
    seconds: int,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "error.json"
    extra = {"py_callstack": "lost rank 1", "timestamp": "1000"}
    file.write_text(json.dumps({"message": {"message": "lost rank 1", "extraInfo": extra}}))
    explained = ProcessFailure(0, 10, 1, str(file))
    other = ProcessFailure(1, 11, -killed, "")
    other.timestamp = 1000 + seconds

    def run(args: Namespace) -> None:
        raise ChildFailedError("a.py", {0: explained, 1: other})

    monkeypatch.setattr(launcher, "run", run)
    assert launch.main(["a.py"]) == (1 if "rank 0" in line else 128 + killed)
    assert capsys.readouterr().err.startswith(f"error: {line}")


def test_a_rank_that_the_launcher_killed_late_is_not_the_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It killed rank 1, which did not end by SIGTERM, after rank 0 had left without a word."""
    failures = {rank: ProcessFailure(rank, rank, code, "") for rank, code in ((0, 3), (1, -9))}
    failures[0].timestamp, failures[1].timestamp = 1000, 1030

    def run(args: Namespace) -> None:
        raise ChildFailedError("a.py", failures)

    monkeypatch.setattr(launcher, "run", run)
    assert launch.main(["a.py"]) == 3
    assert capsys.readouterr().err.startswith("error: rank 0 of a.py ended with exit code 3")

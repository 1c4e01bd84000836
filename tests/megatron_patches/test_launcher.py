"""The launcher of ranks: what it checks before it starts any, and how it ends."""

from __future__ import annotations

import signal
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from megatron_patches import launch
from megatron_patches.check_run import main as check_main
from support.pretraining import FLAGS, ROOT, TOKENIZER

SCRIPT = str(ROOT / "pretrain_gpt.py")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Namespace]:
    """What would be started by torchrun."""
    runs: list[Namespace] = []
    monkeypatch.setattr(launch, "run", runs.append)
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
    assert err.splitlines() == [
        "checking flags and files",
        "error: --lr-warmup-iters 200 must be less than --train-iters 3",
    ]


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
        assert lines == []
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

    monkeypatch.setattr(launch, "run", run)
    assert launch.main(["a.py"]) == status
    assert capsys.readouterr().err == line

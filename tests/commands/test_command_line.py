"""What all commands share: errors of a line, and output that nobody reads to its end."""

from __future__ import annotations

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from distca import __version__
from distca.commands import main as console
from distca.commands.main import COMMANDS, main
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.documents.dataset import train_tokenizer
from support.full_disk import full_disk

PLAN = "--distribution fixed --servers 2 --tokens-per-server 8192 --model llama-8b".split()


def status_of(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("arguments", [["plan", "--help"], ["plan", *PLAN]])
def test_a_reader_that_goes_early_ends_a_command_quietly(arguments: list[str]) -> None:
    """As `head` does; and where there is no room for the output, a line says so."""
    command = [sys.executable, "-m", "distca", *arguments]
    # Unbuffered, argparse would pass over what fails.
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    started = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    started.stdout.close()
    started.stdout = None
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (0, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("distca")
    assert line.endswith("No space left on device")


@pytest.mark.parametrize(
    ("work", "status"),
    [
        ("console._run = lambda _: sys.stdout.write('line') and 1", 1),
        ("console._run = lambda _: sys.stdout.write('line') and sys.exit(2)", 2),
        ("console._run = lambda _: [write_on('1'), write_on('2'), 3][-1]", 3),
    ],
)
def test_a_status_is_kept_though_nobody_reads(work: str, status: int) -> None:
    begin = "import sys\nfrom distca.commands.command_line import write_on\n"
    begin += "from distca.commands import main as console\n"
    started = subprocess.Popen(
        [sys.executable, "-c", f"{begin}{work}\nsys.exit(console.main(['plan']))"],
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    started.stdout.close()
    started.stdout = None
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (status, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plna"], "distca: no command 'plna': is plan meant?"),
        (["serve", "model"], "distca: there is no serve any more: `vllm serve` answers requests"),
        (["plan", *PLAN, "--sede", "1"], "distca plan: no flag --sede: is --seed meant?"),
        # The mistake, and not what is missing because of it.
        (["plan", "--distribtion=fixed"], "no flag --distribtion: is --distribution meant?"),
        (["plan", "--context", "9"], "no flag --context: is --max-document-length meant?"),
        (["plan", *PLAN, "--qwertyuiop"], "distca plan: no flag --qwertyuiop (see"),
        (["plan", *PLAN, "more"], "distca plan: unrecognized arguments: more"),
        # A word that is no flag, and not what is missing because of it.
        (["plan", "decod"], "distca plan: no form 'decod' (is decode meant?): choose from prefill"),
        (["simulate", "prefil"], "distca simulate: no form 'prefil' (is prefill meant?)"),
        (["tune", "partition", "m"], "distca tune: no form 'partition' (is partitions meant?)"),
        (["plan", "--servers", "1k"], "value: '1k': write the number out, such as 1024"),
        (["plan"], "--lengths --distribution --load is required"),
        *(([name, "--hlep"], f"distca {name}: no flag --hlep: is --help ") for name in COMMANDS),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments: list[str], message: str, capsys) -> None:
    assert status_of(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "--help`" in line


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(MemoryError(), 2, "not enough memory"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_what_ends_a_command_is_told(error, status, told, monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(console.importlib, "import_module", fail)
    assert status_of(["plan"]) == status
    assert capsys.readouterr().err == f"distca plan: {told}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", *PLAN, "--servers=99999999999"], "--servers 99999999999 is more than 65,536"),
        (["plan", *PLAN, "--tokens-per-server=100000000000"], "200,000,000,000 tokens: give at"),
        (
            "simulate --distribution fixed --sequences 100000000 --context 65536 --gpus 8 --model "
            "llama-8b".split(),
            "cannot draw documents of 6,553,600,000,000 tokens: give at least 1 and at most",
        ),
        (
            "profile --heads 100000000000 --kv-heads 1 --output p.json".split(),
            "--max-length 4096 needs 104,857,600.0 GB",
        ),
        ("profile --max-length 100000000000 --output p.json".split(), "give less; longer tasks"),
        (
            "tune partitions missing --context-parallel-size 2 --output t".split(),
            "missing: no such",
        ),
        ("generate missing --prompt x".split(), "missing: no such folder"),
        ("prefill missing --context-parallel-size 2".split(), "missing: no such folder"),
    ],
)
def test_values_of_which_nothing_can_be_made_are_told(
    arguments: list[str], message: str, capsys
) -> None:
    assert status_of(arguments) == 2
    # Before it the simulator may say that it leaves a system out.
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"distca {__version__}\n"


def test_help_of_a_command_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "commands:" in capsys.readouterr().out
    assert status_of(["help", "plan"]) == 0
    assert "usage: distca plan" in capsys.readouterr().out


def test_a_closed_standard_output_is_told_before_the_work() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m distca plan {' '.join(PLAN)}"
    done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (2, b"distca plan: standard output is closed\n")
    quiet = subprocess.run(["sh", "-c", f"{command} >&- 2>&-"], check=False)
    assert quiet.returncode == 2


def test_memory_that_torch_does_not_find_is_a_line(monkeypatch, capsys) -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch names that of a GPU."""

    for error in (
        OutOfMemoryError("CUDA out of memory.\nMore"),
        RuntimeError("[enforce fail at x] . DefaultCPUAllocator: can't allocate memory"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(console, "_run", Mock(side_effect=error))
            assert status_of(["plan"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("distca plan: not enough memory: ")
    monkeypatch.setattr(console, "_run", Mock(side_effect=RuntimeError("a defect of ours")))
    with pytest.raises(RuntimeError, match="a defect of ours"):
        main(["plan"])


DRAWN = "--distribution pretrain --servers 2 --tokens-per-server 512 --heads 2".split()


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--save", "plan.json"), ("--html", "plan.html"), ("--plot", "p.png"), ("--plot", "p.svg")],
)
def test_a_full_disk_keeps_the_file_that_was_there(flag, name, tmp_path: Path, capsys) -> None:
    for path in (tmp_path / name, tmp_path / "new" / name):
        before = sorted(tmp_path.iterdir())
        with full_disk(), pytest.raises(SystemExit):
            console.main(["plan", *DRAWN, flag, str(path)])
        assert f"{path} cannot be written: File too large" in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
        (tmp_path / name).write_text("good")
    assert (tmp_path / name).read_text() == "good"


def test_a_profile_on_a_full_disk(tmp_path: Path) -> None:
    tables = ((1.0, 1.0), (1.0, 1.0))
    profile = Profile((64, 128), tables, tables, AttentionShape(2, 2, 8), {})
    path = tmp_path / "profile.json"
    profile.save(path)
    with full_disk(), pytest.raises(ValueError, match=r"profile.json cannot be written"):
        profile.save(path)
    assert Profile.load(path) == profile


def test_a_tokenizer_on_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    with full_disk(), pytest.raises(ValueError, match=r"cannot be written"):
        train_tokenizer(iter(["some text"]), 260, folder)
    assert not folder.exists()


def test_prepare_names_the_file_on_a_full_disk(tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("words " * 20)
    arguments = ["--input", str(text), "--output-prefix", str(tmp_path / "corpus")]
    with full_disk(), pytest.raises(SystemExit):
        console.main(["prepare", *arguments, "--tokenizer-type", "ByteLevelTokenizer"])
    assert f"{tmp_path / 'corpus'}.bin cannot be written: File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize("other", ["plan.out", "./plan.out", "link"])
def test_two_outputs_that_are_one_file_are_refused(
    other, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("plan.out")
    with pytest.raises(SystemExit):
        console.main(["plan", *DRAWN, "--save", "plan.out", "--html", other])
    printed = capsys.readouterr()
    assert "--save and --html name the same file" in printed.err
    assert printed.out == ""
    assert not Path("plan.out").exists()
    assert console.main(["plan", *DRAWN, "--save", os.devnull, "--html", os.devnull]) == 0


def test_a_full_standard_output_is_named(monkeypatch, capsys) -> None:
    full = io.StringIO()
    monkeypatch.setattr(full, "write", Mock(side_effect=OSError(errno.ENOSPC, "No room")))
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert console.main(["plan", *DRAWN]) == 2
    assert capsys.readouterr().err == "distca plan: standard output cannot be written: No room\n"


def test_memory_below_the_reserve_is_refused(capsys) -> None:
    job = "--distribution fixed --context 1024 --sequences 2 --model llama-8b --gpus 1".split()
    for memory in ("1", "4"):
        assert status_of(["simulate", *job, "--memory-gb", memory]) == 2
        refused = capsys.readouterr().err
        assert f"--memory-gb {memory}: the driver, the libraries and fragments take 4 GB" in refused

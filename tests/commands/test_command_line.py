"""What all commands share: errors of a line, and output that nobody reads to its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distca.commands import main as console
from distca.commands.main import COMMANDS, main

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
    ("arguments", "message"),
    [
        (["plna"], "distca: no command 'plna': is plan meant?"),
        (["plan", *PLAN, "--sede", "1"], "distca plan: no flag --sede: is --seed meant?"),
        # The mistake, and not what is missing because of it.
        (["plan", "--distribtion=fixed"], "no flag --distribtion: is --distribution meant?"),
        (["plan", *PLAN, "--qwertyuiop"], "distca plan: no flag --qwertyuiop (see"),
        (["plan", *PLAN, "more"], "distca plan: unrecognized arguments: more"),
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

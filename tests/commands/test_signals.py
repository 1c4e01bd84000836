"""Ctrl-C and SIGTERM end every command within seconds, whatever it does, with one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support.byte_tokenizer import save_chat_model
from support.pretraining import ROOT
from support.signalled import (
    CTRL_C,
    KILL,
    SECONDS_TO_END,
    TERMINATE,
    Sent,
    Signalled,
    moments,
    signalled,
)
from support.small_models import VOCABULARY

ANSWER = "--prompt Hello --context-parallel-size 2 --max-tokens 60 --ignore-eos --check".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama with a tokenizer."""
    return str(save_chat_model(tmp_path_factory.mktemp("served")))


def check(name: str, sent: Sent, found: Signalled, *whole: str) -> None:
    """Checks the end of a command.

    Args:
        name: name of the command.
        sent: signal that it got.
        found: what came of it.
        whole: what ends the output if the command came to its own end before.
    """
    assert found.seconds < SECONDS_TO_END, found
    assert not found.left, found
    if sent == KILL:
        # Nobody is left to remove folders.
        assert found.status in (0, -sent.number), found
        return
    assert not found.folders, found
    word = {CTRL_C: "interrupted", TERMINATE: "terminated"}[sent]
    if found.status == 128 + sent.number:
        # Beside lines of progress, and one on what a search has found.
        beside = r"\d+:\d\d|best up to then: |nothing was found yet"
        said = re.sub(rf"(?m)^distca {name}[ \w]*: ({beside}).*\n", "", found.errors)
        assert said == f"distca {name}: {word}\n", found
    else:
        # It had said all that it had to say.
        assert found.status in (0, -sent.number), found
        assert "Traceback" not in found.errors, found
        assert all(each in found.output for each in whole), found


def test_generate_ends_at_any_moment(model: str, tmp_path: Path, full: bool) -> None:
    """From its first moment on: imports, starting ranks, loading, prefill, decoding, the check."""
    command = ["generate", model, *ANSWER]
    begin = time.monotonic()
    whole = signalled(command, None, 0.0, tmp_path)
    seconds = time.monotonic() - begin
    assert whole.status == 0, whole
    assert "equal" in whole.output
    signals = [CTRL_C, TERMINATE, CTRL_C, KILL]
    struck = set()
    for number, after in enumerate(moments(seconds, 60 if full else len(signals))):
        for sent in signals[:2] if full else [signals[number]]:
            found = signalled(command, sent, after, tmp_path)
            check("generate", sent, found, "tokens/s", "equal")
            struck.add(found.status)
    if full:
        for after in moments(seconds, 12, seed=1):
            check("generate", KILL, signalled(command, KILL, after, tmp_path))
    assert struck & {130, 143}, "all came too late"


def commands(model: str, folder: Path) -> dict[str, list[str]]:
    """Arguments of commands that take a while."""
    prompts = folder / "prompts.json"
    random = np.random.default_rng(0)
    prompts.write_text(json.dumps(random.integers(0, VOCABULARY, (4, 400)).tolist()))
    text = folder / "text.txt"
    text.write_text("Some words. " * 100_000)
    plan = "--distribution pretrain --servers 256 --tokens-per-server 65536 --model llama-8b"
    job = "--distribution pretrain --context 131072 --sequences 32 --model llama-8b --gpus 64"
    two = ["--context-parallel-size", "2"]
    chain = ["--lengths", "256", "--measure", "cpu", "--output", str(folder / "chain.json")]
    calibration = ["--prompts", str(prompts), "--output", str(folder / "calibration.json")]
    tokens = ["--tokenizer-type", "ByteLevelTokenizer", "--output-prefix", str(folder / "tokens")]
    tokens.append("--force")
    return {
        "plan": plan.split(),
        "simulate": [*job.split(), "--cluster", "dgx-h200"],
        "tune partitions": ["partitions", model, *two, *chain],
        "tune sparsity": ["sparsity", model, *two, *calibration],
        "convert": [model, "--to", str(folder / "checkpoint"), "--check", "5,3"],
        "prepare": ["--input", str(text), *tokens],
        "profile": ["--output", str(folder / "profile.json")],
        "build": ["shm", "--cache", str(folder / "native")],
        "doctor": [],
    }


@pytest.mark.parametrize(
    "name",
    [
        "plan",
        "simulate",
        "tune partitions",
        "tune sparsity",
        "convert",
        "prepare",
        "profile",
        "build",
        "doctor",
    ],
)
def test_every_command_ends(model: str, tmp_path: Path, full: bool, name: str) -> None:
    first = name.split()[0]
    if first == "convert":
        pytest.importorskip("megatron", reason="comes with the extra `convert`")
    command = [first, *commands(model, tmp_path)[name]]
    times = moments(12.0, 12, seed=len(name)) if full else moments(3.0, 3, seed=len(name))[1:]
    for number, after in enumerate(times):
        sent = (CTRL_C, TERMINATE)[number % 2]
        check(first, sent, signalled(command, sent, after, tmp_path))


def run_command(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `command.py` of a folder."""
    return subprocess.run(
        [sys.executable, "command.py"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("sent", [CTRL_C, TERMINATE])
def test_a_signal_during_an_import_is_taken_after_it(tmp_path: Path, sent: Sent) -> None:
    """What was made before the import is removed."""
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        f"os.kill(os.getpid(), {int(sent.number)})\n"
        "time.sleep(0.3)\n"
        "print('imported', flush=True)\n"
    )
    (tmp_path / "command.py").write_text(
        "import tempfile, time\n"
        "from distca.lifetime import EndAtSignals\n"
        "def command():\n"
        "    with tempfile.TemporaryDirectory(prefix='distca-'):\n"
        "        import slow\n"
        "        time.sleep(10)\n"
        "EndAtSignals('command').run(command)\n"
    )
    done = run_command(tmp_path)
    word = {CTRL_C: "interrupted", TERMINATE: "terminated"}[sent]
    assert done.returncode == 128 + sent.number, done
    assert (done.stdout, done.stderr) == ("imported\n", f"command: {word}\n")
    assert not [*tmp_path.glob("distca-*")]


@pytest.mark.parametrize("sent", [CTRL_C, TERMINATE])
def test_signals_that_another_thread_gets_are_held_too(tmp_path: Path, sent: Sent) -> None:
    """A process that is being started gets all that it reads at its start."""
    (tmp_path / "command.py").write_text(
        "import os, time\n"
        "from distca.lifetime import EndAtSignals, signals_held\n"
        "def command():\n"
        "    with signals_held():\n"
        f"        os.kill(os.getpid(), {int(sent.number)})\n"
        "        time.sleep(0.3)\n"
        "        print('started', flush=True)\n"
        "    print('goes on', flush=True)\n"
        "EndAtSignals('command').run(command)\n"
    )
    done = run_command(tmp_path)
    word = {CTRL_C: "interrupted", TERMINATE: "terminated"}[sent]
    assert done.returncode == 128 + sent.number, done
    assert (done.stdout, done.stderr) == ("started\n", f"command: {word}\n")

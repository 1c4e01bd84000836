"""A small model with a tokenizer and a chat template, and servers that answer with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from support.pretraining import ROOT
from support.small_models import save_small_model

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_served_model(folder: Path, chat_template: str | None = CHAT) -> Path:
    """Writes a small Llama with a tokenizer of bytes, and returns its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = save_small_model("llama", folder, eos_token_id=259)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(model)
    return model


class Server:
    """`distca serve` as a process of its own, on a free port.

    Args:
        model: folder of the model.
        flags: further flags.
    """

    def __init__(self, model: Path, *flags: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distca", "serve", str(model), "--port", "0", *flags],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""
        self.url = self._wait_for(r"listening on (http://\S+)")

    def _wait_for(self, pattern: str) -> str:
        """Reads the log until a line matches, and returns its group."""
        errors: IO[str] = self.process.stderr  # type: ignore[assignment]
        for line in errors:
            self.log += line
            found = re.search(pattern, line)
            if found:
                return found[1]
        raise AssertionError(f"the server ended:\n{self.log}")

    def pids(self) -> list[int]:
        """Numbers of the engine's and the workers' processes."""
        (engine,) = _spawned_by(self.process.pid)
        return [engine, *_spawned_by(engine)]

    def workers(self) -> list[int]:
        """Numbers of the workers' processes."""
        return self.pids()[1:]

    def end(self, signal: int | None = None, seconds: float = 30) -> int:
        """Sends a signal, waits for the end, and returns the exit status."""
        if signal is not None and self.process.poll() is None:
            self.process.send_signal(signal)
        try:
            self.log += self.process.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode


def _spawned_by(parent: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{parent}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def are_gone(pids: list[int], seconds: float) -> bool:
    """Whether processes end within some seconds."""
    end = time.monotonic() + seconds
    while any(_is_there(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False

"""Files of conversations and of token ids, as `distca generate` reads them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distca import json_files
from distca.inference.conversations import read_conversations, read_prompt_ids


def test_strings_may_hold_any_end_of_a_line(tmp_path: Path) -> None:
    """JSON has them as they are; a file that was written on Windows has another end of lines."""
    said = [[{"role": "user", "content": "one\u2028two\u0085three"}]] * 2
    lines = [json.dumps(each, ensure_ascii=False) for each in said]
    for end in ("\n", "\r\n"):
        (tmp_path / "chats.jsonl").write_bytes((end.join(lines) + end).encode())
        assert read_conversations(tmp_path / "chats.jsonl") == said


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\xff\xfe", "is not UTF-8: give JSON lines"),
        (b"[" * 100_000, ":1 is not JSON"),
        (b"{}", ":1 is not a list of messages"),
    ],
)
def test_other_conversations_are_refused(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--conversations {path}.*{line}"):
        read_conversations(path)


@pytest.mark.parametrize("read", [read_conversations, read_prompt_ids])
def test_what_has_no_end_or_no_text_is_refused(
    tmp_path: Path, read: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--prompt-ids" if read == read_prompt_ids else "--conversations"
    monkeypatch.setattr(json_files, "_MOST_BYTES", 1 << 22)
    monkeypatch.setattr(json_files, "_PATIENCE_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10 << 30)
    (tmp_path / "latin").write_bytes("[é]".encode("latin-1"))
    for name, why in (
        ("/dev/zero", "has more than 4,194,304 bytes"),
        ("large", "has more than 4,194,304 bytes"),
        ("pipe", r"is a pipe into which nothing was written for 0\.2 s"),
        (".", "is a folder"),
        ("none", "does not exist"),
        ("latin", "is not UTF-8"),
    ):
        path = tmp_path / name
        with pytest.raises(ValueError, match=f"^{flag} {path} {why}: give .*JSON l"):
            read(path)


def test_prompts_may_come_through_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("w") as file:
            for part in ("[[1, ", "2], ", "[3]]"):
                file.write(part)
                file.flush()
                time.sleep(0.05)

    # A daemon: where nobody reads, it waits for ever.
    threading.Thread(target=write, daemon=True).start()
    assert read_prompt_ids(path) == [[1, 2], [3]]


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[1,"])
def test_other_token_ids_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ids.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--prompt-ids {path} is not JSON"):
        read_prompt_ids(path)

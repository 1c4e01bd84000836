"""Files of conversations and of token ids, as `distca generate` reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[" * 100_000, ":1 is not JSON"),
        (b"{}", ":1 is not a list of messages"),
    ],
)
def test_other_conversations_are_refused(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--conversations {path}.*{line}"):
        read_conversations(path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"[1,"])
def test_other_token_ids_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ids.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--prompt-ids {path} is not JSON"):
        read_prompt_ids(path)

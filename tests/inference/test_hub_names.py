"""A model's name on the Hugging Face hub is held against the hub once, before its libraries try."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from distca.checkpoints.hub import check_path
from distca.commands.main import main


def answer(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[str]:
    """Lets the hub answer so; returns the names that it is asked for."""
    asked: list[str] = []

    def model_info(self: Any, name: str, timeout: float) -> None:
        assert timeout <= 10
        asked.append(name)
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return asked


def http_error(kind: type[HfHubHTTPError], text: str) -> HfHubHTTPError:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


MISSING = http_error(RepositoryNotFoundError, "401")
WRONG = [
    (MISSING, "no-such-owner/model is not a folder, and the Hugging Face hub has no model of this"),
    (
        OSError("no route"),
        r"hub's cache, and the hub cannot be reached \(no route\): give",
    ),
    (http_error(HfHubHTTPError, "503"), r"and the hub answers \(503\): give the folder of"),
]


@pytest.mark.parametrize(("error", "line"), WRONG)
def test_a_wrong_name_is_a_line_after_one_request(
    monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    asked = answer(monkeypatch, error)
    with pytest.raises(ValueError, match=line) as refused:
        check_path("no-such-owner/model")
    assert asked == ["no-such-owner/model"]
    assert len(str(refused.value).splitlines()) == 1


def test_folders_and_what_is_cached_ask_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = answer(monkeypatch, MISSING)
    check_path(str(tmp_path))
    with pytest.raises(ValueError, match="no such folder"):
        check_path(str(tmp_path / "missing"))
    found = SimpleNamespace(cached=str(tmp_path / "config.json"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: found.cached)
    check_path("owner/model")
    assert not asked
    found.cached = None
    monkeypatch.undo()
    asked = answer(monkeypatch, None)
    check_path("owner/model")
    assert asked == ["owner/model"]


@pytest.mark.parametrize(
    "command",
    [
        ["prefill"],
        ["prefill", "--model-impl", "transformers"],
        ["generate", "--prompt", "a"],
    ],
)
def test_commands_say_so_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, command: list[str]
) -> None:
    asked = answer(monkeypatch, MISSING)
    with pytest.raises(SystemExit) as ended:
        main([command[0], "no-such-owner/model", *command[1:]])
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert "the Hugging Face hub has no model of this name" in told[-1]
    assert len(asked) == 1

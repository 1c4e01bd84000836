"""The ends of ranks with wrong flags, which all find at about the same time."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from megatron_patches.loop import messages
from megatron_patches.loop.messages import FirstReads


def passed(filtered: logging.Filter, said: Sequence[str], level: int = logging.INFO) -> list[str]:
    """Returns the messages of one level that a filter passes."""
    records = [logging.LogRecord("it", level, "", 0, text, None, None) for text in said]
    return [each.getMessage() for each in records if filtered.filter(each)]


def test_an_index_that_is_read_again_says_nothing() -> None:
    """Its lines name no file, and those of two files may be equal."""
    one, two = (
        [f"Load the _IndexReader from {name}", "\tExtract the document indices", "> total: 33"]
        for name in ("a.idx", "b.idx")
    )
    filtered = FirstReads()
    assert passed(filtered, [*one, *two, *one, *two]) == [*one, *two]
    assert passed(filtered, ["it is broken"], logging.WARNING) == ["it is broken"]


def test_other_ranks_leave_the_first_the_time_to_tell(monkeypatch, caplog) -> None:
    """The launcher ends all when one has ended, also one that has told nothing yet."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    for rank in (1, 0):
        with pytest.raises(SystemExit) as end:
            messages.exit_with_message("wrong", rank)
        assert end.value.code == 2
        assert caplog.messages == ([] if rank else ["error: wrong"])
    assert slept
    assert slept[0] > 5

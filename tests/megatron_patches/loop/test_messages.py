"""The ends of ranks with wrong flags, which all find at about the same time."""

from __future__ import annotations

import pytest

from megatron_patches.loop import messages


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

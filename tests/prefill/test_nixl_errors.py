"""With a stand-in for NIXL: its errors become `NixlError`s, and what cannot be read is left out."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from distca.prefill.inbox import NixlLanding, RowForm
from distca.prefill.messages import InSlot, Rows, SlotFree, encode
from distca.prefill.nixl import NixlAgent, NixlError
from distca.schedule.serving.handoff.protocol import Transfer


class BackendError(Exception):
    """As NIXL's own errors: of no kind that Python has."""


class StandIn:
    """Stands for an agent of NIXL. The test says how its start and its writes end."""

    backends: tuple[str, ...] = ("UCX",)
    starts: Exception | None = None
    state: str | Exception = "PROC"

    def __init__(self, name: str, config: object) -> None:
        if self.starts is not None:
            raise self.starts

    def check_xfer_state(self, handle: object) -> str:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


class Write:
    released = False

    def release(self) -> None:
        self.released = True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """The class of agents that NIXL has for this test."""
    found = type("Agent", (StandIn,), {})
    parts: dict[str, Any] = {
        "nixl": {},
        "nixl._bindings": {"BackendError": BackendError},
        "nixl._api": {"nixl_agent": found, "nixl_agent_config": lambda **_: None},
    }
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            monkeypatch.setattr(sys.modules["nixl"], name.split(".")[1], module, raising=False)
    return found


def test_nixl_that_is_not_installed_is_an_error_of_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(NixlError, match="NIXL is not installed here"):
        NixlAgent()


@pytest.mark.parametrize("error", [BackendError("no device"), RuntimeError("no device")])
def test_an_agent_that_cannot_start_says_why(stand_in: type[StandIn], error: Exception) -> None:
    stand_in.starts = error
    with pytest.raises(NixlError, match="NIXL cannot start here: no device"):
        NixlAgent()
    stand_in.starts, stand_in.backends = None, ("POSIX",)
    with pytest.raises(NixlError, match="NIXL has no UCX here"):
        NixlAgent()


def test_a_write_has_ended_goes_on_or_fails(stand_in: type[StandIn]) -> None:
    agent, write = NixlAgent(), Write()
    assert not agent.is_written(write)
    for state in ("ERR", BackendError("the cable is cut")):
        stand_in.state = state
        with pytest.raises(NixlError, match="a write of NIXL fails"):
            agent.is_written(write)
    assert not write.released
    stand_in.state = "DONE"
    assert agent.is_written(write)
    assert write.released


def test_rows_that_a_slot_does_not_hold_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Two slots of two rows: keys and values of two heads of four numbers."""
    agent = mock.Mock(metadata=b"")
    agent.name = "agent"
    form = RowForm(range(2), 4, torch.float32)
    landing = NixlLanding(agent, {0: b""}, form, torch.device("cpu"), 4 * 2 * 2 * 4 * 4)
    assert (landing.message.slots, landing.message.slot_bytes) == (2, 2 * 2 * 2 * 4 * 4)

    def told(count: int, slot: int, heads: int = 2) -> tuple[str, bytes]:
        rows = Rows(Transfer(0), 0, 0, [(0, count)], 9, 0, heads)
        return "rank", encode(InSlot(rows, slot))

    agent.notified.return_value = [
        *(told(2, 0), told(1, 1), told(4, 1, heads=1)),
        *(
            told(3, 0),
            told(5, 0, heads=1),
            told(0, 0),
            told(1, 2),
            told(1, -1),
            told(1, 0, heads=3),
        ),
        ("rank", b"?"),
    ]
    found = list(landing.receive())
    assert [(each.rows.count, each.rows.heads) for each in found] == [(2, 2), (1, 2), (4, 1)]
    assert caplog.text.count("a message cannot be read: ") == 7
    # Its rank may write to a slot again once it is read, as long as there is the memory.
    found[1].done()
    agent.notify.assert_called_once_with("rank", encode(SlotFree(1)))
    landing.close()
    found[0].done()
    agent.notify.assert_called_once()

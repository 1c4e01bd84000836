"""What NIXL raises becomes a `NixlError`, with a stand-in for NIXL, so that rows can go by TCP."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from distca.prefill.nixl import NixlAgent, NixlError


class BackendError(Exception):
    """As NIXL's own errors: of no kind that Python has."""


class StandIn:
    """An agent of NIXL whose start and writes end as they are told."""

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

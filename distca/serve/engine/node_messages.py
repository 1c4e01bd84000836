"""Messages between the machines of a server, beside those of engine and workers."""

from __future__ import annotations

from typing import Literal

from distca.inference.messages import Message
from distca.serve.engine.messages import FromWorker


class Join(Message, frozen=True):
    """A machine is there.

    Attributes:
        node: its rank.
        facts: what must be alike on all machines, by name.
    """

    node: int
    facts: dict[str, str]


class NodeEnds(Message, frozen=True):
    """A machine leaves: why."""

    node: int
    message: str


class StoreCall(Message, frozen=True):
    """A call of the job's store, by which ranks find each other.

    Attributes:
        operation: what is done.
        keys: keys that are meant, mostly one.
        value: value that is written.
        expected: value that must be there before.
        amount: number that is added.
    """

    operation: Literal["set", "get", "add", "delete", "compare_set", "check", "count"]
    keys: list[str]
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0


FromNode = Join | NodeEnds | StoreCall
ToHead = FromWorker | FromNode


class StoreReply(Message, frozen=True):
    """What a call of the store found.

    Attributes:
        found: whether the keys are there.
        value: value of the key.
        number: sum, or number of keys.
    """

    found: bool = False
    value: bytes = b""
    number: int = 0


class Joined(Message, frozen=True):
    """All machines are there, and have the same flags: work begins."""


class AreYouThere(Message, frozen=True):
    """A message that needs no answer: it cannot be sent where nobody is connected."""


class HeadEnds(Message, frozen=True):
    """The server ends: why; None: it was asked to."""

    message: str | None


ToNode = Joined | AreYouThere | HeadEnds

"""The engine's side before it starts: it asks whether the prefill ranks would work for it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from distca.prefill.address import parts
from distca.prefill.messages import Check, Refusal, TransferName, Welcome, decoder, encode

_PROBE_SECONDS = 1.0
"""Seconds in which a machine accepts a connection."""


def ask_ranks(
    address: str, facts: Mapping[str, str], transfers: Sequence[TransferName], seconds: float
) -> str | None:
    """Asks prefill ranks whether they would work for an engine.

    It leaves nothing behind in this process, which may be forked later.

    Args:
        address: where they listen, `tcp://HOST:PORT`.
        facts: what is known by now of what both sides must agree on; see `distca.prefill.facts`.
        transfers: how rows may come.
        seconds: how long to wait for the answer of whoever listens there.

    Returns:
        Why they would not; None: they would, or nobody answers.
    """
    if not _listens(address):
        return None
    with zmq.Context() as context, context.socket(zmq.DEALER) as asked:
        asked.setsockopt(zmq.LINGER, 0)
        asked.connect(address)
        asked.send(encode(Check(dict(facts), tuple(transfers))))
        if not asked.poll(int(1000 * seconds)):
            return None
        try:
            answer = decoder(Welcome | Refusal).decode(asked.recv())
        except msgspec.MsgspecError as error:
            return f"their answer cannot be read: {error}"
    return answer.reason if isinstance(answer, Refusal) else None


def _listens(address: str) -> bool:
    """Whether anybody listens at an address."""
    try:
        socket.create_connection(parts(address), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True

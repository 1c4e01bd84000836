"""The engine's side of the store by which ranks on several machines find each other."""

from __future__ import annotations

from distca.serve.engine.node_messages import StoreCall, StoreReply


class KeptKeys:
    """Values by key, as workers write and read them. It knows no torch."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def answer(self, call: StoreCall) -> StoreReply:
        """Does what a call asks for."""
        values, key = self._values, call.keys[0] if call.keys else ""
        if call.operation == "check":
            return StoreReply(all(each in values for each in call.keys))
        if call.operation == "count":
            return StoreReply(number=len(values))
        if call.operation == "delete":
            return StoreReply(values.pop(key, None) is not None)
        if call.operation == "add":
            total = int(values.get(key, b"0")) + call.amount
            values[key] = str(total).encode()
            return StoreReply(True, number=total)
        there = values.get(key, b"")
        if call.operation == "set" or (call.operation == "compare_set" and there == call.expected):
            values[key] = call.value
        return StoreReply(key in values, values.get(key, call.expected))

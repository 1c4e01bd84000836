"""Programs of calls that go there and back at once."""

from __future__ import annotations

from collections.abc import Sequence

from distca.runtime import EventCursor, Exchange
from distca.schedule.program import LayerGroup, tick_program


def there_and_back(
    exchanges: Sequence[Exchange], layers: int = 1, at_home: bool = False
) -> EventCursor:
    """The forward pass of some layers, then their backward pass, of nano-batches."""
    groups = [LayerGroup(range(layers), recomputed=False)]
    forward = tick_program("forward", groups, len(exchanges), at_home)
    backward = tick_program("backward", groups, len(exchanges), at_home)
    return EventCursor(exchanges, forward + backward)

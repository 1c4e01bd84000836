"""Moving bytes between ranks; it knows nothing of attention."""

from distca.transport.ablation import Signal, SingleStream
from distca.transport.base import (
    DIRECTIONS,
    Channel,
    ChannelBytes,
    Direction,
    MessageSizes,
    Pending,
    Transport,
    TransportError,
)
from distca.transport.collective import CollectiveTransport, new_exchange_group

__all__ = [
    "DIRECTIONS",
    "Channel",
    "ChannelBytes",
    "CollectiveTransport",
    "Direction",
    "MessageSizes",
    "Pending",
    "Signal",
    "SingleStream",
    "Transport",
    "TransportError",
    "new_exchange_group",
]

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
from distca.transport.lost_ranks import LostRankError, naming_lost_ranks

__all__ = [
    "DIRECTIONS",
    "Channel",
    "ChannelBytes",
    "CollectiveTransport",
    "Direction",
    "LostRankError",
    "MessageSizes",
    "Pending",
    "Signal",
    "SingleStream",
    "Transport",
    "TransportError",
    "naming_lost_ranks",
    "new_exchange_group",
]

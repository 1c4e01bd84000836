"""Moving bytes between ranks; it knows nothing of attention."""

from distca.transport.ablation import Signal, SingleStream
from distca.transport.base import (
    WAYS,
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
    TransportError,
    Way,
)
from distca.transport.collective import CollectiveTransport, new_exchange_group

__all__ = [
    "WAYS",
    "Channel",
    "ChannelBytes",
    "CollectiveTransport",
    "MessageSizes",
    "Pending",
    "Signal",
    "SingleStream",
    "Transport",
    "TransportError",
    "Way",
    "new_exchange_group",
]

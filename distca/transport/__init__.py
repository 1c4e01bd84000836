"""Moving bytes between ranks; it knows nothing of attention."""

from distca.transport.ablation import Signal, SingleStream
from distca.transport.base import (
    WAYS,
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
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
    "Way",
    "new_exchange_group",
]

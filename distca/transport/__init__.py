"""Moving bytes between ranks; it knows nothing of attention."""

from distca.transport.ablation import Signal, SingleStream
from distca.transport.base import Pending, Transport
from distca.transport.collective import CollectiveTransport

__all__ = ["CollectiveTransport", "Pending", "Signal", "SingleStream", "Transport"]

"""Moving bytes between ranks; it knows nothing of attention."""

from distca.transport.base import Transport
from distca.transport.collective import CollectiveTransport

__all__ = ["CollectiveTransport", "Transport"]

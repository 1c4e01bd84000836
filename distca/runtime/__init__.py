"""Where transports and kernels meet: a plan is executed."""

from distca.runtime.buffers import Buffers
from distca.runtime.call import Call
from distca.runtime.core_attention import CoreAttention, ExchangeSlot, fill_slots
from distca.runtime.exchange import Exchange, KernelCall, build_exchange
from distca.runtime.prefetch import Prefetcher
from distca.runtime.trace import Trace, write_trace

__all__ = [
    "Buffers",
    "Call",
    "CoreAttention",
    "Exchange",
    "ExchangeSlot",
    "KernelCall",
    "Prefetcher",
    "Trace",
    "build_exchange",
    "fill_slots",
    "write_trace",
]

"""Where transports and kernels meet: a plan is executed."""

from distca.runtime.core_attention import CoreAttention
from distca.runtime.exchange import Exchange, KernelCall, build_exchange
from distca.runtime.prefetch import Prefetcher

__all__ = [
    "CoreAttention",
    "Exchange",
    "KernelCall",
    "Prefetcher",
    "build_exchange",
]

"""Execution of plans, where transports and kernels meet."""

from distca.runtime.attention_call import AttentionCall
from distca.runtime.attention_times import AttentionTimes, TimedKernel
from distca.runtime.buffers import Buffers
from distca.runtime.core_attention import CoreAttention
from distca.runtime.event_cursor import EventCursor
from distca.runtime.exchange import Exchange, KernelCall, build_exchange
from distca.runtime.latent_rows import SentLatents
from distca.runtime.prefetch import Prefetcher
from distca.runtime.trace import Trace

__all__ = [
    "AttentionCall",
    "AttentionTimes",
    "Buffers",
    "CoreAttention",
    "EventCursor",
    "Exchange",
    "KernelCall",
    "Prefetcher",
    "SentLatents",
    "TimedKernel",
    "Trace",
    "build_exchange",
]

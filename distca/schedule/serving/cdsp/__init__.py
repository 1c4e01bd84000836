"""Chunkwise dynamic sequence parallelism (Tetris): which ranks prefill which part of a prompt, who
decodes it, and how keys and values get from the ones to the other. Pure functions of values.
"""

from distca.schedule.serving.cdsp.chunks import Chunk, PrefillPlan, Search, plan_prefill
from distca.schedule.serving.cdsp.decode_ranks import DecodeRank, choose_decode_rank
from distca.schedule.serving.cdsp.latency import Coefficients, Prefill, PrefillModel, PrefillTimes
from distca.schedule.serving.cdsp.load import ImprovementRates, Load, least_by_rate
from distca.schedule.serving.cdsp.prefill_queue import PrefillQueue
from distca.schedule.serving.cdsp.published import TABLE_1, published_model
from distca.schedule.serving.cdsp.receiver import Receiver, receive
from distca.schedule.serving.cdsp.sender import Sender, send
from distca.schedule.serving.cdsp.strategies import LOAD_AWARE, PREFILL_STRATEGIES, Strategy

__all__ = [
    "LOAD_AWARE",
    "PREFILL_STRATEGIES",
    "TABLE_1",
    "Chunk",
    "Coefficients",
    "DecodeRank",
    "ImprovementRates",
    "Load",
    "Prefill",
    "PrefillModel",
    "PrefillPlan",
    "PrefillQueue",
    "PrefillTimes",
    "Receiver",
    "Search",
    "Sender",
    "Strategy",
    "choose_decode_rank",
    "least_by_rate",
    "plan_prefill",
    "published_model",
    "receive",
    "send",
]

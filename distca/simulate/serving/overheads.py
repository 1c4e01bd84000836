"""What an iteration of inference costs beside its work: launches, latencies, and the host's time.

Every term is charged for each event of its kind, whatever strategy the event is of. By default all
terms are zero and memory reaches its speed, so that iterations cost their work alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal


@dataclass(frozen=True)
class Overheads:
    """Seconds of events beside their work, and shares of the memory's speed. All are of one GPU.

    Attributes:
        iteration_seconds: seconds of an iteration in which the host schedules and plans, and no GPU
            computes.
        host_layer_seconds: seconds in which a host launches the kernels of a layer. Hosts launch
            ahead, so GPUs wait only where their layers take less, collectives not counted: those
            wait for the hosts of all their GPUs.
        layer_seconds: seconds between the kernels of a layer, in which the GPU has none.
        collective_seconds: seconds of a collective of tensor parallelism, or of an all-gather,
            beside its bytes and the latency of the link.
        hop_seconds: seconds that a collective takes longer for each doubling of its nodes.
        step_seconds: seconds of each step of attention whose rows come from other ranks, such as
            those of a ring, beside its kernels. Nothing hides them.
        exchange_seconds: seconds from the start of an exchange until its rows are there, beside
            their bytes and the latency of the link. Kernels hide them.
        weight_efficiency: share of the memory's speed at which products of few rows read weights.
        cache_efficiency: share of the memory's speed at which attention of few queries reads keys
            and values.

    Raises:
        ValueError: a value is out of range.
    """

    iteration_seconds: float = 0.0
    host_layer_seconds: float = 0.0
    layer_seconds: float = 0.0
    collective_seconds: float = 0.0
    hop_seconds: float = 0.0
    step_seconds: float = 0.0
    exchange_seconds: float = 0.0
    weight_efficiency: float = 1.0
    cache_efficiency: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, share = getattr(self, field.name), field.name.endswith("_efficiency")
            if share and not 0 < value <= 1:
                raise ValueError(f"{field.name} is {value}: give a share above 0, at most 1")
            if not share and not 0 <= value < math.inf:
                raise ValueError(f"{field.name} is {value}: give seconds, 0 or more")

    def of_collective(self, nodes: int) -> float:
        """Returns the seconds of a collective over that many nodes, beside bytes and latency."""
        return self.collective_seconds + self.hop_seconds * math.ceil(math.log2(nodes))


NO_OVERHEADS = Overheads()
# GPU terms are fitted to published times of three systems, and judged on numbers that the fit did
# not see (benchmarks/results/serving/published.md). Host terms are CPU times of our engine on an
# AMD EPYC (benchmarks/serving/decode_step.py, two layers, 4,000 cached tokens): 1.2 ms to schedule
# and plan a step of one sequence on 4 ranks, 1.7 ms of 64; 0.65 ms to launch a layer's attention on
# 4 ranks, beside which the other kernels of a prefill's layer take 17 launches of about 10 us.
PREFILL_OVERHEADS = Overheads(
    iteration_seconds=1.5e-3,
    host_layer_seconds=8e-4,
    collective_seconds=7e-4,
    hop_seconds=1.7e-5,
    step_seconds=7e-4,
    weight_efficiency=0.79,
)
"""Overheads of iterations with chunks of prompts, whose kernels are launched one by one."""
DECODE_OVERHEADS = Overheads(
    iteration_seconds=1.5e-3,
    collective_seconds=3e-5,
    hop_seconds=1.7e-5,
    exchange_seconds=3e-5,
    weight_efficiency=0.79,
)
"""Overheads of decode steps on ranks that have all keys, which CUDA graphs launch."""
SHARED_DECODE_OVERHEADS = replace(DECODE_OVERHEADS, host_layer_seconds=6.5e-4)
"""Overheads of decode steps on ranks that share keys: attention is launched between the graphs."""
EAGER_DECODE_OVERHEADS = replace(
    DECODE_OVERHEADS, host_layer_seconds=PREFILL_OVERHEADS.host_layer_seconds
)
"""Overheads of decode steps without CUDA graphs: hosts launch whole layers, as in a prefill. No
published time is of such steps, so that collectives take here what they take in graphs."""

Graphs = Literal["engine", "whole"]
"""Who captures CUDA graphs of decode steps: our engine, as far as it can, or, as published systems
do, an engine that captures whole steps on any ranks."""

Captured = Literal["steps", "layers", "nothing"]
"""What a CUDA graph holds: a whole decode step, the layers between calls of attention, nothing."""

MOST_GRAPH_ROWS = 256
"""Most rows of a rank for which our engine captures graphs."""


def captured_by_engine(ranks: int, tensor_parallel: int, rows: int) -> Captured:
    """Returns what our engine captures of a decode step, as `distca.inference.cuda_graphs` does.

    Args:
        ranks: ranks that share the keys.
        tensor_parallel: GPUs that share a layer. Their collectives are in no graph.
        rows: tokens of the rank with most.
    """
    if tensor_parallel > 1 or rows > MOST_GRAPH_ROWS:
        return "nothing"
    return "steps" if ranks == 1 else "layers"


def decode_overheads(captured: Captured) -> Overheads:
    """Returns what decode steps cost beside their work, by what is captured."""
    return {
        "steps": DECODE_OVERHEADS,
        "layers": SHARED_DECODE_OVERHEADS,
        "nothing": EAGER_DECODE_OVERHEADS,
    }[captured]

"""A small model on clusters without overheads, and its global batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.cost.model_sizes import ModelSize
from distca.plan.span import Int64s
from distca.schedule import ExecutionOptions, Pass, PlannedGlobalBatch, ScheduleConfig
from distca.simulate import (
    CLUSTERS,
    Cluster,
    ModelCosts,
    plan_global_batch,
)
from support.batches import long_tailed_lengths

MODEL = ModelSize(4, 512, 8, 2, 64, 1024, 1000)
IDEAL = replace(
    CLUSTERS["dgx-h200"],
    name="without overheads",
    node_gb_per_s=1e12,
    network_gb_per_s=1e12,
    copy_gb_per_s=1e12,
    node_latency=0.0,
    network_latency=0.0,
    launch_seconds=0.0,
)
"""Compute takes time there, and nothing else does."""
PACKED = ExecutionOptions("packed", ping_pong=False)
DIRECTIONS: tuple[Pass, ...] = ("forward", "backward")


def costs_on(cluster: Cluster, **changes: int) -> ModelCosts:
    return ModelCosts(replace(MODEL, **changes), cluster)


def planned(
    windows: list[list[int]], stages: int, ranks: int, options: ExecutionOptions
) -> PlannedGlobalBatch:
    config = ScheduleConfig(shape=costs_on(IDEAL).shape)
    return plan_global_batch([np.array(w) for w in windows], stages, ranks, config, options)


def attention_seconds(costs: ModelCosts, length: int) -> float:
    lengths = np.array([length])
    pairs = lengths * (lengths + 1) // 2
    return float(costs.cluster.attention_cost(costs.shape).seconds(lengths, lengths, pairs)[0])


def passes(costs: ModelCosts, length: int, layers: int, head: bool) -> tuple[float, float]:
    """Seconds of a forward and a backward pass over one document on one rank."""
    attention = attention_seconds(costs, length)
    found = []
    for direction, factor in ((0, 1.0), (1, costs.cluster.backward_over_forward)):
        linear = costs.pre_seconds()[direction] + costs.post_seconds()[direction]
        seconds = layers * (length * linear + factor * attention)
        found.append(seconds + head * length * costs.head_seconds()[direction])
    return found[0], found[1]


def mixed_batch(windows: int, tokens: int) -> list[Int64s]:
    return [long_tailed_lengths(seed, tokens, tokens // 40, tokens) for seed in range(windows)]

"""The figures that follow from the steps that `throughput.py` measured."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.training.pipelines import add_replayed
from benchmarks.training.setting import PLAIN, SHORT, Setting, pairs_of_ranks
from benchmarks.training.step import Ranks
from distca.cost.model_sizes import ModelSize
from distca.plan import BLOCK, Mask
from distca.plan.plan import max_over_mean
from distca.plan.span import Int64s


def summarize(
    setting: Setting, mix: str, ranks: Ranks, model: ModelSize, mask: Mask
) -> dict[str, Any]:
    """Summarizes one mix: medians, ratios and the ideal.

    Args:
        setting: sizes and ways of the measurement.
        mix: name of the mix of documents.
        ranks: steps of all processes.
        model: sizes of the trained model.
        mask: tokens that a query sees.
    """
    median = {
        name: [statistics.median(step.seconds for step in row) for row in rows]
        for name, rows in ranks[0].items()
    }
    pairs = pairs_of_ranks(setting, mix, mask)
    flops = model.training_flops(setting.batches * setting.tokens, int(pairs.sum()))
    ways: dict[str, dict[str, Any]] = {}
    for name in setting.ways():
        seconds = sum(median[name])
        own = [rank[name] for rank in ranks]
        ways[name] = {
            "tokens_per_second": setting.batches * setting.tokens / seconds,
            "ratio": sum(median[PLAIN]) / seconds,
            "cpu_seconds_of_ranks": [
                statistics.mean(step.cpu_seconds for row in rows for step in row) for rows in own
            ],
            "seconds": seconds,
            "mfu": None
            if setting.peak_tflops is None
            else flops / (seconds * setting.processes * setting.peak_tflops * 1e12),
            "bytes_sent_of_ranks": [
                sum(sum(row[0].bytes_sent.values()) for row in rows) for rows in own
            ],
            "peak_bytes": max(step.peak_bytes for rows in own for row in rows for step in row),
        }
        if name == PLAIN:
            # Ranks wait for each other at the end of a step.
            ways[name]["pairs_max_over_mean"] = busiest_over_mean(pairs.sum(axis=1))
        else:
            ways[name] |= _of_servers(own, seconds)
    if setting.stages == 1:
        ideal = _ideal_seconds(setting, pairs.sum(axis=1), mask, median[PLAIN], median[SHORT])
        for way in ways.values():
            way["ideal_ratio"] = sum(median[PLAIN]) / ideal
    elif ranks[0][PLAIN][0][0].passes:
        add_replayed(setting, pairs, ranks[:: setting.tensor_parallel], ways)
    return {
        "max_over_mean_pairs": [
            max_over_mean(loads) for loads in pairs.reshape(-1, pairs.shape[-1])
        ],
        "model_flops": flops,
        "seconds": median,
        "ways": ways,
    }


def _of_servers(own: list[Any], seconds: float) -> dict[str, Any]:
    """Figures of `--distca` alone: balance between servers, and exposed time of exchanges.

    Args:
        own: steps of each rank, by batch and round.
        seconds: total time of the way's steps.
    """
    # [batches][ticks, ranks]: all ranks wait for each other in a tick.
    batches = range(len(own[0]))
    pairs = [np.array([rows[batch][0].pairs for rows in own]).T for batch in batches]
    kernels = [
        np.array(
            [np.median([step.kernel_seconds for step in rows[batch]], axis=0) for rows in own]
        ).T
        for batch in batches
    ]
    exposed = [
        sum(statistics.median(step.exposed_seconds for step in row) for row in rows) for rows in own
    ]
    return {
        "pairs_max_over_mean": busiest_over_mean(np.concatenate(pairs)),
        "kernels_max_over_mean": busiest_over_mean(np.concatenate(kernels)),
        "kernel_seconds_of_ranks": np.concatenate(kernels).sum(axis=0).tolist(),
        "exposed_share": statistics.mean(exposed) / seconds,
    }


def busiest_over_mean(loads: Any) -> float:
    """Ratio of the busiest ranks' loads to the mean: 1 where loads are even, or all zero.

    Args:
        loads: loads of ranks between two points at which they wait for each other,
            `[points, ranks]`.
    """
    mean = float(loads.mean(axis=1).sum())
    return float(loads.max(axis=1).sum()) / mean if mean else 1.0


def _ideal_seconds(
    setting: Setting, pairs: Int64s, mask: Mask, plain: list[float], short: list[float]
) -> float:
    """Seconds of all batches if their pairs, `[batches, ranks]`, were perfectly shared out."""
    rest = statistics.median(short)
    short_pairs = setting.micro_batches * setting.seq_length // BLOCK
    short_pairs *= mask.pairs(0, BLOCK, 0, BLOCK)
    total = 0.0
    for seconds, loads in zip(plain, pairs, strict=True):
        per_pair = max(seconds - rest, 0.0) / max(loads.max() - short_pairs, 1)
        total += seconds - per_pair * (loads.max() - loads.mean())
    return float(total)

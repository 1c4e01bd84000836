"""Smaller micro-batches that share documents (`--distca-chain`): time and memory of a pipeline."""

from __future__ import annotations

from typing import Any

from benchmarks.cluster.report import Options, Report, table
from benchmarks.cluster.sweep import Runner, Unit, mean
from distca.simulate import Candidate

MICRO_BATCHES, CHAINS = 16, (1, 2, 4)
STAGES = (1, 2, 4, 8)


def chains(runner: Runner, options: Options) -> Report:
    """Divides the 16 micro-batches of a pipeline into more, which share documents."""
    keys = [(name, pp, chain) for name in options.documents for pp in STAGES for chain in CHAINS]
    units = {
        (documents, pp, chain): Unit(
            options.case("llama-8b", documents, 128, MICRO_BATCHES, 64),
            Candidate("tiles", 8, pp, 8 // pp, 1, MICRO_BATCHES * chain, chain=chain),
        )
        for documents, pp, chain in keys
    }
    results = runner.over_batches(units, options.batches, "chains")
    rows: list[dict[str, Any]] = []
    whole = 0.0
    for (documents, pp, chain), mine in results.items():
        seconds = mean(mine, "seconds")
        whole = seconds if chain == 1 else whole
        rows.append(
            {
                "documents": documents,
                "stages": pp,
                "micro-batches": MICRO_BATCHES * chain,
                "chain": chain,
                "seconds": seconds,
                "times as fast": whole / seconds,
                "memory, GB": max(each["memory_gb"] for each in mine),
                "exposed": mean(mine, "exposed"),
            }
        )
    text = [
        "Llama 8B, 16 sequences of 128K tokens on 64 GPUs, TP 8, scheduler tiles: a micro-batch "
        "is a sequence on all data-parallel ranks, or a part of one.",
        "",
        *table(rows),
    ]
    return Report("Micro-batches smaller than a document", rows, text, None)

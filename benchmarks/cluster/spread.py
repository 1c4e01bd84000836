"""A table's jobs on other documents, each system in the configuration that the table found.

    python benchmarks/cluster/paper.py table3_batches --published DIR --papers-documents ...

The search takes most of a table's time. Here no configuration is searched: those of the stored
`table3.csv` or `table4.csv` run. On other documents other configurations may be faster.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cluster.report import Options, Report, table
from benchmarks.cluster.sweep import Case, Runner, Unit
from benchmarks.cluster.tables import (
    AS_THE_PAPER,
    PUBLISHED,
    STORED,
)
from distca.simulate import Candidate

AGAIN = ", MLPs again"
PAIRS = {
    "tiles over WLB-LLM": ("tiles", "wlb-llm"),
    "greedy over WLB-LLM, as the paper ran both": tuple(
        f"{system}{AGAIN}" for system in reversed(AS_THE_PAPER)
    ),
}
"""Systems that are compared, with the names of their columns in the table."""
_SIZES = re.compile(
    r"TP(?P<tensor>\d+) PP(?P<stages>\d+) DP(?P<data>\d+)"
    r"(?: CP(?P<context>\d+)(?: \((?P<all_to_all>\d+) by a2a\))?)?"
    r", (?P<micro_batches>\d+) micro-batch\(es\)(?: in pools of (?P<pool_size>\d+))?"
    r"(?:, (?P<max_in_flight>\d+) in flight)?(?:, tolerance (?P<tolerance>[\d.]+))?"
    r"(?P<latents>, no latents)?(?:, in chains of (?P<chain>\d+))?(?P<kept>, inputs kept)?"
    r"(?P<whole>, no ping-pong)?(?:, heads shared by (?P<head_parallel>\d+))?"
    r"(?:, planned for 1/(?P<network_divisor>\d+) of the network's speed)?"
)


def parse(system: str, text: str) -> Candidate | None:
    """Reads a configuration as `str` writes it; None if the system has none, or one with a bound of
    buffers, which is written in whole megabytes.

    Args:
        system: one of `distca.simulate.SYSTEMS`.
        text: cell of a stored table.
    """
    found = _SIZES.fullmatch(text)
    if found is None:
        return None
    named = {name: value for name, value in found.groupdict().items() if value is not None}
    flags = {name: named.pop(name, None) is not None for name in ("latents", "kept", "whole")}
    tolerance = named.pop("tolerance", None)
    return Candidate(
        system=system,
        context=int(named.pop("context", 1)),
        tolerance=None if tolerance is None else float(tolerance),
        may_send_latents=not flags["latents"],
        keeps_inputs=flags["kept"],
        ping_pong=not flags["whole"],
        **{name: int(value) for name, value in named.items()},
    )


def units_of(row: dict[str, str], options: Options) -> Iterator[tuple[str, Unit]]:
    """What runs of a job: the systems of `PAIRS` in their stored configurations."""
    sizes = row["longest"].removesuffix("K"), row["batch"], row["GPUs"]
    case: Case = options.case(row["model"], row["documents"], *map(int, sizes))
    for name in dict.fromkeys(name for pair in PAIRS.values() for name in pair):
        candidate = parse(name.removesuffix(AGAIN), row[f"{name} configuration"])
        again = name.endswith(AGAIN)
        if candidate is not None:
            case = replace(case, recompute="mlp" if again else "none")
            yield name, Unit(case, candidate, seed=0)


def over_batches(name: str, runner: Runner, options: Options) -> Report:
    """Runs the stored configurations of a table in several batches.

    Args:
        name: table3 or table4.
        runner: runner of the simulations.
        options: flags of the command.
    """
    with (STORED / f"{name}.csv").open(newline="") as file:
        stored = [
            row
            for row in csv.DictReader(file)
            if row["model"] in options.models and row["documents"] in options.documents
        ]
    units = {
        (number, name): unit
        for number, row in enumerate(stored)
        for name, unit in units_of(row, options)
    }
    results = runner.over_batches(units, options.batches, f"{name}_batches")
    rows: list[dict[str, Any]] = []
    for number, job in enumerate(stored):
        row: dict[str, Any] = {
            name: job[name] for name in ("model", "documents", "longest", "batch", "GPUs")
        }
        for title, (ours, theirs) in PAIRS.items():
            one, other = (results.get((number, name), []) for name in (ours, theirs))
            gains = _gains(one, other) if one and other else []
            row[title] = float(np.mean(gains)) if gains else float("nan")
            row[f"{title}: least"] = min(gains, default=float("nan"))
            row[f"{title}: most"] = max(gains, default=float("nan"))
            row[f"{title}: batches"] = len(gains)
        rows.append(row)
    text = [
        f"{len(rows)} jobs, {options.counted}: means and ranges of the ratio of tokens a second. "
        f"Configurations are those of [{name}]({name}.md), not searched anew: in these batches a "
        "system may have a faster one, above all WLB-LLM, whose bins follow the documents. A batch "
        "in which one of both is out of memory does not count, nor a job whose stored "
        "configuration is out of memory or is no longer there.",
        "",
        *table(_summary(name, rows)),
        "",
        *table(rows),
    ]
    title = f"{name.replace('table', 'Table ')} in several batches"
    return Report(title, rows, text, None)


def _gains(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[float]:
    """Ratios of speed in the batches in which both fit."""
    return [
        their["seconds"] / our["seconds"]
        for our, their in zip(ours, theirs, strict=True)
        if our["fits"] and their["fits"]
    ]


def _summary(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ranges of the jobs' means, how far batches are apart, and the paper's ranges."""
    lines = []
    for model, documents in dict.fromkeys((row["model"], row["documents"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["documents"]) == (model, documents)]
        line: dict[str, Any] = {"model": model, "documents": documents}
        for title in PAIRS:
            known = [row for row in mine if row[f"{title}: batches"]]
            means = [row[title] for row in known]
            spread = [row[f"{title}: most"] - row[f"{title}: least"] for row in known]
            line[title] = f"{min(means):.2f} to {max(means):.2f}" if means else "-"
            line[f"{title}: batches apart, mean and most"] = (
                f"{np.mean(spread):.3f}, {max(spread):.3f}" if means else "-"
            )
        published = PUBLISHED.get((name, documents))
        line["paper"] = published or PUBLISHED[name, model, documents]  # type: ignore[index]
        lines.append(line)
    return lines

"""`distca plan --compare`: the plans of all schedulers, in one table."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from distca.commands import html_page, planned_heads
from distca.commands.plan_page import comparison_of
from distca.cost.model_sizes import ModelSize
from distca.plan import Plan, place_in_turn, validate_plan
from distca.plan.span import Int64s
from distca.progress import progress
from distca.schedule import COMPARED, ScheduleConfig, describe, make_scheduler

PLAIN = "plain"
"""Row of plain data parallelism in the comparison."""
_COLUMNS = (
    ("max/mean", "load_max_over_mean", 1.0, 3),
    ("GB", "bytes_total", 1e9, 3),
    ("GB sent", "bytes_max_sent", 1e9, 3),
    ("GB recv", "bytes_max_received", 1e9, 3),
    ("link ms", "link_seconds_max", 1e-3, 2),
    ("tasks", "tasks", 1, 0),
    ("calls", "kernel_calls", 1, 0),
    ("tokens", "tokens_max_over_mean", 1.0, 3),
    ("plan ms", "plan_seconds", 1e-3, 1),
)


def timed_plan(
    args: argparse.Namespace,
    name: str,
    model: ModelSize,
    config: ScheduleConfig,
    lengths: Int64s,
    capacities: Int64s,
) -> tuple[Plan, dict[str, float]]:
    """Makes a valid plan; returns it with the seconds of planning and of building an exchange."""
    from distca.runtime.exchange import build_exchange

    scheduler = make_scheduler(name, config)
    # As in training, the plan of layers that see most chooses the placement.
    mask = model.masks.masks[0]
    start = time.perf_counter()
    if args.placement == "free":
        plan = scheduler.plan(lengths, capacities, mask)
    else:
        plan = scheduler.schedule(lengths, place_in_turn(lengths, capacities), mask)
    planned = time.perf_counter()
    busiest = int(np.bincount(plan.tasks.server, minlength=len(capacities)).argmax())
    build_exchange(plan, busiest)
    seconds = {
        "plan_seconds": planned - start,
        "exchange_seconds": time.perf_counter() - planned,
    }
    validate_plan(plan)
    return plan, seconds


def compare(
    args: argparse.Namespace,
    command: str,
    model: ModelSize,
    config: ScheduleConfig,
    lengths: Int64s,
    capacities: Int64s,
) -> None:
    """Prints a row for plain data parallelism and for each scheduler, with the reason where it
    makes no plan."""
    rows: dict[str, dict[str, Any]] = {}
    placed = place_in_turn(lengths, capacities)
    # Plain data parallelism cuts documents where a rank's tokens end.
    documents = {PLAIN: placed.end - placed.start}
    names = (PLAIN, *COMPARED)
    # Some schedulers take many times as long as others, so nobody knows what the rest takes.
    with (
        _telling_the_best(rows, len(names)),
        progress("distca plan", "schedulers", len(names), estimates=False) as shown,
    ):
        for name in names:
            # The first plan of hybrid-cp imports megatron-core, which takes seconds.
            shown.describe(name)
            try:
                scheduler = "packed" if name == PLAIN else name
                planned = documents.get(name, lengths)
                plan, seconds = timed_plan(args, scheduler, model, config, planned, capacities)
                rows[name] = {**asdict(describe(plan, config)), **seconds}
            except (ValueError, ImportError) as error:
                rows[name] = {"error": str(error)}
            shown.update()
    if args.html is not None:
        page = comparison_of(command, lengths, rows, _COLUMNS)
        html_page.write_page(args.html, page)
    if args.json:
        _write(json.dumps(rows, indent=1))
        return
    _write(f"{'scheduler':16}" + "".join(f"{title:>10}" for title, *_ in _COLUMNS))
    for name, row in rows.items():
        if "error" in row:
            _write(f"{name:16}{row['error']}")
            continue
        cells = (f"{row[key] / unit:>10,.{digits}f}" for _, key, unit, digits in _COLUMNS)
        _write(f"{name:16}" + "".join(cells))
    _write("(sent, recv: of the busiest rank; one layer, forward; tokens: most of a rank / mean;")
    _write(f"{PLAIN}: plain data parallelism, which cuts documents where a rank's tokens end)")
    if len(model.masks.masks) > 1:
        _write(f"All rows are of {planned_heads.layers_of(model.masks.masks[0], model)}.")


@contextlib.contextmanager
def _telling_the_best(rows: Mapping[str, Mapping[str, Any]], count: int) -> Iterator[None]:
    """Says which plan was the best balanced one so far if a signal ends the block.

    Args:
        rows: figures of each scheduler that has run.
        count: number of all schedulers.
    """
    try:
        yield
    except KeyboardInterrupt:
        able = {name: row for name, row in rows.items() if "error" not in row}
        said = "no plan was made yet"
        if able:
            best = min(able, key=lambda name: able[name]["load_max_over_mean"])
            said = (
                f"best balanced up to then: {best}, load max/mean "
                f"{able[best]['load_max_over_mean']:.3f}, of {len(rows)} of {count} schedulers"
            )
        sys.stderr.write(f"distca plan: {said}\n")
        raise


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")

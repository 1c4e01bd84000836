"""Figures of serving in the index of benchmarks, against the pages that have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import span
from distca.commands.serving_report import PUBLISHED_PREFILLS
from distca.simulate.serving import (
    DECODE_OVERHEADS,
    PREFILL_OVERHEADS,
    SHARED_DECODE_OVERHEADS,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "serving"
DOCS = ROOT / "docs"
INDEX = (ROOT / "benchmarks" / "README.md").read_text()


def rows_of(page: str, first: str) -> list[list[str]]:
    """The cells of the table of a page that begins so."""
    _, _, text = (RESULTS / page).read_text().partition(f"\n| {first}")
    lines = text.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_host_cost_of_decode_steps() -> None:
    rows = rows_of("decode_step.md", "cached tokens")
    engine, rank = ([float(row[n].split()[0]) for row in rows] for n in (2, 3))
    (steps,) = re.findall(r"CPU time of (\d+) steps", (RESULTS / "decode_step.md").read_text())
    assert (
        f"minimum of {steps} steps: {min(engine):.2f} to {max(engine):.2f} ms for the engine, "
        f"{min(rank):.2f} to {max(rank):.2f} ms for each rank: [decode_step.md]"
    ) in INDEX


def test_cpu_time_of_short_prompts() -> None:
    each = {row[0]: row[2] for row in rows_of("short_prompts.md", "engine")}
    parts = {row[0]: row[2] for row in rows_of("short_prompts.md", "part")}
    assert f"CPU ms per request: DistCA {each['DistCA']}, vLLM {each['vLLM']}. All parts" in INDEX
    model = ("attention", "the model's layers")
    others = sum(float(share.rstrip("%")) for part, share in parts.items() if part not in model)
    (said,) = re.findall(r"except attention and the model's layers: ([\d.]+)%: \[short", INDEX)
    assert abs(float(said) - others) < 0.2  # shares are rounded


def test_cpu_time_of_vllm_with_prefill_ranks() -> None:
    """Times of machines with other work are not comparable, so the index has no ratio of them."""
    loads = json.loads((RESULTS / "vllm_prefill.json").read_text())["loads"]
    ratios = {
        load: (ours["cpu"] + ours["cpu_ranks"]) / alone["cpu"]
        for load, (alone, ours) in ((name, [*of.values()]) for name, of in loads.items())
    }
    assert (
        f"CPU seconds relative to vLLM alone: {ratios['Long prompts']:.2f} with long prompts, "
        f"{ratios['Mixed']:.2f} with a mix. All answers are equal: [vllm_prefill.md]"
    ) in INDEX
    assert (RESULTS / "vllm_prefill.md").read_text().count("| 40 of 40 |") == 6


def test_moves_of_cached_keys_lengthen_a_prefill() -> None:
    rows = rows_of("cache_balancing.md", "tokens of the chunks")
    exposed = sorted((float(row[4].rstrip("%")), row[4]) for row in rows)
    speeds = sorted({float(row[1]) for row in rows})
    assert (
        f"{exposed[0][1]} to {exposed[-1][1]} of the prefill, on links of {speeds[-1]:g} to "
        f"{speeds[0]:g} GB/s: [cache_balancing.md]"
    ) in INDEX


def test_cpu_seconds_of_prefill_ranks() -> None:
    over = {row[1]: float(row[3]) for row in rows_of("prefill_ranks.md", "ranks")[1:]}
    names = {"pass-kv": "pass-KV", "runahead": "the chain", "sp-ntp": "SP-NTP", "pass-q": "pass-Q"}
    each = ", ".join(f"{name} {over[strategy]:.2f}" for strategy, name in names.items())
    said = f"CPU seconds of the busiest rank, relative to one rank's: {each}, tiles"
    assert f"{said} {over['tiles']:.2f} (a prompt's layers stay on one rank): [pre" in INDEX
    assert max(over[strategy] for strategy in names) <= 0.55


def test_errors_of_published_times_and_the_defaults_that_come_of_them() -> None:
    page = (RESULTS / "published.md").read_text()
    held_out = {row[0]: row for row in rows_of("published.md", "fit") if row[1] == "held out"}
    with_overheads, without = held_out["with overheads"], held_out["without"]
    tetris, meta, decoded = (row[3] for row in rows_of("published.md", "paper | runs"))
    right, of = re.findall(r"(\d+) of (\d+) are right in the fits", page)[0]
    assert (
        f"The median error is {with_overheads[2]}, and {without[2]} without overheads. "
        f"{with_overheads[-1]} of the pairs of configurations that differ by more than 5% are in "
        f"the published order, and {right} of {of} comparisons have the right sign. By the "
        "commands' defaults, which have no rates of each system, the median error is "
        f"{tetris} for Tetris's prefills, {meta} for Meta's, and {decoded} for its decoded "
        "tokens: [published.md]"
    ) in INDEX
    # The commands charge what was fitted to all numbers, since held-out errors are smaller so.
    assert float(with_overheads[2].rstrip("%")) < float(without[2].rstrip("%"))
    rows = rows_of("published.md", "parameter")
    call, decode_call, hop, weights = (float(row[-1]) for row in rows if row[0].startswith("all:"))
    for overheads, each in ((PREFILL_OVERHEADS, call), (SHARED_DECODE_OVERHEADS, decode_call)):
        assert overheads.collective_seconds == pytest.approx(each, rel=0.04)
        assert overheads.hop_seconds == pytest.approx(hop, rel=0.04)
        assert overheads.weight_efficiency == pytest.approx(weights, rel=0.04)
    assert PREFILL_OVERHEADS.step_seconds == PREFILL_OVERHEADS.collective_seconds
    assert DECODE_OVERHEADS.exchange_seconds == DECODE_OVERHEADS.collective_seconds


def test_speeds_of_prefills_that_drop_far_keys() -> None:
    rows = json.loads((RESULTS / "csps_clusters.json").read_text())
    dense, ring, contiguous = (
        span(row[one] / row[other] for row in rows)
        for one, other in (
            ("dense", "dropped"),
            ("ring", "dropped"),
            ("ring", "contiguous_dropped"),
        )
    )
    assert (
        f"`--sparsity 0.2`: {dense} times as fast as with all keys, and {ring} times as fast as a "
        "dense ring: [csps_clusters.md]"
    ) in INDEX
    assert (
        f"`--sparsity 0.2` is {ring} times as fast as a dense ring, or {contiguous} times if each "
        "rank, not only each node, holds a contiguous part"
    ) in " ".join((DOCS / "inference_strategies.md").read_text().split())


def test_when_evening_out_the_cache_pays() -> None:
    rows = rows_of("runahead.md", "GPUs | tokens | sequences")
    paid = [row for row in rows if row[-1] != "never"]
    assert [(row[1], row[2]) for row in paid] == [("128k", "16")] * len(paid)
    (after,) = {row[-1] for row in paid}
    assert (
        f"pays off after {after} decoded tokens in {len(paid)} of {len(rows)} cases, those of 16 "
        "sequences of 128K tokens. In the others hosts limit decoding, and it never does: [runahead"
    ) in INDEX
    assert len({row[4] for row in rows if row[-1] == "never"}) == 1


def least(rows: list[dict[str, Any]], name: str, at: int) -> float:
    return float(min(row[name][at] for row in rows))


def of_vllm(load: str, part: str, charged: str = "charged") -> dict[str, list[dict[str, Any]]]:
    """Systems of a load by their kinds; with prefill ranks those that have as many as vLLM."""
    stored = json.loads((RESULTS / "vllm_gpus.json").read_text())[charged]
    (rows,) = (r for t, r in stored.items() if t.startswith(load) and t.endswith(f"({part})"))
    kinds = {kind: [r for r in rows if r["kind"] == kind] for kind in ("alone", "ranks")}
    kinds["servers"] = [row for row in rows if row["kind"].startswith("servers")]
    kinds["four"] = [row for row in kinds["ranks"] if ", 4 prefill ranks" in row["system"]]
    assert all(kinds.values())
    return kinds


def test_when_prefill_ranks_help_vllm() -> None:
    mixed = of_vllm("Mixed", "0.60")
    text = " ".join((DOCS / "vllm.md").read_text().split())
    page = (RESULTS / "vllm_gpus.md").read_text()
    sample = re.findall(r"## Mixed, [\d.]+ a second \(0.60\)\n\n(\d+) requests, (\d+) of", page)
    ((requests, long),) = sample
    assert f"{requests} requests, {long} of them long" in text
    kinds = [mixed[kind] for kind in ("four", "servers", "alone")]
    for title, name, ats, form, unit in (
        ("short prompts, p99 TTFT", "short", (1,), ",.0f", "ms"),
        ("p99 time per output token", "ms", (1,), ".1f", "ms"),
        ("long prompts, median and p99 TTFT", "long", (0, 1), ".1f", "s"),
    ):
        cells = (" and ".join(format(least(of, name, at), form) for at in ats) for of in kinds)
        row = " | ".join([title, *(f"{cell} {unit}" for cell in cells)])
        assert f"| {row} |" in text
    # Servers that get all prompts delay short ones.
    of_all = [row for row in mixed["servers"] if row["kind"] == "servers"]
    assert least(of_all, "short", 1) > 100 * least(mixed["servers"], "short", 1)
    charged, free = (
        least(each["four"], "long", 0) / least(each["servers"], "long", 0)
        for each in (mixed, of_vllm("Mixed", "0.60", "free"))
    )
    assert (
        f"Ranks' median TTFT is {charged:.2f} times theirs, or {free:.2f} times if launches and "
        "collectives cost nothing."
    ) in text


def test_vllm_with_prefill_ranks_in_the_index() -> None:
    def over(rows: dict[str, list[dict[str, Any]]], name: str, at: int, other: str) -> float:
        ours = rows["ranks" if other == "alone" else "four"]
        return least(ours, name, at) / least(rows[other], name, at)

    mixed, light, heavy = (
        of_vllm(*each) for each in (("Mixed", "0.60"), ("Long", "0.20"), ("Long", "0.60"))
    )
    said = [
        f"{over(mixed, 'short', 1, other):.3f} for short prompts at p99; for long ones "
        f"{over(mixed, 'long', 0, other):.2f} in the median and "
        f"{over(mixed, 'long', 1, other):.2f} at p99. Only long prompts, median: "
        f"{over(light, 'long', 0, other):.2f} at load 0.20, "
        f"{over(heavy, 'long', 0, other):.2f} at 0.60"
        for other in ("alone", "servers")
    ]
    assert (
        f"Mixed prompts at load 0.60: {said[0]}. On 4 GPUs, relative to vLLM's own servers that "
        f"only prefill, in the same order: {said[1]}: [vllm_gpus.md]"
    ) in INDEX


def test_the_errors_that_simulations_print_are_the_page_s() -> None:
    rows = rows_of("published.md", "paper | runs")
    prefills = {row[0]: (int(row[2]), row[3]) for row in rows if row[1] == "prefill"}
    assert prefills == PUBLISHED_PREFILLS

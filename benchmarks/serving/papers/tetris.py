"""Claims of Tetris: Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from benchmarks.claims import Claim, number, span, stored_page, stored_table
from benchmarks.serving.papers.published_figures import PUBLISHED, RIGHT, stored_comparisons
from benchmarks.serving.papers.tetris_load import (
    ABLATIONS,
    CAPACITY,
    MODELS,
    TRACES,
    ablated,
    evaluation,
)
from benchmarks.serving.papers.verdicts import (
    EXACTLY,
    REPRODUCED,
    differs,
    holds,
    judged,
    made_by,
    missing,
    not_possible,
    page,
    tests,
)
from distca.schedule.serving.cdsp import TABLE_1, published_model

ENGINE = made_by("rank_groups")
BALANCING = made_by("cache_balancing", "--busy 0.3 0.6 --output DIR")
TRACE = made_by("prefill_trace")


def claims() -> list[Claim]:
    """All rows, in the order of the paper."""
    return [*motivation(), *engine(), *scheduling(), *evaluation(), *overheads(), *beyond()]


def seconds(degree: int, tokens: int) -> float:
    """A cell of Table 1."""
    (cell,) = (row.seconds for row in TABLE_1 if (row.degree, row.tokens) == (degree, tokens))
    return cell


def best_degrees(of: Any) -> list[int]:
    """The fastest degree of each length of Table 1."""
    lengths = sorted({row.tokens for row in TABLE_1})
    return [
        min((each for each in of if tokens in of[each]), key=lambda each: of[each][tokens])
        for tokens in lengths
    ]


def signs(comparisons: list[dict[str, str]]) -> str:
    """Says how many orders are right."""
    right = sum(each["sign"] == RIGHT for each in comparisons)
    return f"the order is right in {right} of {len(comparisons)} rows"


def motivation() -> list[Claim]:
    """Sections 1 to 3."""
    model = published_model()
    degrees = {row.degree for row in TABLE_1}
    measured = {s: {r.tokens: r.seconds for r in TABLE_1 if r.degree == s} for s in degrees}
    fitted = {s: {tokens: model.seconds(s, 0, tokens) for tokens in measured[s]} for s in degrees}
    same = sum(a == b for a, b in zip(best_degrees(measured), best_degrees(fitted), strict=True))
    fits = stored_table("serving/cdsp_capacity", "SP", "1")
    relative, plain = (
        max(number(cell) for title, cell in row.items() if title != "SP") for row in fits
    )
    k = 1024
    greedy = 1 + seconds(16, 32 * k), 1 + seconds(16, 32 * k) + seconds(8, 16 * k)
    careful = 1 + seconds(8, 32 * k), 1 + seconds(8, 16 * k)
    better = np.mean(greedy) - np.mean(careful), max(greedy) - max(careful)
    idle = seconds(8, 16 * k), seconds(8, 128 * k) - seconds(16, 128 * k) - seconds(8, 16 * k)
    by_tensor, by_sequence = (stored_comparisons(f"Tetris, Figure 2{part}") for part in ("a", "b"))
    # From TP 8 on: each comparison is with the size before.
    tensor, sequence = (
        np.cumprod([number(each["ours"]) for each in of]).tolist()
        for of in (by_tensor, by_sequence)
    )
    fastest = [
        each for each in stored_comparisons("Tetris, Table 1") if "fastest" in each["comparison"]
    ]
    wrong = [each["comparison"].split()[0] for each in fastest if each["sign"] != RIGHT]
    slow = stored_comparisons("Tetris, Section 2.4")
    slower_here = [number(each["ours"]) for each in slow]
    slower_there = [seconds(16, tokens) / seconds(4, tokens) for tokens in (4 * k, 8 * k)]
    gains = [each["capacities"]["cdsp"] / each["load"] for m in MODELS for each in ablated(m)]
    of_best = [each["over_cdsp"][each["best"]][1] for m in MODELS for each in ablated(m)]
    return [
        Claim(
            "Abstract: TTFT, median TBT and load, against the best systems",
            "up to 4.35 times lower, up to 40.1% lower, up to 45% more",
            f"at the best baseline's load that baseline's first tokens are {span(of_best)} times "
            f"as late at P99 as CDSP's, and CDSP sustains {span(gains)} times that load, "
            "simulated. Other baselines are overloaded at that load, so that their ratios "
            "(below) say nothing of a gain",
            judged([max(gains), max(of_best)], [1.45, 4.35], TRACES),
            ABLATIONS,
        ),
        Claim(
            "Figure 1: ring attention, striped and zigzag parts",
            "zigzag gives each rank the same work",
            "zigzag; all ranks have the same work in each step but the first",
            REPRODUCED,
            tests("schedule/test_serving_steps", "simulate/test_near_to_far"),
        ),
        Claim(
            "Table 1: fastest degree of SP by length, Llama 8B",
            "4, 4, 8, 16, 16, 16, 16 for 4K to 256K tokens",
            f"Eq. 1, fitted to the table, has the same fastest degree in {same} of "
            f"{len(best_degrees(measured))} lengths, and is {relative:.1%} off at most; plain "
            f"least squares {plain:.1%}. Simulated prefills have it in "
            f"{len(fastest) - len(wrong)} of {len(fastest)} (not with {', '.join(wrong)} tokens)",
            holds(
                same == len(best_degrees(measured)) and relative < 0.1,
                f"{len(best_degrees(measured)) - same} of {len(best_degrees(measured))} lengths",
                "neighbouring degrees are within the fit's error of each other there",
            ),
            f"{CAPACITY}; {PUBLISHED}; {tests('schedule/test_cdsp_latency')}",
        ),
        Claim(
            "Section 2.4: 4K and 8K tokens take longer with SP 16 than with SP 4",
            f"{slower_there[0]:.3f} and {slower_there[1]:.3f} times, by Table 1",
            f"{slower_here[0]:.3f} and {slower_here[1]:.3f} times",
            judged(slower_here, slower_there, "the order is the same; a step takes less here"),
            PUBLISHED,
        ),
        Claim(
            "Figure 2(a): decoding with TP 1, 2 and 4 over TP 8",
            "up to 5.73, 3.87 and 1.93 times as long",
            f"{', '.join(f'{each:.3f}' for each in reversed(tensor))} times, for 8 sequences of "
            "32,000 tokens",
            judged(
                [*reversed(tensor)],
                [5.73, 3.87, 1.93],
                "largest values of a figure, whose batches and lengths the paper does not give; "
                f"{signs(by_tensor)}",
            ),
            PUBLISHED,
        ),
        Claim(
            "Figure 2(b): decoding with SP 8, SP 4 and TP 2, SP 2 and TP 4 over TP 8",
            "up to 1.83, 1.41 and 1.15 times as long",
            f"{', '.join(f'{each:.3f}' for each in reversed(sequence))} times, likewise",
            judged(
                [*reversed(sequence)],
                [1.83, 1.41, 1.15],
                f"as for Figure 2(a); {signs(by_sequence)}",
            ),
            PUBLISHED,
        ),
        Claim(
            "Section 2.4: prompts of 32K and 16K on 16 ranks that are taken for a second",
            "greedily 1.53 and 1.84 s, with 8 ranks each 1.58 and 1.31 s; 0.24 s better on "
            "average, 0.26 s at most",
            f"{greedy[0]:.2f} and {greedy[1]:.2f} s, {careful[0]:.2f} and {careful[1]:.2f} s; "
            f"{better[0]:.2f} s, {better[1]:.2f} s",
            judged(
                [*greedy, *careful, *better],
                [1.53, 1.84, 1.58, 1.31, 0.24, 0.26],
                "a cell of Table 1 differs",
                EXACTLY,
            ),
            tests("schedule/test_cdsp_chunks"),
        ),
        Claim(
            "Section 2.4: 128K tokens beside 16K on 8 of 16 ranks",
            "8 ranks idle for 0.31 s, or 1.34 s longer on 8",
            f"{idle[0]:.2f} s, {idle[1]:.2f} s; CDSP's first token is no later than either",
            judged(idle, [0.31, 1.34], "a cell of Table 1 differs", EXACTLY),
            tests("schedule/test_cdsp_chunks"),
        ),
        Claim(
            "Figure 3: chunks on groups that grow",
            "early chunks run on ranks that are free",
            "`--rank-groups cdsp`; answers are exact while groups grow",
            REPRODUCED,
            tests("schedule/test_cdsp_blocks", "commands/test_rank_groups"),
        ),
        Claim(
            "Figure 4: prefill ranks of small TP, decoding of large TP, in one cluster",
            "prefill TP 1, decode TP 4 or 8",
            "`distca prefill` for vLLM with another tensor-parallel size; ranks of several "
            "processes (`--tensor-parallel-size`) and on several machines (torchrun)",
            REPRODUCED,
            f"{tests('prefill/test_tensor_parallel_ranks', 'with_vllm/test_vllm_slurm')}",
        ),
    ]


def engine() -> list[Claim]:
    """Section 4: prefills on growing groups, and their hand-off."""
    rows = stored_table("serving/cache_balancing", "tokens of the chunks", "link, GB/s")
    fast = [number(row["exposed"]) for row in rows if row["link, GB/s"] == "25"]
    measured = [
        number(row["exposed, behind compute"])
        for row in stored_table("serving/cache_balancing", "link load", "Mbit/s")
    ]
    limited = stored_table("serving/prefill_trace", "MB/s of each rank's link")[1:]
    hidden, full = (
        [
            number(row["exposed"])
            for row in limited
            if (number(row["busy part of it"]) < 1) is with_room
        ]
        for with_room in (True, False)
    )
    return [
        Claim(
            "Figure 5: before a chunk, keys and values move to the group's new ranks",
            "evenly; groups are nested",
            "the same, in blocks; from 4 to 8 ranks half of the rows move",
            REPRODUCED,
            tests("schedule/test_cdsp_blocks", "runtime/serving/test_kv_moves"),
        ),
        Claim(
            "Figure 6: moves overlap with the layers before, Figure 14(a) to (d): what they add",
            "up to 1.8%",
            f"simulated at 25 GB/s (200 Gbit/s) {span(fast, '.1%')}, measured on processes "
            f"{span(measured, '.1%')}",
            holds(
                max(fast + measured) <= 0.018,
                f"up to {max(fast) - 0.018:+.1%} of the prefill",
                "each rank is on a node of its own here, and attention's exchanges use the same "
                "links",
            ),
            BALANCING,
        ),
        Claim(
            "Figure 7: hand-off with handshake and few backends",
            "grants by first handshake, no starvation",
            "the same protocol; no order of messages, drawn or exhaustive, breaks a rule",
            REPRODUCED,
            tests("schedule/test_handoff"),
        ),
        Claim(
            "Figure 14(e) and (f): transfer overhead",
            "0.6% to 11.8%, 2.1% on average",
            f"{span(hidden, '.2%')} on processes whose links are busy for less than the prefill",
            differs(
                "a lower range",
                "CPU prefills take long beside their transfers; on links that are too slow "
                f"{span(full, '.0%')} are exposed",
            ),
            TRACE,
        ),
        Claim(
            "Section 4.2: rows go into the engine's memory",
            "NCCL with dedicated buffers",
            "by TCP, or by NIXL into slots of the engine, from where vLLM's own operator copies "
            "them to its blocks",
            missing("writes straight into vLLM's blocks: one copy on the engine's GPU remains"),
            tests("prefill/test_transfers", "with_vllm/test_connector"),
        ),
    ]


def scheduling() -> list[Claim]:
    """Section 5 and Table 2."""
    rows = stored_table("serving/cdsp_capacity", "ranks", "mean ms")
    ours = [number(row["mean ms"]) for row in rows]
    theirs = [number(row["paper's mean, us"]) / 1000 for row in rows]
    times = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    text = stored_page("serving/cdsp_capacity")
    ((average, most),) = re.findall(r"prompt are ([\d.]+%) faster on average, and ([\d.]+%)", text)
    return [
        Claim(
            "Eq. 1: seconds of a prefill, fitted by least squares",
            "a + b L + c C L + d L²",
            "the same form, fitted by relative errors; see Table 1",
            REPRODUCED,
            tests("schedule/test_cdsp_latency"),
        ),
        Claim(
            "Eq. 2, Algorithms 1 to 3: search for chunks and groups",
            "a recursion over pairs of sizes",
            "the same; plans are the best of the algorithms' own space. All nested groups and "
            f"chunks in 32nds of the prompt are {average} faster on average, {most} at most",
            REPRODUCED,
            f"{tests('schedule/test_cdsp_chunks')}; {CAPACITY}",
        ),
        Claim(
            "Table 2: time of a search for 8 to 128 ranks",
            "23 to 31 us on average",
            f"{span([1000 * each for each in ours], '.0f')} us",
            differs(
                f"{span(times, '.0f')} times", "Python here, C++ there; a prefill takes longer"
            ),
            CAPACITY,
        ),
        Claim(
            "Section 5.1: improvement rates by load, from a simulator, over the last 30 seconds",
            "rates are profiled offline, and looked up online",
            "the same; the most ranks of a group may be profiled, too",
            REPRODUCED,
            tests("schedule/test_cdsp_latency", "simulate/test_requests"),
        ),
        Claim(
            "Section 5.1: rates that are learned from what is served",
            "not in the paper: profiled again when the lengths change",
            "`--improvement-rates FILE` is read once",
            missing("rates that a running server adapts"),
            tests("commands/test_rank_groups"),
        ),
        Claim(
            "Section 5.2: virtual usage of a decode rank",
            "requests under way count as used slots",
            "the same in simulations; with vLLM its own scheduler decides",
            REPRODUCED,
            tests("schedule/test_cdsp_latency"),
        ),
        Claim(
            "Section 6: C++ scheduler, Flash Decoding, NVSHMEM rings, CUDA graphs",
            "run on A100s",
            "NCCL and NVSHMEM transports and CUDA graphs of decode steps exist; no GPU has run "
            "them",
            not_possible("no GPU was at hand"),
            "[hardware](../../../docs/hardware.md)",
        ),
    ]


def overheads() -> list[Claim]:
    """What our engine makes of CDSP."""
    ratios = [
        float(row["cdsp"].split()[0]) / float(row["fixed-8"].split()[0])
        for row in stored_table("serving/rank_groups", "trace", "fixed-8")
    ]
    return [
        Claim(
            "Section 6: an engine that runs groups independently",
            "groups that share no ranks don't wait for each other",
            f"in our engine all ranks share iterations: CDSP sustains {span(ratios)} times the "
            "load of fixed groups of 8",
            differs("common iterations", "one schedule for all ranks prevents deadlocks"),
            ENGINE,
        ),
    ]


def beyond() -> list[Claim]:
    """What the paper's clusters have."""
    return [
        Claim(
            "Section 7.1: Llama 70B, prefill TP 4",
            "64 A100s",
            "prefill ranks of several processes on CPUs, with small models",
            not_possible("no GPU was at hand"),
            f"{tests('prefill/test_tensor_parallel_ranks')}; {page('cdsp_ablations')}",
        ),
    ]

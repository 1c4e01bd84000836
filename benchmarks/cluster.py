"""The paper's experiments on simulated DGX H200 clusters, each beside what the paper published.

    python benchmarks/cluster.py table3 --output results/cluster
    python benchmarks/cluster.py all --batches 10 --output results/cluster

* **table3**, **fig9**: 3D parallelism (no pipeline); **table4**, **fig10**: 4D. For each row of
  the paper's Tables 3 and 4 and both length distributions: WLB-LLM in its ideal form, swept over
  DP, CP, micro-batches (and PP in 4D), against the paper's greedy scheduler and against tiles,
  swept over the same without CP. Plain Megatron and per-document CP stand beside them.
* **fig3**: per-document CP: share of the all-gather, and of gathered keys in memory.
* **fig4**: variable-length packing: memory it needs, and idle time that is left.
* **fig6**: DP against CP for WLB-LLM, 64 GPUs, 512K.
* **fig11**: signal and single-stream. **fig12**: the tolerance.
* **appendix**: the bound of Appendix A.

Every experiment writes `NAME.csv`, `NAME.md` and (but for the appendix) `NAME.png`. All iterations
that were simulated are kept in `runs.jsonl`: a run that was interrupted goes on where it stopped.
What differs from the paper: see `distca/simulate` for what is modelled, and `cluster_sweep.py` for
the documents. With `--published DIR` the lengths are published ones (see `plans.py`), and the
attention kernel's rate is that of `DIR/attention_forward_h100.csv`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cluster_sweep import Best, Case, Runner, Unit, best_of

from distca.cost.models import MODELS
from distca.simulate import CLUSTERS, WAYS, Candidate, ModelCosts

K = 1024
MODEL_NAMES, DOCUMENTS = ["llama-8b", "llama-34b"], ["pretrain", "prolong"]
TABLE_3 = {
    ("llama-8b", 128): [(8, 64), (16, 128), (32, 256)],
    ("llama-8b", 256): [(4, 64), (8, 128), (16, 256)],
    ("llama-8b", 512): [(2, 64), (4, 128), (8, 256)],
    ("llama-34b", 128): [(4, 64), (8, 128), (16, 256)],
    ("llama-34b", 256): [(2, 64), (4, 128), (8, 256)],
    ("llama-34b", 512): [(2, 64), (4, 128), (8, 256)],
}
"""(model, longest document in K): [(batch size, GPUs)]."""
TABLE_4 = {
    ("llama-8b", 128): [(32, 64), (64, 128), (128, 256)],
    ("llama-8b", 256): [(16, 64), (32, 128), (32, 256)],
    ("llama-8b", 512): [(8, 64), (8, 128), (16, 256)],
    ("llama-34b", 128): [(32, 128), (64, 256), (128, 512)],
    ("llama-34b", 256): [(16, 128), (32, 256), (32, 512)],
    ("llama-34b", 384): [(8, 128), (8, 256), (16, 512)],
}
PUBLISHED = {
    ("table3", "pretrain"): "1.07 to 1.20",
    ("table3", "prolong"): "1.05 to 1.12",
    ("table4", "llama-8b", "pretrain"): "1.15 to 1.30",
    ("table4", "llama-8b", "prolong"): "1.10 to 1.35",
    ("table4", "llama-34b", "pretrain"): "up to 1.15",
    ("table4", "llama-34b", "prolong"): "up to 1.25",
}
REFERENCE = "wlb-llm"
TUNED_TOLERANCES = (0.02, 0.1)
"""The better is taken for each case, as a user would: it is the paper's only hyper-parameter."""


@dataclass(frozen=True)
class Report:
    """What an experiment found.

    Attributes:
        title: a line.
        rows: of the CSV file.
        text: Markdown below the title.
        draw: draws the picture on a figure; None: there is none.
    """

    title: str
    rows: list[dict[str, Any]]
    text: list[str]
    draw: Callable[[Any], None] | None


@dataclass(frozen=True)
class Options:
    """The command's flags."""

    batches: int
    sweep_batches: int
    finalists: int
    published: str
    models: tuple[str, ...]
    documents: tuple[str, ...]

    def case(self, model: str, documents: str, context: int, sequences: int, gpus: int) -> Case:
        return Case(model, documents, context * K, sequences, gpus, published=self.published)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown lines."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names)]
    lines += [[_cell(row[name]) for name in names] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if np.isnan(value) else f"{value:.3f}"
    return str(value)


def end_to_end(name: str, runner: Runner, options: Options) -> Report:
    """Tables 3 and 4, Figures 9 and 10."""
    three = name in ("table3", "fig9")
    which = "table3" if three else "table4"
    # Without a pipeline, 4D would be 3D in more micro-batches.
    stages = (1,) if three else (2, 4, 8)
    cases = [
        options.case(model, documents, context, sequences, gpus)
        for documents in options.documents
        for (model, context), sizes in (TABLE_3 if three else TABLE_4).items()
        if model in options.models
        for sequences, gpus in sizes
    ]
    found: dict[str, dict[Case, Best]] = {}
    for system in ("packed", "per-document-cp", REFERENCE):
        # These take no plans, so that more batches can be compared on.
        found[system], _ = best_of(runner, cases, system, stages, options.batches, 3)
    few = (options.batches, options.sweep_batches, options.finalists, TUNED_TOLERANCES)
    found["tiles"], finalists = best_of(runner, cases, "tiles", stages, *few)
    found["greedy"], _ = best_of(runner, cases, "greedy", stages, *few, finalists)
    rows = [_end_to_end_row(case, found) for case in cases]
    text = _against_published(which, rows)
    text += ["", *table([_readable(row) for row in rows])]
    title = "3D parallelism (Table 3, Figure 9)" if three else "4D parallelism (Table 4, Figure 10)"
    return Report(title, rows, text, partial(_draw_end_to_end, rows))


SYSTEMS = ("packed", "per-document-cp", REFERENCE, "greedy", "tiles")


def _end_to_end_row(case: Case, found: dict[str, dict[Case, Best]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": case.model,
        "documents": case.documents,
        "longest": f"{case.context // K}K",
        "batch": case.sequences,
        "GPUs": case.gpus,
    }
    reference = found[REFERENCE][case].tokens_per_second
    for system in SYSTEMS:
        best = found[system][case]
        row[f"{system} tokens/s"] = best.tokens_per_second
        row[f"{system} speed-up"] = best.tokens_per_second / reference
        row[f"{system} GB"] = best.memory_gb
        row[f"{system} idle"] = best.idle
        row[f"{system} exposed"] = best.exposed
        row[f"{system} configuration"] = str(best.candidate or "out of memory")
        row[f"{system} tried"] = best.tried
        row[f"{system} out of memory"] = best.out_of_memory
    return row


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    short = {name: row[name] for name in ("model", "documents", "longest", "batch", "GPUs")}
    for system in SYSTEMS:
        if system == REFERENCE:
            continue
        value = row[f"{system} speed-up"]
        oom = row[f"{system} configuration"] == "out of memory"
        short[system] = "OOM" if oom else float(value)
    for system in (REFERENCE, "tiles"):
        tried, failed = row[f"{system} tried"], row[f"{system} out of memory"]
        short[f"{system}: best"] = row[f"{system} configuration"]
        short[f"{system}: GB"] = f"{row[f'{system} GB']:.0f}"
        short[f"{system}: OOM of tried"] = f"{failed} of {tried}"
    return short


def _against_published(which: str, rows: list[dict[str, Any]]) -> list[str]:
    """Ranges of speed-ups over ideal WLB-LLM."""
    lines = []
    groups = list(dict.fromkeys((row["model"], row["documents"]) for row in rows))
    for model, documents in groups:
        mine = [r for r in rows if (r["model"], r["documents"]) == (model, documents)]
        paper = PUBLISHED.get((which, documents)) or PUBLISHED[which, model, documents]  # type: ignore[index]
        line: dict[str, Any] = {"model": model, "documents": documents, "paper": paper}
        for system in ("greedy", "tiles"):
            ups = [r[f"{system} speed-up"] for r in mine if not np.isnan(r[f"{system} speed-up"])]
            line[system] = f"{min(ups):.2f} to {max(ups):.2f}" if ups else "-"
        for system in (REFERENCE, "greedy", "tiles"):
            line[f"{system}: idle"] = float(np.nanmean([r[f"{system} idle"] for r in mine]))
        for system in (REFERENCE, "greedy", "tiles"):
            line[f"{system}: exposed"] = float(np.nanmean([r[f"{system} exposed"] for r in mine]))
        most = [1 / (1 - r[f"{REFERENCE} idle"]) for r in mine]
        line["perfect balance"] = f"{np.nanmin(most):.2f} to {np.nanmax(most):.2f}"
        lines.append(line)
    return [
        "Speed-up over WLB-LLM in its ideal form, each at its best configuration:",
        "",
        *table(lines),
        "",
        *EXPLANATION,
    ]


EXPLANATION = [
    "*Idle* is the part of the time in which compute is not busy, *exposed* what of it ranks wait "
    "for exchanges, and for each other in them. *Perfect balance* is what a system would gain over "
    "WLB-LLM that is never idle and does the same work: no simulated gain can be much above it, "
    "and where the paper's is, its WLB-LLM was idle for longer than this one.",
    "",
    "What may make the difference: this WLB-LLM packs with exactly the times that it is then "
    "judged by, its collectives reach the links' full speed, no allocator and no kernel launch "
    "delays it, and its best configuration is known for every case; the paper's is a "
    "reimplementation, measured. The other way round, what the paper says slows DistCA at 34B in "
    "4D (memory fragments, late launches) is not simulated. Documents are drawn anew, not the "
    "paper's. A dash: WLB-LLM runs out of memory in every configuration.",
]


def _draw_end_to_end(rows: list[dict[str, Any]], figure: Any) -> None:
    groups = list(dict.fromkeys((row["model"], row["documents"]) for row in rows))
    figure.set_size_inches(6 * len(groups) if len(groups) < 3 else 12, 4 * -(-len(groups) // 2))
    axes = figure.subplots(-(-len(groups) // 2), min(len(groups), 2), squeeze=False).ravel()
    for at, (model, documents) in zip(axes, groups, strict=False):
        mine = [r for r in rows if (r["model"], r["documents"]) == (model, documents)]
        places = np.arange(len(mine))
        for number, system in enumerate((REFERENCE, "greedy", "tiles")):
            values = [r[f"{system} speed-up"] for r in mine]
            at.bar(places + 0.27 * (number - 1), values, width=0.27, label=system)
        at.set_xticks(places, [f"{r['longest']}\n{r['GPUs']}" for r in mine], fontsize=8)
        at.set(
            title=f"{model}, {documents}", ylabel="tokens/s over ideal WLB-LLM", ylim=(0.8, None)
        )
        at.axhline(1.0, color="black", linewidth=0.6)
    axes[0].legend()


def figure_3(runner: Runner, options: Options) -> Report:
    """Per-document CP over all nodes: what the all-gather costs, in time and memory."""
    nodes = [2, 4, 8, 16, 32]
    units, bases = [], []
    for count in nodes:
        case = options.case("llama-8b", "pretrain", 128, count, 8 * count)
        units += [
            Unit(case, Candidate("per-document-cp", 8, 1, 1, count, 1), seed)
            for seed in range(options.batches)
        ]
        costs = ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"], 8)
        gathered = (count - 1) * 128 * K * 32 * costs.shape.kv_row_bytes
        bases.append(gathered)
    results = runner.run(units, "fig3")
    rows = []
    for number, count in enumerate(nodes):
        mine = results[number * options.batches : (number + 1) * options.batches]
        memory = float(np.mean([r["memory_gb"] for r in mine]))
        rows.append(
            {
                "nodes": count,
                "all-gather share": float(np.mean([r["exposed"] for r in mine])),
                "gathered keys share of memory": bases[number] / 1e9 / memory,
                "GB": memory,
                "fits": all(r["fits"] for r in mine),
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(7, 4)
        at = figure.subplots()
        at.plot(nodes, [r["all-gather share"] for r in rows], "o-", label="all-gather, of time")
        at.plot(
            nodes,
            [r["gathered keys share of memory"] for r in rows],
            "s-",
            label="gathered keys, of memory",
        )
        at.plot([2, 32], [0.03, 0.40], "x", label="paper: all-gather")
        at.plot([2, 16], [0.03, 0.30], "+", label="paper: gathered keys")
        at.set(xlabel="nodes (CP)", ylabel="share", xscale="log", ylim=(0, None))
        at.set_xticks(nodes, [str(n) for n in nodes])
        at.legend()

    text = [
        "Llama-8B, TP 8, 128K tokens a node, CP over all nodes, Pretrain. Paper: the all-gather's "
        "share rises from 3% on 2 nodes to nearly 40% on 32; the keys' share of memory from 3% on "
        "2 to almost 30% on 16.",
        "",
        *table(rows),
    ]
    return Report("Per-document context parallelism (Figure 3)", rows, text, draw)


def figure_4(runner: Runner, options: Options) -> Report:
    """Variable-length packing: how uneven memory becomes, and the idle time that is left."""
    rows = []
    units, keys = [], []
    for context in (128, 256, 512):
        for data in (2, 4, 8, 16):
            if 128 * data < context:
                continue
            case = options.case("llama-8b", "pretrain", context, 128 * data // context, 8 * data)
            keys.append((context, data))
            units += [
                Unit(case, Candidate("wlb-llm", 8, 1, data, 1, 1), seed)
                for seed in range(options.batches)
            ]
    results = runner.run(units, "fig4")
    for number, (context, data) in enumerate(keys):
        mine = results[number * options.batches : (number + 1) * options.batches]
        rows.append(
            {
                "longest": f"{context}K",
                "DP": data,
                "memory, busiest over least": float(
                    np.mean([r["memory_gb"] / r["least_memory_gb"] for r in mine])
                ),
                "idle": float(np.mean([r["idle"] for r in mine])),
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 4)
        for at, name in zip(
            figure.subplots(1, 2), ("memory, busiest over least", "idle"), strict=True
        ):
            for context in ("128K", "256K", "512K"):
                of_one = [r for r in rows if r["longest"] == context]
                at.plot([r["DP"] for r in of_one], [r[name] for r in of_one], "o-", label=context)
            at.set(xlabel="DP", ylabel=name)
            at.legend()

    text = [
        "Llama-8B, TP 8, no context parallelism; 128K tokens a node, the batch grows with DP. "
        "Paper: at 512K balance needs 1.08 to 1.17 times the memory on some ranks; idle time at "
        "512K is 19% at DP 4 and 55% at DP 8.",
        "",
        *table(rows),
        "",
        "A document that is longer than 1.17 times a rank's share lies on one rank all the same, "
        "for want of a better place, and that rank's memory is what it is.",
    ]
    return Report("Variable-length packing (Figure 4)", rows, text, draw)


def figure_6(runner: Runner, options: Options) -> Report:
    """WLB-LLM on 64 GPUs and 512K: DP against CP."""
    rows = []
    case = options.case("llama-8b", "pretrain", 512, 2, 64)
    layouts = [(data, 8 // data, number) for data in (1, 2, 4, 8) for number in (1, 2, 4)]
    units = [
        Unit(case, Candidate("wlb-llm", 8, 1, data, context, number), seed)
        for data, context, number in layouts
        for seed in range(options.batches)
    ]
    results = runner.run(units, "fig6")
    for number, (data, context, micro_batches) in enumerate(layouts):
        mine = results[number * options.batches : (number + 1) * options.batches]
        fits = all(r["fits"] for r in mine)
        rows.append(
            {
                "DP": data,
                "CP": context,
                "micro-batches": micro_batches,
                "tokens/s": sum(r["tokens"] for r in mine) / sum(r["seconds"] for r in mine),
                "idle": float(np.mean([r["idle"] for r in mine])),
                "GB": max(r["memory_gb"] for r in mine),
                "memory": "fits" if fits else "OOM",
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(8, 4)
        at = figure.subplots()
        colours = ["tab:blue" if r["memory"] == "fits" else "tab:red" for r in rows]
        at.bar(range(len(rows)), [r["tokens/s"] for r in rows], color=colours)
        names = [f"DP{r['DP']}\nCP{r['CP']}\nM{r['micro-batches']}" for r in rows]
        at.set_xticks(range(len(rows)), names, fontsize=8)
        at.set(ylabel="tokens/s", title="red: out of memory")

    text = [
        "Llama-8B, 2 sequences of 512K, Pretrain. Paper: more CP reduces imbalance, costs "
        "throughput and risks running out of memory; more DP brings severe imbalance.",
        "",
        *table(rows),
    ]
    return Report("WLB-LLM: DP against CP on 64 GPUs (Figure 6)", rows, text, draw)


ABLATED = [("llama-8b", 8, 8), ("llama-8b", 8, 16), ("llama-34b", 4, 8), ("llama-34b", 4, 16)]
"""Model, sequences of 128K (1M and 512K tokens), nodes: Figures 11 and 12."""


def figure_11(runner: Runner, options: Options) -> Report:
    """Signal and single-stream."""
    ways = ("none", "signal", "single-stream")
    keys = [(*setting, system) for setting in ABLATED for system in WAYS]
    units = []
    for model, sequences, nodes, system in keys:
        case = options.case(model, "pretrain", 128, sequences, 8 * nodes)
        for way in ways:
            candidate = Candidate(system, 8, 1, nodes, 1, 1)
            units += [Unit(case, candidate, seed, way) for seed in range(options.batches)]  # type: ignore[arg-type]
    results = iter(runner.run(units, "fig11"))
    rows = []
    for model, sequences, nodes, system in keys:
        seconds = {
            way: float(np.mean([next(results)["seconds"] for _ in range(options.batches)]))
            for way in ways
        }
        rows.append(
            {
                "model": model,
                "nodes": nodes,
                "tokens": f"{sequences * 128}K",
                "scheduler": system,
                "DistCA, s": seconds["none"],
                "signal, s": seconds["signal"],
                "single-stream, s": seconds["single-stream"],
                "DistCA / signal": seconds["none"] / seconds["signal"],
                "single-stream / DistCA": seconds["single-stream"] / seconds["none"],
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(9, 4)
        at = figure.subplots()
        places = np.arange(len(rows))
        for number, name in enumerate(("signal, s", "DistCA, s", "single-stream, s")):
            values = [r[name] / r["signal, s"] for r in rows]
            at.bar(places + 0.27 * (number - 1), values, width=0.27, label=name[:-3])
        names = [f"{r['model']}\n{r['nodes']} nodes\n{r['scheduler']}" for r in rows]
        at.set_xticks(places, names, fontsize=8)
        at.set(ylabel="time over signal", ylim=(0.9, None))
        at.legend()

    text = [
        "Pretrain up to 128K. Paper: DistCA takes nearly as long as signal, but for 8B on 8 nodes; "
        "single-stream takes 10 to 17% longer.",
        "",
        *table(rows),
    ]
    return Report("Communication hidden (Figure 11)", rows, text, draw)


TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def figure_12(runner: Runner, options: Options) -> Report:
    """The tolerance: time against bytes."""
    keys = [(*s, system, t) for s in ABLATED for system in WAYS for t in TOLERANCES]
    units = []
    for model, sequences, nodes, system, tolerance in keys:
        case = options.case(model, "pretrain", 128, sequences, 8 * nodes)
        case = replace(case, tolerance=tolerance)
        candidate = Candidate(system, 8, 1, nodes, 1, 1)
        units += [Unit(case, candidate, seed) for seed in range(options.batches)]
    results = iter(runner.run(units, "fig12"))
    rows = []
    for model, _, nodes, system, tolerance in keys:
        mine = [next(results) for _ in range(options.batches)]
        rows.append(
            {
                "model": model,
                "nodes": nodes,
                "scheduler": system,
                "tolerance": tolerance,
                "seconds": float(np.mean([r["seconds"] for r in mine])),
                "GB": float(np.mean([r["gb"] for r in mine])),
                "GB, busiest": float(np.mean([r["gb_busiest"] for r in mine])),
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(12, 7)
        axes = figure.subplots(2, len(ABLATED), sharex=True)
        for column, (model, _, nodes) in enumerate(ABLATED):
            for system in WAYS:
                mine = [
                    r
                    for r in rows
                    if (r["model"], r["nodes"], r["scheduler"]) == (model, nodes, system)
                ]
                for at, name in zip(axes[:, column], ("seconds", "GB"), strict=True):
                    at.plot(
                        [r["tolerance"] for r in mine], [r[name] for r in mine], "o-", label=system
                    )
                    at.set(ylabel=name)
            axes[0][column].set(title=f"{model}, {nodes} nodes")
            axes[1][column].set(xlabel="tolerance", ylim=(0, None))
        axes[0][0].legend()

    text = [
        "Pretrain up to 128K. Paper: 8B stays flat from 0 to 0.20; 34B is slower below 0.10; from "
        "0 to 0.15 the communication falls by 20 to 25%; beyond, the time rises.",
        "",
        *table(rows),
        "",
        "Where exchanges are hidden at every tolerance (see Figure 11), less of it is never slower "
        "here. The paper's 34B model, whose exchanges cost more below 0.10, shows more of its "
        "communication than these links at their full speed do. What a smaller tolerance costs in "
        "any case is bytes, and the memory of their buffers.",
    ]
    return Report("The tolerance (Figure 12)", rows, text, draw)


def appendix(runner: Runner, options: Options) -> Report:
    """Appendix A: into how many shards a document can be cut with all communication hidden."""
    model, at = MODELS["llama-34b"], CLUSTERS["dgx-h200"]
    flops = 2.0 * ModelCosts(model, at).layer_parameters
    seconds = flops / (at.peak_tflops * 1e12 * at.linear_mfu)
    hidden = seconds * at.network_gb_per_s * 1e9
    shape = model.attention_shape()
    # Of a token: its query, and the keys of the shards before: (s - 1) / 2 on average, and half of
    # or all its own shard.
    rows = []
    for convention, own in (("out", 0.0), ("half in", 0.5), ("in", 1.0)):
        # q + kv * ((s - 1) / 2 + own) = hidden.
        shards = 2 * ((hidden - shape.q_row_bytes) / shape.kv_row_bytes - own) + 1
        rows.append({"the shard's own keys": convention, "shards": float(shards)})
    text = [
        f"Llama-34B: {flops / 1e9:.3f} GFLOP and {1e6 * seconds:.3f} µs of a token's linear layers "
        f"at 50% of {at.peak_tflops:.0f} TFLOP/s, in which {hidden / 1e3:.1f} KB pass a link of "
        f"50 GB/s; a query is {shape.q_row_bytes:,} bytes, a key and value "
        f"{shape.kv_row_bytes:,}. Paper: 31.",
        "",
        *table(rows),
        "",
        "All rows are of one GPU; tensor parallelism divides operations and bytes alike. The "
        "simulator also counts the collectives of tensor parallelism, which give communication "
        "more to hide behind, and the busiest rank, which gives it less.",
    ]
    return Report("The bound of Appendix A", rows, text, None)


EXPERIMENTS: dict[str, Callable[[Runner, Options], Report]] = {
    "fig3": figure_3,
    "fig4": figure_4,
    "fig6": figure_6,
    "fig9": partial(end_to_end, "fig9"),
    "fig10": partial(end_to_end, "fig10"),
    "fig11": figure_11,
    "fig12": figure_12,
    "table3": partial(end_to_end, "table3"),
    "table4": partial(end_to_end, "table4"),
    "appendix": appendix,
}


def write(name: str, report: Report, folder: Path, command: str) -> None:
    """`NAME.csv`, `NAME.md`, `NAME.png`."""
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(report.rows[0]))
        writer.writeheader()
        writer.writerows(report.rows)
    lines = [f"# {report.title}", "", f"Simulated, not measured: `{command}`.", "", *report.text]
    if report.draw is not None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        report.draw(figure)
        figure.savefig(folder / f"{name}.png", dpi=80)
        lines += ["", f"![{report.title}]({name}.png)"]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--batches", type=int, default=30, help="of each case")
    parser.add_argument(
        "--sweep-batches", type=int, default=1, help="on which all configurations are tried"
    )
    parser.add_argument(
        "--finalists", type=int, default=2, help="configurations to tune the tolerance of"
    )
    parser.add_argument("--models", nargs="+", default=MODEL_NAMES, choices=MODEL_NAMES)
    parser.add_argument("--documents", nargs="+", default=DOCUMENTS, choices=DOCUMENTS)
    parser.add_argument("--published", type=Path, metavar="DIR")
    parser.add_argument("--processes", type=int, help="default: one for each core")
    args = parser.parse_args()
    if min(args.batches, args.sweep_batches, args.finalists) < 1:
        parser.error("--batches, --sweep-batches and --finalists must be at least 1")
    unknown = {*args.documents} - {"pretrain", "prolong"} | {*args.models} - {
        "llama-8b",
        "llama-34b",
    }
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: the paper has no such model or documents")
    options = Options(
        args.batches,
        args.sweep_batches,
        args.finalists,
        "" if args.published is None else str(args.published),
        tuple(args.models),
        tuple(args.documents),
    )
    args.output.mkdir(parents=True, exist_ok=True)
    runner = Runner(args.output / "runs.jsonl", args.processes)
    names = [args.experiment]
    if args.experiment == "all":
        # Tables 3 and 4 are figures 9 and 10.
        names = [name for name in EXPERIMENTS if name not in ("table3", "table4")]
    given = [a for a in sys.argv[2:] if a not in ("--output", "--published")]
    given = [a for a in given if a not in (str(args.output), str(args.published))]
    for name in names:
        command = " ".join(["python benchmarks/cluster.py", name, *given])
        write(name, EXPERIMENTS[name](runner, options), args.output, command)


if __name__ == "__main__":
    main()

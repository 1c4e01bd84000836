"""The paper's figures and Appendix A, and chains of micro-batches.

Figures 3, 4 and 6 are the cost of balancing by context parallelism or by packing, 11 and 12 hidden
communication and the tolerance. The appendix bounds the number of a document's shards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.cluster.explanations import FIGURE_3
from benchmarks.cluster.report import K, Options, Report, in_percent, share_that_fits, table
from benchmarks.cluster.sweep import Case, Runner, Unit, batch, mean
from distca.cost.model_sizes import MODELS
from distca.palette import SKY_BLUE, VERMILION, colour_in_turn
from distca.plan.plan import max_over_mean
from distca.plan.span import Floats, Int64s
from distca.simulate import CLUSTERS, DISTCA_SYSTEMS, Ablation, Candidate, ModelCosts
from distca.simulate.bins import BaselineLayout, Bins

PER_DOCUMENT = {"wlb-llm": "kept", "per-document-cp": "gathered again"}
"""Systems of Figure 3, by what becomes of gathered keys until the backward pass. All ranks are one
group, in which WLB-LLM packs nothing: it is per-document CP that keeps the keys."""
GATHERED = "gathered keys and values, share of memory (kept)"
"""A column of Figure 3."""


def figure_3(runner: Runner, options: Options) -> Report:
    """Sweeps per-document CP over all nodes: time and memory of the all-gather."""
    nodes = [2, 4, 8, 16, 32]
    units = {
        (count, system): Unit(
            options.case("llama-8b", "pretrain", 128, count, 8 * count),
            Candidate(system, 8, 1, 1, count, 1),
        )
        for count in nodes
        for system in PER_DOCUMENT
    }
    costs = ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"], 8)
    results = runner.over_batches(units, options.batches, "fig3")
    rows: list[dict[str, Any]] = []
    for count in nodes:
        row: dict[str, Any] = {"nodes": count}
        of_both = {title: results[count, system] for system, title in PER_DOCUMENT.items()}
        for title, mine in of_both.items():
            row[f"all-gather share, {title}"] = mean(mine, "gathering")
        gathered = (count - 1) * 128 * K * 32 * costs.shape.kv_row_bytes
        row[GATHERED] = gathered / 1e9 / mean(of_both["kept"], "memory_gb")
        for title, mine in of_both.items():
            row[f"GB, {title}"] = mean(mine, "memory_gb")
            row[f"fits, {title}"] = share_that_fits(mine)
        rows.append(row)

    def draw(figure: Any) -> None:
        figure.set_size_inches(7, 4)
        axes = figure.subplots()
        colour_in_turn(axes)
        lines = [f"all-gather share, {title}" for title in PER_DOCUMENT.values()]
        for name, marker in zip((*lines, GATHERED), "ods", strict=True):
            axes.plot(nodes, [r[name] for r in rows], f"{marker}-", label=name)
        axes.plot([2, 32], [0.03, 0.40], "x", label="paper: all-gather")
        axes.plot([2, 16], [0.03, 0.30], "+", label="paper: gathered keys")
        axes.set(xlabel="nodes (CP)", ylabel="share", xscale="log", ylim=(0, None))
        axes.set_xticks(nodes, [str(n) for n in nodes])
        axes.legend()

    text = [
        "Llama-8B, TP 8, 128K tokens a node, CP over all nodes. Documents: Pretrain. "
        f"{options.counted.capitalize()}. Shares are of the iteration's time and of a GPU's "
        "memory. Paper: the all-gather's share rises from 3% on 2 nodes to nearly 40% on 32; the "
        "keys' share of memory rises from 3% on 2 nodes to almost 30% on 16.",
        "",
        *table([in_percent(row) for row in rows]),
        "",
        FIGURE_3,
    ]
    return Report("Per-document context parallelism (Figure 3)", rows, text, draw)


PACKED_MICRO_BATCHES = 4
"""Micro-batches of each replica in Figure 4."""


def figure_4(runner: Runner, options: Options) -> Report:
    """Sweeps variable-length packing: imbalance of memory, and the idle time that is left."""
    units = {
        (context, data): Unit(
            replace(
                options.case("llama-8b", "pretrain", context, 512 * data // context, 8 * data),
                recompute="mlp",
            ),
            Candidate("wlb-llm", 8, 1, data, 1, PACKED_MICRO_BATCHES),
        )
        for context in (128, 256, 512)
        for data in (2, 4, 8, 16)
    }
    rows = []
    for (context, data), mine in runner.over_batches(units, options.batches, "fig4").items():
        case = units[context, data].case
        tokens = [packed_tokens(case, data, seed) for seed in range(options.batches)]
        rows.append(
            {
                "longest": f"{context}K",
                "DP": data,
                "a replica's tokens, max/mean": float(
                    np.mean([max_over_mean(each.sum(axis=1)) for each in tokens])
                ),
                "a micro-batch's tokens, max/mean": float(
                    np.mean([max_over_mean(each) for each in tokens])
                ),
                "idle": mean(mine, "idle"),
                "GB": max(r["memory_gb"] for r in mine),
                "fits": share_that_fits(mine),
            }
        )
    names = ("a replica's tokens, max/mean", "idle")

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 4)
        for axes, name in zip(figure.subplots(1, 2), names, strict=True):
            colour_in_turn(axes)
            for context in ("128K", "256K", "512K"):
                of_one = [r for r in rows if r["longest"] == context]
                axes.plot([r["DP"] for r in of_one], [r[name] for r in of_one], "o-", label=context)
            axes.set(xlabel="DP", ylabel=name)
            axes.legend()

    longest = [r for r in rows if r["longest"] == "512K"]
    most = ", ".join(f"{r[names[0]]:.2f}" for r in longest)
    text = [
        "Llama-8B, TP 8, no context parallelism, MLPs recomputed as in the paper's public "
        f"experiments; 512K tokens a node in {PACKED_MICRO_BATCHES} micro-batches of 128K on "
        f"average, the batch grows with DP; {options.counted}. Paper: at 512K balance needs 1.08 "
        "to 1.17 times the activation memory on some ranks; idle time at 512K is 19% at DP 4 and "
        "55% at DP 8. (It does not say how large the batch is. With less, such as 128K tokens a "
        "node, a document of 512K is a good part of it or all, and nothing can balance that; with "
        "much more there is little to balance.)",
        "",
        *table(rows),
        "",
        f"Activations grow with tokens alone, so the tokens of the replica that has most, over "
        f"the mean, are the paper's divergence of memory: {most} at 512K. A replica runs its "
        "micro-batches one after the other, so that the largest of them sets its peak, which "
        "differs by more: a long document lies in one micro-batch in any case. *GB* is the "
        "largest peak of a GPU in any batch, weights and optimizer included; *fits* says in how "
        "many batches no GPU runs out of memory. Where few or none fit, ratio and idle time are "
        "of a job that these GPUs cannot run.",
    ]
    return Report("Variable-length packing (Figure 4)", rows, text, draw)


def packed_tokens(case: Case, data_parallel: int, seed: int) -> Int64s | Floats:
    """Returns the tokens of each micro-batch that WLB-LLM packs, `[replicas, micro-batches]`.

    Args:
        case: workload and its documents.
        data_parallel: number of replicas, each a tensor-parallel group of 8.
        seed: number of the batch.
    """
    costs = case.workload.costs(8)
    lengths = np.concatenate(batch(case, seed))
    layout = BaselineLayout(1, data_parallel, 1, PACKED_MICRO_BATCHES)
    attention = costs.cluster.attention_cost(costs.shape)
    return Bins.of("wlb-llm", lengths, layout, costs, attention).tokens[:, :, 0]


def figure_6(runner: Runner, options: Options) -> Report:
    """Compares DP and CP of WLB-LLM on 64 GPUs, with 1M tokens of documents up to three lengths."""
    units = {
        (context, data, number): Unit(
            options.case("llama-8b", "pretrain", context, 1024 // context, 64),
            Candidate("wlb-llm", 8, 1, data, 8 // data, number),
        )
        for context in (128, 256, 512)
        for data in (1, 2, 4, 8)
        for number in (1, 2, 4)
    }
    rows: list[dict[str, Any]] = []
    results = runner.over_batches(units, options.batches, "fig6")
    for (context, data, micro_batches), mine in results.items():
        rows.append(
            {
                "longest": f"{context}K",
                "DP": data,
                "CP": 8 // data,
                "micro-batches": micro_batches,
                "tokens/s": sum(r["tokens"] for r in mine) / sum(r["seconds"] for r in mine),
                "idle": mean(mine, "idle"),
                "GB": max(r["memory_gb"] for r in mine),
                "fits": share_that_fits(mine),
            }
        )
    best = [_best_number(rows, key) for key in dict.fromkeys((r["longest"], r["DP"]) for r in rows)]

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 4)
        for axes, longest in zip(figure.subplots(1, 3), ("128K", "256K", "512K"), strict=True):
            mine = [r for r in best if r["longest"] == longest]
            colours = [SKY_BLUE if fits_always(r) else VERMILION for r in mine]
            axes.bar(range(len(mine)), [r["tokens/s"] for r in mine], color=colours)
            axes.set_xticks(range(len(mine)), [f"DP{r['DP']}\nCP{r['CP']}" for r in mine])
            axes.set(title=f"{longest}; red: out of memory", ylabel="tokens/s")

    text = [
        f"Llama-8B, 64 GPUs, TP 8, Pretrain, a million tokens in each batch, {options.counted}. "
        "Paper (512K): more CP reduces imbalance, costs throughput and risks running out of "
        "memory; more DP brings severe imbalance.",
        "",
        *(_optimum(best, longest) for longest in ("128K", "256K", "512K")),
        "",
        *table(rows),
        "",
        "A row fits if all its batches do. With documents of up to 512K a few of them have most of "
        "a batch's work, so ranks of small groups are idle while they wait for these, and a long "
        "document's activations lie on one rank, which has no room for them: the most CP is best. "
        "The paper's collectives are measured, and it does not say how much of their time was lost "
        "to launches and to ranks that came late.",
    ]
    return Report("WLB-LLM: DP against CP on 64 GPUs (Figure 6)", rows, text, draw)


def fits_always(row: dict[str, Any]) -> bool:
    """Returns whether all batches of a row fit in memory."""
    fitting, of = row["fits"].split(" of ")
    return bool(fitting == of)


def _best_number(rows: list[dict[str, Any]], key: tuple[str, int]) -> dict[str, Any]:
    """The row with the fastest number of micro-batches for a length and DP; one that fits, if any
    does."""
    mine = [r for r in rows if (r["longest"], r["DP"]) == key]
    return max(mine, key=lambda r: (fits_always(r), r["tokens/s"]))


def _optimum(best: list[dict[str, Any]], longest: str) -> str:
    """Says which DP and CP are fastest for a length, and whether that is the paper's shape."""
    mine = [r for r in best if r["longest"] == longest]
    able = [r for r in mine if fits_always(r)]
    fastest = max(able, key=lambda r: r["tokens/s"])
    inside = fastest["DP"] not in (mine[0]["DP"], mine[-1]["DP"])
    speeds = ", ".join(
        f"DP {r['DP']} CP {r['CP']} {r['tokens/s'] / 1e3:.1f}k"
        + ("" if fits_always(r) else " (out of memory)")
        for r in mine
    )
    shape = (
        "an optimum between the extremes, as in the paper" if inside else "no optimum between them"
    )
    return f"* Up to {longest}: {speeds} tokens/s; DP {fastest['DP']} is fastest: {shape}."


ABLATED = [("llama-8b", 8, 8), ("llama-8b", 8, 16), ("llama-34b", 4, 8), ("llama-34b", 4, 16)]
"""Model, number of 128K sequences (1M or 512K tokens), nodes of Figures 11 and 12."""


def figure_11(runner: Runner, options: Options) -> Report:
    """Compares DistCA with the ablations signal and single-stream."""
    ways: tuple[Ablation, ...] = ("none", "signal", "single-stream")
    keys = [(*setting, system) for setting in ABLATED for system in DISTCA_SYSTEMS]
    units: dict[tuple[Any, ...], Unit] = {}
    for model, sequences, nodes, system in keys:
        case = options.case(model, "pretrain", 128, sequences, 8 * nodes)
        unit = Unit(case, Candidate(system, 8, 1, nodes, 1, 1))
        units |= {(model, nodes, system, way): replace(unit, ablation=way) for way in ways}
    results = runner.over_batches(units, options.batches, "fig11")
    rows: list[dict[str, Any]] = []
    for model, sequences, nodes, system in keys:
        seconds = {way: mean(results[model, nodes, system, way], "seconds") for way in ways}
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
        axes = figure.subplots()
        colour_in_turn(axes)
        places = np.arange(len(rows))
        for number, name in enumerate(("signal, s", "DistCA, s", "single-stream, s")):
            values = [r[name] / r["signal, s"] for r in rows]
            axes.bar(places + 0.27 * (number - 1), values, width=0.27, label=name[:-3])
        names = [f"{r['model']}\n{r['nodes']} nodes\n{r['scheduler']}" for r in rows]
        axes.set_xticks(places, names, fontsize=8)
        axes.set(ylabel="time over signal", ylim=(0.9, None))
        axes.legend()

    text = [
        f"Pretrain up to 128K, {options.counted}. Paper: DistCA takes nearly as long as signal, "
        "but for 8B on 8 nodes; single-stream takes 10 to 17% longer.",
        "",
        *table(rows),
        "",
        *_against_exception(rows),
    ]
    return Report("Communication hidden (Figure 11)", rows, text, draw)


def _against_exception(rows: list[dict[str, Any]]) -> list[str]:
    """Compares the paper's exception, 8B on 8 nodes, with the other rows."""
    excess = {(r["model"], r["nodes"], r["scheduler"]): r["DistCA / signal"] - 1 for r in rows}
    theirs = [value for key, value in excess.items() if key[:2] == ("llama-8b", 8)]
    others = [value for key, value in excess.items() if key[:2] != ("llama-8b", 8)]
    if max(theirs) > max(others):
        return ["8B on 8 nodes is the exception here, too."]
    return [
        f"The paper's exception does not appear here: 8B on 8 nodes is at most {max(theirs):.1%} "
        f"above signal, the others up to {max(others):.1%}. The paper says that there is too "
        "little compute to hide behind; but with the same tokens in all, a GPU of 8 nodes has "
        "twice the compute of one of 16. Links have the same share of their speed here, whatever "
        "the sizes of messages."
    ]


TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def figure_12(runner: Runner, options: Options) -> Report:
    """Sweeps the tolerance: time against bytes."""
    keys = [(*s, system, t) for s in ABLATED for system in DISTCA_SYSTEMS for t in TOLERANCES]
    units = {}
    for model, sequences, nodes, system, tolerance in keys:
        case = options.case(model, "pretrain", 128, sequences, 8 * nodes)
        case = replace(case, tolerance=tolerance)
        candidate = Candidate(system, 8, 1, nodes, 1, 1)
        units[model, nodes, system, tolerance] = Unit(case, candidate)
    rows = []
    results = runner.over_batches(units, options.batches, "fig12")
    for (model, nodes, system, tolerance), mine in results.items():
        rows.append(
            {
                "model": model,
                "nodes": nodes,
                "scheduler": system,
                "tolerance": tolerance,
                "seconds": mean(mine, "seconds"),
                "GB": mean(mine, "gb"),
                "GB, busiest": mean(mine, "gb_busiest"),
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(12, 7)
        axes = figure.subplots(2, len(ABLATED), sharex=True)
        colour_in_turn(*axes.ravel())
        for column, (model, _, nodes) in enumerate(ABLATED):
            for system in DISTCA_SYSTEMS:
                mine = [
                    r
                    for r in rows
                    if (r["model"], r["nodes"], r["scheduler"]) == (model, nodes, system)
                ]
                for panel, name in zip(axes[:, column], ("seconds", "GB"), strict=True):
                    panel.plot(
                        [r["tolerance"] for r in mine], [r[name] for r in mine], "o-", label=system
                    )
                    panel.set(ylabel=name)
            axes[0][column].set(title=f"{model}, {nodes} nodes")
            axes[1][column].set(xlabel="tolerance", ylim=(0, None))
        axes[0][0].legend()

    text = [
        f"Pretrain up to 128K, {options.counted}. Paper: 8B stays flat from 0 to 0.20; 34B is "
        "slower below 0.10; from 0 to 0.15 the communication falls by 20 to 25%; beyond, the time "
        "rises.",
        "",
        *table(rows),
        "",
        *_effects_of_tolerance(rows),
    ]
    return Report("The tolerance (Figure 12)", rows, text, draw)


def _effects_of_tolerance(rows: list[dict[str, Any]]) -> list[str]:
    """Checks the paper's three statements against the table."""
    lines = []
    for model, _, nodes in ABLATED:
        for system in DISTCA_SYSTEMS:
            mine = {
                r["tolerance"]: r
                for r in rows
                if (r["model"], r["nodes"], r["scheduler"]) == (model, nodes, system)
            }
            best = min(mine.values(), key=lambda r: r["seconds"])

            def change(name: str, start: float, end: float, mine: Any = mine) -> str:
                return f"{mine[end][name] / mine[start][name] - 1:+.1%}"

            lines.append(
                {
                    "model": model,
                    "nodes": nodes,
                    "scheduler": system,
                    "fastest at": best["tolerance"],
                    "time at 0 over the fastest": mine[0.0]["seconds"] / best["seconds"],
                    "bytes, 0 to 0.15": change("GB", 0.0, 0.15),
                    "time, 0 to 0.1": change("seconds", 0.0, 0.1),
                    "time, 0.1 to 0.2": change("seconds", 0.1, 0.2),
                    "time, 0.2 to 0.5": change("seconds", 0.2, 0.5),
                }
            )
    slower = [line for line in lines if line["fastest at"] > 0.05]
    shown = (
        f"In {len(slower)} of {len(lines)} rows the fastest tolerance is above 0.05, so that "
        "smaller ones cost more time than they save."
        if slower
        else "No row is fastest above 0.05, and at 0 steps take at most "
        f"{max(line['time at 0 over the fastest'] for line in lines):.3f} times as long as at "
        "their fastest tolerance: exchanges are nearly hidden at small tolerances, too, unlike "
        "those of the paper's 34B model. What small tolerances cost in any case is bytes, and the "
        "memory of their buffers."
    )
    return [*table(lines), "", shown]


def appendix(runner: Runner, options: Options) -> Report:
    """Bounds the shards into which a document can be cut with all communication hidden."""
    model, cluster = MODELS["llama-34b"], CLUSTERS["dgx-h200"]
    flops = 2.0 * model.layer_parameters
    seconds = flops / (cluster.peak_tflops * 1e12 * cluster.linear_mfu)
    hidden = seconds * cluster.network_gb_per_s * 1e9
    shape = model.attention_shape()
    # A token moves its query and the keys of the shards before, (s - 1) / 2 on average, and none,
    # half or all of its own shard's keys.
    rows = []
    for convention, own in (("out", 0.0), ("half in", 0.5), ("in", 1.0)):
        # q + kv * ((s - 1) / 2 + own) = hidden.
        shards = 2 * ((hidden - shape.q_row_bytes) / shape.kv_row_bytes - own) + 1
        rows.append({"the shard's own keys": convention, "shards": float(shards)})
    text = [
        f"Llama-34B: {flops / 1e9:.3f} GFLOP and {1e6 * seconds:.3f} µs of a token's linear layers "
        f"at {cluster.linear_mfu:.0%} of {cluster.peak_tflops:.0f} TFLOP/s, in which "
        f"{hidden / 1e3:.1f} KB pass a link of {cluster.network_gb_per_s:.0f} GB/s; a query is "
        f"{shape.q_row_bytes:,} bytes, a key and value {shape.kv_row_bytes:,}. Paper: 31.",
        "",
        *table(rows),
        "",
        "All rows are of one GPU; tensor parallelism divides both operations and bytes. The "
        "simulator also counts the collectives of tensor parallelism, which give communication "
        "more to hide behind, and the busiest rank, which gives it less.",
    ]
    return Report("The bound of Appendix A", rows, text, None)


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

"""Figures 3, 4 and 6: the cost of balancing by context parallelism or by packing."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cluster.report import K, Options, Report, table
from benchmarks.cluster.sweep import Runner, Unit, mean
from distca.cost.model_sizes import MODELS
from distca.palette import SKY_BLUE, VERMILION, colour_in_turn
from distca.simulate import CLUSTERS, Candidate, ModelCosts


def figure_3(runner: Runner, options: Options) -> Report:
    """Sweeps per-document CP over all nodes: time and memory of the all-gather."""
    nodes = [2, 4, 8, 16, 32]
    units = {
        count: Unit(
            options.case("llama-8b", "pretrain", 128, count, 8 * count),
            Candidate("per-document-cp", 8, 1, 1, count, 1),
        )
        for count in nodes
    }
    costs = ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"], 8)
    rows = []
    for count, mine in runner.over_batches(units, options.batches, "fig3").items():
        memory = mean(mine, "memory_gb")
        gathered = (count - 1) * 128 * K * 32 * costs.shape.kv_row_bytes
        rows.append(
            {
                "nodes": count,
                "all-gather share": mean(mine, "gathering"),
                "gathered keys share of memory": gathered / 1e9 / memory,
                "GB": memory,
                "fits": all(r["fits"] for r in mine),
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(7, 4)
        axes = figure.subplots()
        colour_in_turn(axes)
        axes.plot(nodes, [r["all-gather share"] for r in rows], "o-", label="all-gather, of time")
        axes.plot(
            nodes,
            [r["gathered keys share of memory"] for r in rows],
            "s-",
            label="gathered keys, of memory",
        )
        axes.plot([2, 32], [0.03, 0.40], "x", label="paper: all-gather")
        axes.plot([2, 16], [0.03, 0.30], "+", label="paper: gathered keys")
        axes.set(xlabel="nodes (CP)", ylabel="share", xscale="log", ylim=(0, None))
        axes.set_xticks(nodes, [str(n) for n in nodes])
        axes.legend()

    text = [
        "Llama-8B, TP 8, 128K tokens a node, CP over all nodes, Pretrain. Paper: the all-gather's "
        "share rises from 3% on 2 nodes to nearly 40% on 32; the keys' share of memory from 3% on "
        "2 to almost 30% on 16.",
        "",
        *table(rows),
        "",
        "The gathered keys and values of all layers are kept for the backward pass, as the paper's "
        "share of memory implies.",
    ]
    return Report("Per-document context parallelism (Figure 3)", rows, text, draw)


def figure_4(runner: Runner, options: Options) -> Report:
    """Sweeps variable-length packing: imbalance of memory, and the idle time that is left."""
    units = {
        (context, data): Unit(
            options.case("llama-8b", "pretrain", context, 512 * data // context, 8 * data),
            Candidate("wlb-llm", 8, 1, data, 1, 4),
        )
        for context in (128, 256, 512)
        for data in (2, 4, 8, 16)
    }
    rows = []
    for (context, data), mine in runner.over_batches(units, options.batches, "fig4").items():
        rows.append(
            {
                "longest": f"{context}K",
                "DP": data,
                "memory, busiest over least": float(
                    np.mean([r["memory_gb"] / r["least_memory_gb"] for r in mine])
                ),
                "idle": mean(mine, "idle"),
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 4)
        for axes, name in zip(
            figure.subplots(1, 2), ("memory, busiest over least", "idle"), strict=True
        ):
            colour_in_turn(axes)
            for context in ("128K", "256K", "512K"):
                of_one = [r for r in rows if r["longest"] == context]
                axes.plot([r["DP"] for r in of_one], [r[name] for r in of_one], "o-", label=context)
            axes.set(xlabel="DP", ylabel=name)
            axes.legend()

    text = [
        "Llama-8B, TP 8, no context parallelism; 512K tokens a node in 4 micro-batches of 128K, "
        "the batch grows with DP. Paper: at 512K balance needs 1.08 to 1.17 times the memory on "
        "some ranks; idle time at 512K is 19% at DP 4 and 55% at DP 8. (It does not say how large "
        "the batch is. With less, such as 128K tokens a node, a document of 512K is a good part "
        "of it or all, and nothing can balance that; with much more there is little to balance.)",
        "",
        *table(rows),
        "",
        "Memory is the largest of a GPU over the smallest, weights and optimizer included. Bins "
        "may be as large as memory allows here, where that balances the work, and a long document "
        "lies on one rank in any case: so it differs by more than in the paper, whose packing "
        "keeps to a cap.",
    ]
    return Report("Variable-length packing (Figure 4)", rows, text, draw)


def figure_6(runner: Runner, options: Options) -> Report:
    """Compares DP and CP of WLB-LLM on 64 GPUs and 512K."""
    case = options.case("llama-8b", "pretrain", 512, 2, 64)
    units = {
        (data, 8 // data, number): Unit(case, Candidate("wlb-llm", 8, 1, data, 8 // data, number))
        for data in (1, 2, 4, 8)
        for number in (1, 2, 4)
    }
    rows = []
    results = runner.over_batches(units, options.batches, "fig6")
    for (data, context, micro_batches), mine in results.items():
        fits = all(r["fits"] for r in mine)
        rows.append(
            {
                "DP": data,
                "CP": context,
                "micro-batches": micro_batches,
                "tokens/s": sum(r["tokens"] for r in mine) / sum(r["seconds"] for r in mine),
                "idle": mean(mine, "idle"),
                "GB": max(r["memory_gb"] for r in mine),
                "memory": "fits" if fits else "OOM",
            }
        )

    def draw(figure: Any) -> None:
        figure.set_size_inches(8, 4)
        axes = figure.subplots()
        colours = [SKY_BLUE if r["memory"] == "fits" else VERMILION for r in rows]
        axes.bar(range(len(rows)), [r["tokens/s"] for r in rows], color=colours)
        names = [f"DP{r['DP']}\nCP{r['CP']}\nM{r['micro-batches']}" for r in rows]
        axes.set_xticks(range(len(rows)), names, fontsize=8)
        axes.set(ylabel="tokens/s", title="red: out of memory")

    text = [
        "Llama-8B, 2 sequences of 512K, Pretrain. Paper: more CP reduces imbalance, costs "
        "throughput and risks running out of memory; more DP brings severe imbalance.",
        "",
        *table(rows),
        "",
        "The imbalance that more DP brings is here, too, but the most CP is the fastest: in two "
        "sequences of 512K a few documents have most of the work, so that ranks of small groups "
        "are idle while they wait for those; and a long document's activations lie on one rank "
        "then, which has no room for them. What CP costs is as in Figure 3 on 8 nodes, with an "
        "all-gather at the links' full speed. The paper's collectives are measured, and it does "
        "not say how much of their time was lost to launches and to ranks that came late.",
    ]
    return Report("WLB-LLM: DP against CP on 64 GPUs (Figure 6)", rows, text, draw)

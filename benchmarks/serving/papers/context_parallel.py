"""Claims of Context Parallelism for Scalable Million-Token Inference."""

from __future__ import annotations

import numpy as np

from benchmarks.claims import Claim, number, span, stored_table
from benchmarks.serving.papers.published_figures import (
    PUBLISHED,
    RIGHT,
    ours_and_theirs,
    stored_comparisons,
    stored_number,
)
from benchmarks.serving.papers.verdicts import (
    EXACTLY,
    REPRODUCED,
    WITHIN,
    differs,
    holds,
    judged,
    made_by,
    missing,
    not_possible,
    page,
    tests,
)
from benchmarks.serving.published_times import NUMBERS, Number, meta
from distca.cost.model_sizes import MODELS
from distca.plan import Mask
from distca.schedule.serving import PaperRule, nobody_holds, shard_evenly, step_plan
from distca.simulate import CLUSTERS

PAGE = made_by("context_parallel")
MEASURED = made_by("ring_prefill", "--output DIR --ranks 2 4 --rounds 1")
LINKS = made_by(
    "ring_slow_link", "--ranks 2 --busy 0.5 0.9 --rounds 1 --output DIR", "ring_prefill"
)
LLAMA = MODELS["llama-405b"]
TOKENS, MILLION = 128_000, 1_000_000
GPUS_OF_NODE, PEAK = 8, 800e12
"""GPUs of a node, and operations a second of one, by the paper."""


def claims() -> list[Claim]:
    """All rows, in the order of the paper."""
    return [*design(), *selection(), *prefills(), *turns(), *decodes()]


def of_place(place: str, kind: str | None = None) -> list[Number]:
    """Numbers of a table or figure, of runs of a kind if it is given."""
    found = [each for each in NUMBERS if each.run.paper == "Meta" and each.place == place]
    return [each for each in found if kind in (None, each.run.kind)]


def prompt_seconds(tokens: int, nodes: int) -> float:
    """Our seconds of a prompt on some nodes."""
    return float(stored_number(meta("pass-kv", tokens, 0, nodes))["ours"])


def shown(values: list[float], form: str) -> str:
    """Formats values in a row."""
    return ", ".join(format(each, form) for each in values)


def in_ratios(comparisons: list[dict[str, str]]) -> list[float]:
    """The first figure of each comparison."""
    return [number(each["ours"]) for each in comparisons]


def design() -> list[Claim]:
    """Sections 3.2 to 3.6: what travels, and who has which tokens."""
    shape = LLAMA.attention_shape()
    ranks, tokens = 8, 128_000
    new = shard_evenly(np.array([0]), np.array([tokens]), ranks)
    ring = step_plan(nobody_holds(ranks), new, "pass-kv", Mask(), in_steps=True)
    loads = ring.plan.loads()
    moved = sum(int(each.kv.moved()[2].sum()) for each in ring.step_segments)
    padded = (ranks - 1) * tokens
    sizes = LLAMA.layers, LLAMA.hidden_size, LLAMA.heads, LLAMA.kv_heads
    wide = shape.q_row_bytes / shape.k_row_bytes
    return [
        Claim(
            "Table 9: Llama 405B",
            "126 layers, 16,384 wide, 128 heads, 8 key-value heads",
            "{} layers, {:,} wide, {} heads, {} key-value heads".format(*sizes),
            judged(sizes, (126, 16_384, 128, 8), "another model", EXACTLY),
            "`distca/cost/model_sizes.py`",
        ),
        Claim(
            "Table 2: messages of queries over those of keys",
            "16 times",
            f"{wide:g} times; keys and values together have half of that",
            judged([wide], [16.0], "other heads", EXACTLY),
            "`distca/cost/volume.py`",
        ),
        Claim(
            "Figures 1 and 2: 2N chunks in zigzag, also of a turn's new tokens",
            "equal work and equal memory",
            "128,000 tokens on 8 ranks: the busiest computes "
            f"{loads.max() / loads.mean():.4f} times the mean of pairs",
            holds(
                bool(loads.max() < 1.001 * loads.mean()), "unequal work", "parts are cut otherwise"
            ),
            tests("schedule/test_serving_steps"),
        ),
        Claim(
            "Algorithm 2, Figure 3: ring pass-KV with cached tokens",
            "N steps of messages that are padded to the longest",
            f"exact sizes: {moved / padded:.2f} times the bytes of whole keys, since the ring "
            "leads downwards and rows that nobody sees stay",
            differs("fewer bytes", "messages need not have one size here"),
            tests("schedule/test_serving_steps", "runtime/serving/test_stepped_call"),
        ),
        Claim(
            "Appendix B, Eq. 4: merging partial outputs",
            "by their LSE",
            "the same; equal to dense attention within rounding",
            REPRODUCED,
            tests("attention/test_merge", "runtime/serving/test_stepped_call"),
        ),
        Claim(
            "Algorithm 3, Figure 4: ring pass-Q, outputs return by an all-to-all",
            "all outputs together at the end",
            "outputs of a step return while kernels compute the next",
            differs("the return", "only the last step's outputs are exposed"),
            tests("runtime/serving/test_stepped_call", "simulate/test_simulated_inference"),
        ),
        Claim(
            "Algorithm 4: decoding with pass-Q, tokens owned in turn",
            "one token of a sequence for each rank in turn",
            "stripes of `--cp-kv-cache-interleave-size` tokens, by default 16; 1 is the paper's",
            REPRODUCED,
            tests("schedule/test_decode", "runtime/serving/test_decode_exchange"),
        ),
        Claim(
            "Figure 5: tensor parallelism within nodes, context parallelism between them",
            "TP 8, CP N",
            "`--tensor-parallel-size` with `--context-parallel-size`, on several machines by "
            "torchrun; answers are exact",
            REPRODUCED,
            tests("inference/test_exactness", "with_vllm/test_vllm_slurm"),
        ),
        Claim(
            "Section 4.1: MLPs in FP8, FlashAttention 3, Flash-Decoding with 256 splits",
            "on H100s",
            "simulated with `--mlp-dtype-bytes 1`; prefill ranks run vLLM's FP8 weights; the "
            "kernels are called, and no GPU has run them",
            not_possible("no GPU was at hand"),
            "[hardware](../../../docs/hardware.md), [vLLM](../../../docs/vllm.md)",
        ),
    ]


def selection() -> list[Claim]:
    """Section 3.4 and Appendices C and D: who chooses."""
    rows = stored_table("serving/context_parallel", "threshold", "published")
    both = [(number(row["computed"].split()[0]), number(row["published"])) for row in rows]
    first, second, third, fifth = both
    by_rule = {}
    for rate in (CLUSTERS["dgx-h100"].attention_tflops, 800.0):
        rule = PaperRule(LLAMA.attention_shape(), 4, 8 * rate * 1e12, 8 * 50e9)
        by_rule[rate] = rule.tokens_that_hide_keys, rule.of_tokens(3100, 124_900)
    (assumed, (low, chosen)), (_, (high, published)) = by_rule.items()
    rules = stored_table("serving/context_parallel", "nodes", "network", "cached on", "rule")

    def agree(name: str) -> str:
        of = [row["agree"].split(" of ") for row in rows_of(name)]
        return f"{sum(int(each[0]) for each in of)} of {sum(int(each[1]) for each in of)}"

    def rows_of(name: str) -> list[dict[str, str]]:
        return [row for row in rules if row["rule"] == name]

    longest = max(number(row["longer, mean"]) for row in rules)
    return [
        Claim(
            "Table 3, Eqs. 1, 2 and 3: thresholds on 4 nodes",
            "12.5%, 4,000 and 32,000 tokens",
            f"{first[0]:.1%}, {second[0]:,.0f} and {third[0]:,.0f} tokens",
            judged([first[0], second[0], third[0]], [0.125, 4000, 32_000], "a term", EXACTLY),
            f"{PAGE}; {tests('schedule/test_selection')}",
        ),
        Claim(
            "Eq. 5, Algorithm 5: the outputs' return lowers the threshold",
            f"{fifth[1]:,.0f} of 128,000 tokens",
            f"{fifth[0]:,.0f}",
            judged([fifth[0]], [fifth[1]], "a term", EXACTLY),
            f"{PAGE}; {tests('schedule/test_selection')}",
        ),
        Claim(
            "Algorithms 1 and 5 beside the simulated choice",
            "thresholds are tuned by hand",
            f"the same choice in {agree('Algorithm 1')} and {agree('Algorithm 5')} prefills; "
            f"attention takes at most {longest:.1%} longer on average",
            holds(longest <= WITHIN, f"{longest:.0%} on average", "overheads are charged here"),
            PAGE,
        ),
        Claim(
            "Section 3.4: rate of attention in `--selector paper`",
            "800 TFLOP/s a GPU",
            f"with a profile its measured rate, else {assumed:g} TFLOP/s: Eq. 2 then gives "
            f"{low:,.0f} tokens instead of {high:,.0f}, and {chosen} instead of {published} for "
            "3,100 new tokens of 128,000",
            holds(
                low == high,
                f"a factor of {high / low:.2f} without a profile",
                "the default is FlashAttention 2's rate; `distca profile` or --attention-tflops "
                "gives the machine's",
            ),
            tests("commands/test_serving_step", "inference/test_strategy_choice"),
        ),
        Claim(
            "Appendix D, Figure 10: an empirical rule, fitted to log T and log of the miss rate",
            "coefficients -1.059, 1.145, 12.112",
            "these coefficients give all rows of Table 4 the same answer; fitted anew to simulated "
            f"times the form agrees in {agree('Appendix D, refitted')} prefills",
            differs("its coefficients", "the published ones don't reproduce the paper's Table 4"),
            f"{PAGE}; {tests('schedule/test_selection')}",
        ),
        Claim(
            "Section 3.4: further strategies",
            "pass-KV and pass-Q",
            "`auto` chooses between these two, runahead and csps are chosen by hand",
            missing("all strategies in one choice"),
            tests("inference/test_strategy_choice"),
        ),
    ]


def prefills() -> list[Claim]:
    """Sections 4.2.1 to 4.2.3: prompts."""
    runs = of_place("Figure 6a") + of_place("Table 6", "pass-kv")[1:]
    ours, theirs = ours_and_theirs(*sorted(runs, key=lambda each: each.run.ranks))
    one, sixteen = prompt_seconds(MILLION, 1), prompt_seconds(MILLION, 16)
    efficiency = one / (16 * sixteen)
    products = LLAMA.layers * LLAMA.layer_parameters * 2 * MILLION
    work = products + 2 * MILLION**2 * LLAMA.heads * LLAMA.head_dim * LLAMA.layers
    use = work / (16 * GPUS_OF_NODE * PEAK * sixteen)
    longer, published = ours_and_theirs(*of_place("Figure 7"))
    (slow_network,) = stored_comparisons("Meta, Figure 6b")
    single = [prompt_seconds(TOKENS, 1), one]
    measured = [
        number(row["of the ideal"])
        for row in stored_table("serving/ring_prefill", "ranks", "strategy")
        if row["strategy"] == "pass-kv"
    ]
    slow = stored_table("serving/ring_slow_link", "ranks", "strategy")
    hidden = {
        title: [number(row[title]) for row in slow if row["strategy"] == "pass-kv"]
        for title in ("wall, in steps over signal", "single-stream over signal")
    }
    steps, apart = hidden.values()
    return [
        Claim(
            "Section 1: prefill on one node",
            "about 60 s for 128K tokens, 1200 s for 1M",
            f"{single[0]:.1f} s and {single[1]:,.0f} s",
            judged(single, [60.0, 1200.0], "the paper's Table 6 has 42 s for the same 128K tokens"),
            PUBLISHED,
        ),
        Claim(
            "Abstract, Figure 8: 1M tokens on 16 nodes (128 GPUs)",
            "77 s",
            f"{sixteen:.1f} s",
            judged([sixteen], [77.0], "kernels have one rate for all lengths here"),
            PUBLISHED,
        ),
        Claim(
            "Figure 8: 128K tokens on 16 nodes",
            "3.8 s",
            f"{prompt_seconds(TOKENS, 16):.2f} s",
            judged(
                [prompt_seconds(TOKENS, 16)],
                [3.8],
                "a ring's step takes about 0.4 ms there, and 0.7 ms in the fit",
            ),
            PUBLISHED,
        ),
        Claim(
            "Abstract, Appendix A: parallel efficiency and use of FLOPS with 1M tokens",
            "93%, 63%",
            f"{efficiency:.0%} on 16 nodes over one, and {use:.0%} of {PEAK / 1e12:g} TFLOP/s",
            judged(
                [efficiency, use],
                [0.93, 0.63],
                "16 nodes take longer than in the paper",
            ),
            PUBLISHED,
        ),
        Claim(
            "Figure 6(a): 128K tokens on 2 and on 8 nodes, RDMA",
            f"{theirs[0]:g} s, {theirs[1]:g} s",
            f"{ours[0]:.1f} s, {ours[1]:.2f} s",
            judged(ours, theirs, "rates are fitted to other numbers"),
            PUBLISHED,
        ),
        Claim(
            "Figure 6(b): up to 4 nodes over TCP, about 3 GB/s a rank",
            "scales as over RDMA",
            f"128K tokens on 4 nodes take {slow_network['ours']} as long at 3 GB/s",
            holds(slow_network["sign"] == RIGHT, "the network", "keys are not hidden here"),
            PUBLISHED,
        ),
        Claim(
            "Figure 6 on processes: efficiency of pass-KV, and what is exposed",
            "near-linear; communication is hidden",
            f"{span(measured, '.0%')} of the ideal CPU seconds on 2 and 4; on links that are busy "
            f"for 0.5 and 0.9 of the kernels' time {span(steps)} times as long as with free "
            f"exchanges, without overlap {span(apart)}",
            holds(
                min(measured) >= 0.9 and max(steps) <= 1.1, "what is exposed", "the machine is busy"
            ),
            f"{MEASURED}; {LINKS}",
        ),
        Claim(
            "Figure 7: how much longer tensor parallelism over 2 and 8 nodes takes",
            "about 15% and 100%",
            f"{longer[0] - 1:.0%} and {longer[1] - 1:.0%}",
            judged(longer, published, "all-reduces have one speed for all sizes here"),
            PUBLISHED,
        ),
    ]


def turns() -> list[Claim]:
    """Section 4.2.4: turns over cached tokens."""
    times, theirs = ([1e3 * each for each in of] for of in ours_and_theirs(*of_place("Table 4")))
    compared = stored_comparisons("Meta, Table 4")
    right = sum(each["sign"] == RIGHT for each in compared)
    ratios = in_ratios(compared)
    published = [q / kv for kv, q in zip(theirs[0::2], theirs[1::2], strict=True)]
    return [
        Claim(
            "Table 4: ms of pass-KV and pass-Q with 2.5%, 5% and 10% new of 128,000 tokens",
            shown(theirs, ",.0f"),
            shown(times, ",.0f"),
            judged(times, theirs, "the constant part of a turn is smaller here"),
            PUBLISHED,
        ),
        Claim(
            "Table 4: time of pass-Q over pass-KV",
            shown(published, ".3f"),
            shown(ratios, ".3f"),
            judged(ratios, published, "the return of outputs"),
            PUBLISHED,
        ),
        Claim(
            "Figure 9, Table 5: which is faster",
            "pass-Q up to about 5%, pass-KV above",
            f"the same in {right} of {len(compared)} rows of Table 4; at 5% both are within 5% of "
            "each other, here and there",
            holds(right == len(compared), f"{len(compared) - right} rows", "the return of outputs"),
            PUBLISHED,
        ),
        Claim(
            "Table 5: parts of the time: attention, SendRecv, All2All",
            "an exposed SendRecv decides at 2.5%, a hidden one at 10%",
            "distca simulate prefill prints kernels, links and waits of each step, and --trace "
            "writes them",
            missing("a stored page of these parts beside the published ones"),
            tests("commands/test_serving_step"),
        ),
    ]


def decodes() -> list[Claim]:
    """Section 4.3: decoding."""
    ours, theirs = ([1e3 * each for each in of] for of in ours_and_theirs(*of_place("Table 7")))
    short, at_8k = ([1e3 * x for x in of] for of in ours_and_theirs(*of_place("Table 6", "decode")))
    doubled = stored_comparisons("Meta, Table 7")
    over_nodes = stored_comparisons("Meta, Section 4.3")
    tensor, context = (in_ratios(of) for of in (over_nodes[:2], over_nodes[2:]))
    return [
        Claim(
            "Table 7: ms of a decoded token over 128K cached ones on 1, 2 and 4 nodes",
            shown(theirs, ".1f"),
            shown(ours, ".1f"),
            judged(ours, theirs, "calls of an exchange take other times here"),
            PUBLISHED,
        ),
        Claim(
            "Table 7: CP makes decoding slower",
            "with each doubling of nodes",
            f"{shown(in_ratios(doubled), '.3f').replace(', ', ' and ')} times as long with each",
            holds(
                all(each["sign"] == RIGHT for each in doubled),
                "the sign",
                "what the exchange adds is not charged in full",
            ),
            PUBLISHED,
        ),
        Claim(
            "Section 4.3, Table 7: TP 16 and TP 32 over nodes",
            "slower than TP 8, faster than CP",
            f"{shown(tensor, '.3f').replace(', ', ' and ')} times the time of TP 8; CP on as many "
            f"GPUs takes {shown(context, '.3f').replace(', ', ' and ')} times as long. A fit saw "
            "half of these orders, since the digest has no times",
            holds(
                all(each["sign"] == RIGHT for each in over_nodes),
                "the order",
                "collectives over nodes take other times here",
            ),
            PUBLISHED,
        ),
        Claim(
            "Table 6: ms of a decoded token by context, 8K to 128K",
            "44 to 46 (TP 8), 60 to 66 (2 nodes)",
            f"{short[0]:.1f} with 8K and {ours[0]:.1f} with 128K (TP 8); {ours[1]:.1f} with 128K "
            "on 2 nodes, for which the digest has no other context",
            judged([*short, *ours[:2]], [*at_8k, *theirs[:2]], "rates of the memory"),
            PUBLISHED,
        ),
        Claim(
            "Table 8: parts of pass-Q in decoding",
            "attention gets faster with more nodes, SendRecv and All2All slower",
            "distca simulate decode prints kernels, links and waits of each step",
            missing("a stored page of these parts beside the published ones"),
            tests("commands/test_serving_step"),
        ),
        Claim(
            "Section 4.1: CUDA graphs in decoding",
            "for small steps",
            "a rank that has all keys runs a step as one graph with its attention; over stripes of "
            "several ranks layers are graphs between calls of attention",
            missing("graphs over stripes that include attention; no GPU has run either"),
            tests("inference/test_decode_graphs"),
        ),
        Claim(
            "Section 4.3: prefill and decode on different GPUs",
            "recommended",
            "`distca prefill` computes long prompts for vLLM, which decodes",
            REPRODUCED,
            f"{tests('with_vllm/test_connector')}; {page('vllm_prefill')}",
        ),
    ]

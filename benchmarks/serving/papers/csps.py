"""Claims of CSPS: A Communication-Efficient Sequence-Parallelism based Serving System."""

from __future__ import annotations

from benchmarks.claims import (
    Claim,
    number,
    one,
    span,
    stored_json,
    stored_page,
    stored_table,
)
from benchmarks.serving.csps_clusters import MODELS, ROWS
from benchmarks.serving.papers.sparse_attention import (
    BOUNDS,
    CLUSTERS,
    SLOW,
    pipelining,
    slow_links,
    sparse_attention,
)
from benchmarks.serving.papers.verdicts import (
    NO_CLAIM,
    REPRODUCED,
    differs,
    holds,
    judged,
    made_by,
    missing,
    not_possible,
    tests,
)
from distca.schedule.serving.csps.layouts import tokens_for_head_scatter

LAYOUTS = made_by("layouts")
QUALITY = made_by("sparse_quality")
VLLM = made_by("vllm_gpus", "--requests 160 --output DIR")
QUEUES = (
    "the averages hold queues and decodes of 64 A100s, and the paper gives neither the order of "
    "its requests nor how it weighs lengths"
)


def claims() -> list[Claim]:
    """All rows, in the order of the paper."""
    return [
        *motivation(),
        *architectures(),
        *sparse_attention(),
        *pipelining(),
        *choices(),
        *rest(),
    ]


def simulated(data: str, tokens: int, name: str, ranks: int = 16) -> list[float]:
    """Seconds of both models in the simulated clusters."""
    rows = stored_json("serving/csps_clusters")
    wanted = {"data": data, "tokens": tokens, "ranks": ranks}
    found = [row[name] for row in rows if wanted.items() <= row.items()]
    assert len(found) == len(MODELS), (wanted, found)
    return found


def of_vllm(system: str) -> list[float]:
    """Milliseconds of a decoded token beside long prompts: median and 99th percentile."""
    (rows,) = (
        rows
        for title, rows in stored_json("serving/vllm_gpus")["charged"].items()
        if title.startswith("Long prompts") and title.endswith("(0.20)")
    )
    (row,) = (each for each in rows if each["system"] == system)
    return list(row["ms"])


def motivation() -> list[Claim]:
    """Abstract, Section 2 and O1: why a prompt in chunks is slow."""
    rows = stored_json("serving/csps_clusters")
    gains, of_work = (
        [row[name] / row["dropped"] for row in rows if row["ranks"] == 16]
        for name in ("chunks", "chunks_work")
    )
    chunks, work = (simulated("NeedleBench", 995_000, name) for name in ("chunks", "chunks_work"))
    mixed, apart = of_vllm("TP 8, alone"), of_vllm("TP 4, 4 prefill ranks")
    return [
        Claim(
            "Abstract: TTFT, time of a token (TBT), response time, prefill and decode throughput "
            "over Sarathi-Serve",
            "up to 7.5, 1.92, 9.8, 8.2 and 5.2 times",
            f"a prompt alone, in chunks on 8 GPUs, takes {span(gains)} times as long as with a "
            f"fifth of the node's keys dropped on 16; {span(of_work)} times if chunks have no "
            "overheads",
            not_possible(QUEUES),
            CLUSTERS,
        ),
        Claim(
            "Figure 1, Eqs. 1 to 4: a transformer's layers",
            "projections, softmax(QKᵀ)V for each head, output projection",
            "models of transformers, whose logits on several ranks equal those of one process "
            "within rounding",
            REPRODUCED,
            tests("inference/test_exactness"),
        ),
        Claim("Table 1: notation", "names of sizes", "names of arguments", NO_CLAIM, "docstrings"),
        Claim(
            "Table 2: lengths of prompts in NeedleBench and BookCorpus",
            "median 113K and 97K, P99 995K and 406K",
            "prompts of these four lengths are simulated; none of the data is read",
            not_possible("the models have 7B and 9B parameters and need GPUs"),
            CLUSTERS,
        ),
        Claim(
            "Figure 2: TTFT of chunked prefills, 1M tokens",
            "213 s",
            f"{span(chunks, '.0f')} s, simulated, for a prompt of 995,000 tokens alone; "
            f"{span(work, '.0f')} s without overheads",
            judged(
                chunks,
                [213.0] * 2,
                "overheads that were fitted to other systems, 0.7 ms a collective, are too high "
                "for the paper's; it averages both models, and decodes run between its chunks",
            ),
            CLUSTERS,
        ),
        Claim(
            "Figures 2 and 3, O1: decodes beside chunks of long prompts",
            "TBT grows from 0.54 s to 9.6 s with lengths of 1K to 1M, throughput falls from 204 to "
            "5 tokens/s",
            f"simulated, vLLM on 8 H100s with TP 8: {mixed[0]:.1f} ms a token in the median and "
            f"{mixed[1]:.1f} ms at P99; with half of the GPUs as prefill ranks {apart[0]:.1f} and "
            f"{apart[1]:.1f} ms",
            differs(
                "the setting",
                "Llama 8B, prompts of at most 131,072 tokens, and chunks of 8,192 instead of 256; "
                "here, too, chunks delay decodes at P99, and separate prefills don't",
            ),
            VLLM,
        ),
    ]


def architectures() -> list[Claim]:
    """Section 3.2.1 to 3.2.3: SP-NTP and SP-TP."""
    ways = [
        {row["way"]: row for row in stored_table("serving/layouts", "ranks", "way")[start:end]}
        for start, end in ((0, 5), (5, 10))
    ]
    more = [number(of["sp-tp"]["MB"]) / number(of["sp-ntp"]["MB"]) for of in ways]
    cpu = {
        name: span([number(of[name]["over pass-kv"]) for of in ways])
        for name in ("sp-ntp", "sp-tp")
    }
    rule = tokens_for_head_scatter(4096, 8)
    links = slow_links()
    shares = {
        name: number(links[name]["link, s"]) / number(links[name]["TTFT, s"])
        for name in ("sp-ntp", "sp-tp")
    }
    return [
        Claim(
            "Figure 4(a): SP-NTP, two all-to-alls of heads",
            "each GPU has some heads of the whole sequence",
            "`--prefill-strategy sp-ntp`: dense attention within rounding; bytes are those of both "
            f"all-to-alls; CPU seconds {cpu['sp-ntp']} times those of pass-KV",
            REPRODUCED,
            f"{tests('schedule/test_head_scatter', 'inference/test_exactness')}; {LAYOUTS}",
        ),
        Claim(
            "Figure 4(b): SP-TP, all-gather and reduce-scatter",
            "each GPU has all rows of its heads",
            "`--prefill-strategy sp-tp` with `--tensor-parallel-size`: dense attention within "
            "rounding; bytes are the closed form; CPU seconds "
            f"{cpu['sp-tp']} times those of pass-KV",
            REPRODUCED,
            f"{tests('schedule/test_layouts', 'runtime/serving/test_sequence_exchange')}; "
            f"{LAYOUTS}",
        ),
        Claim(
            "Section 3.2.1: short prompts fill the last partition",
            "prefills of shorter prompts are inserted",
            "ranks get equal numbers of tokens; short prompts follow the long one's last part",
            REPRODUCED,
            tests("simulate/test_near_to_far"),
        ),
        Claim(
            "Section 3.2.2: choice between SP-NTP and SP-TP",
            "SP-NTP above 100K tokens",
            f"the paper's own inequality gives {rule:,.0f} tokens for its models on 8 GPUs, and "
            "none for 2, where it claims that SP-NTP always sends less; `auto` compares bytes",
            differs(
                f"{rule / 1e5 - 1:+.0%}",
                "the paper's 100K come from its experiments, not from its rule",
            ),
            tests("schedule/test_layouts"),
        ),
        Claim(
            "Section 3.2.2: tokens that a GPU holds",
            "64K without TP, 128K with TP 8",
            "`--context-parallel-size auto` takes the fewest ranks whose memory holds the prompt",
            not_possible("the paper doesn't say what memory it leaves for keys and values"),
            tests("commands/test_fewest_ranks"),
        ),
        Claim(
            "Figure 5, O2: communication's share of TTFT, SP-NTP and SP-TP",
            "13% to 34%, 39% to 62%",
            f"bytes of SP-TP over SP-NTP: {span(more)} times; on processes with links of 40 "
            f"Mbit/s, where links are the limit, {shares['sp-ntp']:.0%} and {shares['sp-tp']:.0%}",
            differs(
                "the link's speed",
                "no GPU was used; SP-TP sends more in both",
            ),
            f"{LAYOUTS}; {SLOW}",
        ),
    ]


def choices() -> list[Claim]:
    """Section 3.2.6: the configurator."""
    text = " ".join(stored_page("serving/sparse_degradation").split())
    rows = stored_json("serving/sparse_degradation")["rows"]
    kl = text.partition("predictions of the divergence are ")[2].partition("% off")[0]
    lost = text.partition("those of lost needles ")[2].partition("%")[0]
    errors = int(kl) / 100, int(lost) / 100
    within = [row["kl"] <= row["most_kl"] for row in rows]
    within += [row["recall_loss"] <= row["most_recall_loss"] for row in rows]
    return [
        Claim(
            "Section 3.2.6: accuracy of the regression on degradation",
            "96% on the test set",
            f"held-out prompts: predicted divergence {errors[0]:.0%} off in the median, lost "
            f"needles {errors[1]:.0%}; a margin is added to what is predicted",
            differs(
                f"{1 - errors[0] - 0.96:+.0%} and {1 - errors[1] - 0.96:+.0%}",
                "12 prompts calibrate here, 12,564 samples there",
            ),
            BOUNDS,
        ),
        Claim(
            "Eq. 8: least TTFT within a bound on degradation",
            "a regression, trained for 5 hours on 35,289 samples",
            f"all {len(rows)} bounds hold on prompts that were not measured; the choice equals "
            "the best of all",
            holds(all(within), "broken bounds", "the calibration is too small"),
            f"{BOUNDS}; {tests('schedule/test_configurator')}",
        ),
        Claim(
            "Eq. 9: least degradation within a TTFT",
            "a regression, trained for 4 hours on 29,762 samples",
            "`--max-ttft`: dynamic programming, nothing is trained",
            REPRODUCED,
            tests("schedule/test_configurator", "commands/test_chosen_sparsity"),
        ),
        Claim(
            "Section 5.3: TTFT and TBT over Oracle's, which has the best parameters",
            "1% to 3% and 2% to 4% higher",
            "0%: small problems are solved as well as by trying all choices",
            REPRODUCED,
            tests("schedule/test_configurator"),
        ),
        Claim(
            "Section 3.2.6: what is chosen",
            "levels, drop ratios and micro-partitions, after SP-NTP or SP-TP",
            "`--calibration` chooses ratios and micro-partitions of csps; `auto` chooses between "
            "pass-KV and pass-Q, and with split weights between SP-NTP and SP-TP",
            missing("one choice among csps, rings, chains and head scatter"),
            tests("commands/test_chosen_sparsity", "inference/test_strategy_choice"),
        ),
        *quality(),
    ]


def quality() -> list[Claim]:
    """What dropped keys do to answers."""
    dense, *sparse = stored_json("serving/sparse_quality")
    a_fifth = next(each for each in sparse if each["drop"] == 0.2)
    far = [distance for distance in dense["recalled"] if int(distance) > 256]
    longer = a_fifth["perplexity"] / dense["perplexity"]
    before, after = ([of["recalled"][distance] for distance in far] for of in (dense, a_fifth))
    lost = max(x - y for x, y in zip(before, after, strict=True))
    return [
        Claim(
            "Section 3.2.4: dropped distant tokens have little impact on quality",
            "little; no figure",
            "a small model with p = 0.2: perplexity "
            f"{longer:.3f} times as high, recall of needles on other nodes {span(after, '.0%')}, "
            f"without dropping {span(before, '.0%')}",
            holds(
                longer < 1.01 and lost < 0.05,
                f"{lost:.0%} of the needles' tokens at most",
                "p = 0.2 keeps two fifths of the other nodes' keys, and the model has two layers "
                "that find a needle",
            ),
            QUALITY,
        ),
        Claim(
            "Section 3.1: quality on NeedleBench and BookCorpus",
            "accuracy of models of 7B and 9B",
            "needles by distance and perplexity by kept share of a small model that was trained "
            "for it",
            not_possible("the paper's models need GPUs"),
            f"{QUALITY}; {BOUNDS}",
        ),
    ]


def ratios(one_way: str, other: str, phase: str) -> list[float]:
    """Ratios of two rows of the paper's Table 4."""
    both = ROWS[f"{one_way} ({phase})"], ROWS[f"{other} ({phase})"]
    return [x / y for x, y in zip(*both, strict=True)]


def rest() -> list[Claim]:
    """Sections 4 and 5: decoding, and the evaluation."""
    glm, intern = (MODELS[name].attention_shape() for name in ("GLM-4", "InternLM2.5"))
    bytes_of = [1_000_000 * each.kv_row_bytes / each.q_row_bytes for each in (glm, intern)]
    prefill = ratios("CSPS", "Sarathi-Serve", "prefill")
    decode = ratios("CSPS", "Sarathi-Serve", "decode")
    oracle = ratios("CSPS", "Oracle", "decode")
    layouts = [ratios("CSPS-NTP", "CSPS-TP", each) for each in ("prefill", "decode")]
    mixed, apart = of_vllm("TP 8, alone"), of_vllm("TP 4, 4 prefill ranks")
    ways = stored_table("serving/layouts", "ranks", "way")
    cpu = [
        number(one(ways, ranks=ranks, way="sp-ntp")["over pass-kv"])
        / number(one(ways, ranks=ranks, way="sp-tp")["over pass-kv"])
        for ranks in ("2", "4")
    ]
    return [
        Claim(
            "Figures 10 and 11, O3: decodes in the iterations of SP prefills",
            "TBT 0.4 s to 6.7 s, throughput 357 to 5 tokens/s",
            f"TBT at P99 {mixed[1]:.1f} ms beside prefills, {apart[1]:.1f} ms apart, simulated",
            differs("the setting", "8 H100s, Llama 8B; the effect is the same"),
            VLLM,
        ),
        Claim(
            "Table 3, O4: sending a query or all keys and values of 1M tokens, a layer",
            "1 ms and 1173 ms (GLM-4), 1 ms and 1085 ms (InternLM2.5)",
            f"keys and values have {bytes_of[0]:,.0f} (GLM-4) and {bytes_of[1]:,.0f} (InternLM2.5) "
            "times the bytes of a query",
            differs(
                "the models' order",
                "InternLM2.5 has four times the heads of keys, and takes less time in the paper; "
                "that a query is far smaller is reproduced",
            ),
            "`distca/cost/volume.py`; " + tests("runtime/serving/test_decode_exchange"),
        ),
        Claim(
            "Figures 12 and 13: decoding over distributed keys, long and short requests together",
            "queries are broadcast, partial outputs are merged",
            "pass-Q in one step for all sequences, long and short; exact",
            REPRODUCED,
            tests("runtime/serving/test_decode_exchange", "inference/test_mixed_requests"),
        ),
        Claim(
            "Section 4.2: what was dropped in prefills makes decoding cheaper",
            "it helps",
            "decoding attends to all keys",
            missing("decoding with kept keys only"),
            "[strategies](../../../docs/inference_strategies.md#csps-drop-far-keys)",
        ),
        Claim(
            "Figures 14 to 16: TTFT, TBT and response time over Sarathi-Serve's",
            "6.1 to 7.5, 1.6 to 1.92 and 8.3 to 9.8 times less",
            "only prompts alone are simulated, see the abstract's row",
            not_possible(QUEUES),
            CLUSTERS,
        ),
        Claim(
            "Figures 14 to 16: SP-NTP over SP-TP",
            "SP-NTP has 1.32 to 1.51 times the TTFT, and is said to be more efficient",
            f"CPU seconds of SP-NTP over SP-TP: {span(cpu)}",
            differs("the sign", "the paper's sentence contradicts its figures and its Table 4"),
            LAYOUTS,
        ),
        Claim(
            "Table 4: throughput of prefill and decode",
            "text: 7.1 to 8.2 and 4.3 to 5.2 times Sarathi-Serve's; 2% below Oracle; SP-NTP 23% to "
            "35% above SP-TP",
            f"from the table's rows: {span(prefill)} and {span(decode)} times; {span(oracle)} "
            f"times Oracle's in decode; SP-NTP over SP-TP {span(layouts[0])} in prefill, "
            f"{span(layouts[1])} in decode",
            not_possible(f"the text doesn't follow from the rows, and {QUEUES}"),
            CLUSTERS,
        ),
        Claim(
            "Figure 17: request rate at equal latency",
            "1.6 to 2.5 times Sarathi-Serve's",
            "no strategy that drops keys is simulated under load",
            missing("csps under rising load"),
            "`distca simulate --serving --trace short` has other strategies",
        ),
    ]

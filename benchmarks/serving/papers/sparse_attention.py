"""Claims of CSPS on sparse attention and its pipeline: Sections 3.2.4 and 3.2.5."""

from __future__ import annotations

from benchmarks.claims import Claim, number, span, stored_json, stored_table
from benchmarks.serving.csps_clusters import MODELS
from benchmarks.serving.papers.verdicts import (
    NO_CLAIM,
    REPRODUCED,
    differs,
    made_by,
    missing,
    page,
    tests,
)
from distca.schedule.serving.csps import Sparsity

CLUSTERS = made_by("csps_clusters")
SLOW = made_by("sparse_slow_link", "--rounds 3 --output DIR", "sparse_prefill")
BOUNDS = made_by("sparse_degradation")


def slow_links() -> dict[str, dict[str, str]]:
    """Measured prefills on a slow link, by strategy."""
    rows = stored_table("serving/sparse_slow_link", "Mbit/s", "strategy")
    return {row["strategy"]: row for row in rows}


def sparse_attention() -> list[Claim]:
    """Section 3.2.4: communication-efficient sparse attention."""
    kept = Sparsity.of_drop_ratio(0.2, 3, 1).keys[1][0]
    rows = stored_json("serving/sparse_degradation")["rows"]
    lossless = min(
        (row for row in rows if row["recall_loss"] == 0), key=lambda row: row["between_ranks"]
    )
    dense = rows[0]
    links = slow_links()
    title = "MB of the rank that sends most"
    sent = {name: number(row[title]) for name, row in links.items()}
    half = sent["csps, 4 partitions, p = 0.5"]
    clusters = stored_json("serving/csps_clusters")
    over_ring = [row["ring"] / row["dropped"] for row in clusters]
    contiguous = [row["ring"] / row["contiguous_dropped"] for row in clusters]
    alone = {
        (row["dropped"], row["share of level 1"]): row
        for row in stored_table("serving/sparse_degradation", "dropped", "share of level 1")
    }
    keys, queries = (number(alone[name, "20%"]["divergence, nats"]) for name in ("keys", "queries"))
    return [
        Claim(
            "Figures 6 and 7: levels by proximity (GPU, server, rack), near tokens on near GPUs",
            "overlapping segments; a token counts in each level that it is in",
            "disjoint levels: a key is in one level, as seen from the query; in zigzag within a "
            "node",
            differs(
                "disjoint levels",
                "overlapping ones are not exact even if nothing is dropped; contiguous parts leave "
                "the last rank twice the mean work",
            ),
            tests("schedule/test_sparsity", "runtime/serving/test_kept_call"),
        ),
        Claim(
            "Figure 8: data of several levels travels once to each destination",
            "remaining tokens of the farther level are among those of the nearer",
            "each kept key travels once, as levels are disjoint; sent bytes equal the plan's",
            REPRODUCED,
            tests("simulate/test_near_to_far"),
        ),
        Claim(
            "Section 3.2.4: share kept in farther levels, 1 - p = (1 - p') / 2ⁿ",
            "inversely proportional to distance",
            f"p = 0.2 keeps {', '.join(f'{share:g}' for share in kept)} of the levels",
            differs(
                "the formula's sense",
                "as printed, far levels would keep more than all; (1 - p') = (1 - p) / 2ⁿ does "
                "what the text says",
            ),
            tests("schedule/test_sparsity"),
        ),
        Claim(
            "Section 3.2.4: which tokens are dropped",
            "those of least attention in the previous layer, by head; first and last layer dense",
            "the same; scores are those of a rank's last 64 queries",
            REPRODUCED,
            tests("runtime/serving/test_kept_call"),
        ),
        Claim(
            "Eq. 5: outputs of levels, weighted by softmax denominators",
            "sum of z O over sum of z",
            "the same sum by LSE, since the denominators themselves overflow; nothing dropped is "
            "dense attention within rounding",
            REPRODUCED,
            tests("runtime/serving/test_kept_call", "attention/test_merge"),
        ),
        Claim(
            "Sections 1, 3.2.4 and 5.3: what is dropped without loss of accuracy",
            "22% of tokens, 19% of communication time, 28% of computation time",
            f"without a lost needle {1 - lossless['between_ranks']:.1%} of the keys, and "
            f"{1 - lossless['seconds'] / dense['seconds']:.1%} of the simulated time",
            differs(
                f"{1 - lossless['between_ranks'] - 0.22:+.0%} of the tokens",
                "the model here has four layers, two of them dense, and was trained for minutes; "
                "the bound is on needles and divergence, not on a benchmark's accuracy",
            ),
            BOUNDS,
        ),
        Claim(
            "Section 3.2.4: dropping saves communication (SP-NTP's first all-to-all)",
            "less data over slow paths",
            f"keys alone travel: {sent['csps, 4 partitions, dense']:g} MB of the busiest rank with "
            f"all keys, {half:g} with p = 0.5, {sent['sp-ntp']:g} with SP-NTP",
            missing(
                "SP-NTP that sends kept rows only; csps sends keys and values instead of heads, "
                "and fewer bytes than SP-NTP even if it drops nothing"
            ),
            SLOW,
        ),
        Claim(
            "Section 3.2.4: sparse attention in SP-TP",
            "less computation, the same communication",
            "csps works with tensor-parallel ranks that share a prompt with others; `sp-tp` "
            "attends to all keys",
            missing("`--prefill-strategy sp-tp` that drops far keys"),
            tests("prefill/test_tensor_parallel_ranks"),
        ),
        Claim(
            "Section 3.2.4: gain of dropping",
            "not given alone",
            f"p = 0.2, simulated: {span(over_ring)} times as fast as a dense ring, with the "
            f"paper's contiguous parts {span(contiguous)} times",
            differs(
                "zigzag parts",
                "contiguous parts lose to a dense ring in most rows; the paper compares with "
                "chunks alone",
            ),
            CLUSTERS,
        ),
        Claim(
            "Section 3.2.4: dropped queries",
            "Q of unimportant tokens is dropped, too, and its output filled with 0",
            f"`--sparsity P,Q`: 20% of level 1's queries cost {queries:g} nats, of its keys "
            f"{keys:g}",
            differs(
                "the default",
                "queries don't travel here, so to drop them saves no bytes; keys alone are dropped",
            ),
            BOUNDS,
        ),
        Claim(
            "Section 3.2.4: hierarchical all-gather and reduce-scatter of SP-TP",
            "a row goes once to each other server",
            "the same, by links of all ranks of a node",
            REPRODUCED,
            tests("schedule/test_layouts", "runtime/serving/test_sequence_exchange"),
        ),
    ]


def pipelining() -> list[Claim]:
    """Section 3.2.5: three phases."""
    links = slow_links()

    def exposed(name: str) -> float:
        return number(links[name]["TTFT, s"]) / number(links[name]["compute plus link"])

    shape = MODELS["GLM-4"].attention_shape()
    states = shape.lse_row_bytes / (shape.q_row_bytes + shape.kv_row_bytes)
    predicted = [
        number(row["simulated TTFT, s"]) / number(row["TTFT, s"]) - 1
        for name, row in links.items()
        if name.startswith("csps")
    ]
    returned = stored_table("serving/ring_slow_link", "ranks", "strategy")
    of_queries = [row for row in returned if row["strategy"] == "pass-q"]
    ours = [number(row["wall, in steps over signal"]) for row in of_queries]
    apart = [number(row["single-stream over signal"]) for row in of_queries]
    four = exposed("csps, 4 partitions, dense")
    return [
        Claim(
            "Section 3.2.5: softmax denominators over QKV, in bytes",
            "below 0.1%, 1 / (3 S)",
            f"{states:.2%} of GLM-4's rows: an LSE of 4 bytes for each head",
            differs(
                f"a factor of {states / 0.001:.0f}",
                "the paper takes S x S elements for the rows of a head, which are S x 128",
            ),
            "`distca/cost/volume.py`",
        ),
        Claim(
            "Figure 9(a): three-phase pipeline of SP-NTP in micro-partitions",
            "first all-to-all, attention and second all-to-all overlap",
            f"csps runs two phases on processes: with 4 micro-partitions {four:.2f} times "
            "the sum of compute and link time. SP-NTP, not cut, "
            f"{exposed('sp-ntp'):.2f} times. Pass-Q, whose outputs return, takes {span(ours)} "
            f"times as long as with free exchanges in overlapping steps, and {span(apart)} "
            "without overlap",
            differs(
                "one phase",
                "outputs are at home where queries are, so that csps has no third phase; a "
                "pipeline of SP-NTP's heads is missing",
            ),
            f"{SLOW}; {page('ring_slow_link')}",
        ),
        Claim(
            "Figure 9(b): pipeline of SP-TP in micro-partitions",
            "all-gather and reduce-scatter overlap with the layers",
            f"SP-TP takes {exposed('sp-tp'):.2f} times the sum of compute and link time",
            missing("micro-partitions of `sp-tp`"),
            SLOW,
        ),
        Claim(
            "Section 3.2.6, Eqs. 6 and 7: TTFT by a simulated pipeline",
            "no error is given",
            f"simulated over measured TTFT of csps: {span(predicted, '+.0%')}, the most with 32 "
            "micro-partitions",
            NO_CLAIM,
            SLOW,
        ),
    ]

"""Times of prefills and decoded tokens that four papers publish, with their places in the papers.

Numbers are as printed. `PAPERS` has the titles. Of "Meta" a digest of the paper is at hand, which
leaves out some tables: `UNUSED` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from distca.schedule.serving.cdsp import TABLE_1

PAPERS = {
    "KV-Runahead": "Scalable Causal LLM Inference by Parallel Key-Value Cache Generation (2024)",
    "Tetris": "Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism",
    "Meta": "Context Parallelism for Scalable Million-Token Inference (2024), by a digest",
    "CSPS": "A Communication-Efficient Sequence-Parallelism based Serving System",
}
K = 1024

Kind = Literal["chain", "all-gather", "pass-kv", "pass-q", "decode"]


@dataclass(frozen=True)
class Run:
    """A prefill or a decode step of a paper.

    Attributes:
        paper: one of `PAPERS`.
        model: name of the model.
        kind: what its ranks exchange, or that it decodes a token of each sequence.
        new: new tokens of a prompt; 1: a decoded token.
        cached: tokens before them.
        ranks: ranks that share tokens.
        tensor_parallel: GPUs of a rank.
        gb_per_s: speed of a GPU's slowest link in use, where the paper varies it; else 0.
        sequences: sequences.
    """

    paper: str
    model: str
    kind: Kind
    new: int
    cached: int = 0
    ranks: int = 1
    tensor_parallel: int = 1
    gb_per_s: float = 0.0
    sequences: int = 1

    @property
    def said(self) -> str:
        """Words for a table."""
        tokens = f"{self.new:,} tokens" if self.kind != "decode" else "a token"
        tokens += f" over {self.cached:,}" * (self.cached > 0)
        sizes = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        sizes += f" of {self.tensor_parallel} GPUs" * (self.tensor_parallel > 1)
        link = f", {self.gb_per_s:g} GB/s" if self.gb_per_s else ""
        return f"{self.model}, {tokens}, {self.kind}, {sizes}{link}"


@dataclass(frozen=True)
class Number:
    """A published time, or a ratio of two times.

    Attributes:
        place: table or figure of the paper.
        run: what was timed.
        value: seconds, or the ratio.
        over: the run whose time the ratio divides by; None: `value` is seconds.
        prompt: runs with the same one are configurations for the same work.
    """

    place: str
    run: Run
    value: float
    over: Run | None = None

    @property
    def prompt(self) -> tuple[object, ...]:
        run = self.run
        return run.paper, run.model, run.new, run.cached, run.sequences, self.over is None


@dataclass(frozen=True)
class Order:
    """A comparison that a paper makes: one run takes less time than another.

    Attributes:
        place: table, figure or section of the paper.
        faster, slower: the runs.
        fitted: whether the runs' own times are published nowhere, so that a fit may use the order.
    """

    place: str
    faster: Run
    slower: Run
    fitted: bool = False


FAST, SLOW, POOR = 300.0, 10.0, 1.0
_TIMES = {
    # By thousands of tokens: seconds with all-gathers and with a chain on 4 GPUs, then on 8.
    "Llama 7B": {
        1: (0.107, 0.097, 0.117, 0.098),
        2: (0.111, 0.100, 0.117, 0.103),
        4: (0.20, 0.17, 0.12, 0.11),
        8: (0.54, 0.41, 0.30, 0.22),
        12: (1.06, 0.76, 0.57, 0.41),
        16: (1.76, 1.24, 0.92, 0.65),
    },
    "Llama 13B": {
        1: (0.140, 0.126, 0.150, 0.129),
        2: (0.143, 0.131, 0.153, 0.131),
        4: (0.32, 0.29, 0.19, 0.16),
        8: (0.87, 0.68, 0.49, 0.36),
        12: (1.71, 1.25, 0.91, 0.66),
        16: (2.89, 2.05, 1.46, 1.05),
    },
    "Llama 30B": {1: (0.21, 0.20, 0.23, 0.19), 2: (0.28, 0.26, 0.24, 0.20)},
    "Falcon 1B": {
        1: (0.073, 0.061, 0.081, 0.066),
        2: (0.067, 0.060, 0.079, 0.065),
        4: (0.09, 0.07, 0.08, 0.06),
        8: (0.25, 0.19, 0.15, 0.10),
    },
    "Falcon 7B": {
        1: (0.107, 0.095, 0.119, 0.096),
        2: (0.117, 0.103, 0.118, 0.099),
        4: (0.28, 0.21, 0.18, 0.12),
        8: (0.78, 0.54, 0.47, 0.29),
    },
    "Llama 7B MQA": {
        1: (0.109, 0.102, 0.117, 0.101),
        2: (0.107, 0.102, 0.120, 0.101),
        4: (0.18, 0.14, 0.12, 0.10),
        8: (0.49, 0.37, 0.26, 0.18),
        12: (0.98, 0.70, 0.51, 0.35),
        16: (1.65, 1.16, 0.84, 0.57),
    },
    "Llama 7B GQA8": {
        1: (0.112, 0.102, 0.119, 0.101),
        2: (0.113, 0.102, 0.118, 0.103),
        4: (0.18, 0.15, 0.12, 0.11),
        8: (0.50, 0.38, 0.27, 0.19),
        12: (1.00, 0.72, 0.52, 0.36),
        16: (1.67, 1.16, 0.86, 0.59),
    },
}
SPEED_UPS = {
    # The tables' own ratios of all-gathers over chains, on 4 and on 8 GPUs.
    "Llama 7B": (1.11, 1.19, 1.11, 1.14, 1.17, 1.14, 1.30, 1.36, 1.39, 1.37, 1.42, 1.41),
    "Llama 13B": (1.12, 1.16, 1.09, 1.17, 1.12, 1.17, 1.27, 1.35, 1.36, 1.37, 1.41, 1.39),
    "Llama 30B": (1.08, 1.19, 1.06, 1.19),
    "Falcon 1B": (1.18, 1.23, 1.12, 1.23, 1.26, 1.21, 1.28, 1.58),
    "Falcon 7B": (1.12, 1.24, 1.13, 1.20, 1.30, 1.47, 1.46, 1.63),
    "Llama 7B MQA": (1.07, 1.17, 1.05, 1.18, 1.23, 1.18, 1.33, 1.44, 1.41, 1.45, 1.43, 1.48),
    "Llama 7B GQA8": (1.10, 1.18, 1.12, 1.15, 1.20, 1.15, 1.32, 1.42, 1.42, 1.42, 1.44, 1.46),
}
_ALONE = {1: 0.10, 2: 0.24, 4: 0.65, 8: 1.95, 12: 3.95}
_NETWORKS = {
    (SLOW, 2): (0.10, 0.16, 0.38, 0.99, 1.82),
    (SLOW, 4): (0.10, 0.19, 0.36, 0.72, 1.15),
    (POOR, 2): (0.11, 0.21, 0.84, 1.31, 2.28),
    (POOR, 4): (0.19, 0.35, 0.93, 2.06, 2.30),
}


def runahead(model: str, kind: Kind, thousands: int, gpus: int, speed: float = FAST) -> Run:
    """A run of KV-Runahead."""
    return Run(
        "KV-Runahead",
        model,
        kind,
        thousands * K,
        ranks=gpus,
        gb_per_s=speed if gpus > 1 else 0.0,
    )


def tetris(tokens: int, degree: int) -> Run:
    """A prefill of Tetris."""
    return Run("Tetris", "llama-8b", "pass-kv", tokens, ranks=degree)


def tetris_decode(ranks: int, tensor_parallel: int) -> Run:
    """A decode step of Tetris's Figure 2; how many sequences of how many tokens is ours."""
    return Run("Tetris", "llama-8b", "decode", 1, 32_000, ranks, tensor_parallel, sequences=8)


def meta(
    kind: Kind, new: int, cached: int, ranks: int, gpus: int = 8, gb_per_s: float = 0.0
) -> Run:
    """A run of Meta."""
    return Run("Meta", "llama-405b", kind, new, cached, ranks, gpus, gb_per_s)


TURN_TOKENS = 128_000
_RING: tuple[Kind, ...] = ("pass-kv", "pass-q")
_CHAIN: tuple[tuple[Kind, int], ...] = (
    *(("all-gather", 4), ("chain", 4)),
    *(("all-gather", 8), ("chain", 8)),
)
_TURNS = {3200: (1.110, 1.046), 6400: (1.305, 1.302), 12_800: (2.081, 2.205)}
_META = (
    *(
        Number("Table 4", meta(kind, new, TURN_TOKENS - new, 4), seconds)
        for new, both in _TURNS.items()
        for kind, seconds in zip(_RING, both, strict=True)
    ),
    *(
        Number(place, meta("pass-kv", TURN_TOKENS, 0, nodes), seconds)
        for place, nodes, seconds in (
            ("Table 6", 1, 42.0),
            ("Table 6", 2, 21.0),
            ("Figure 6a", 8, 5.85),
            ("Figure 8", 16, 3.8),
        )
    ),
    Number("Figure 8", meta("pass-kv", 1_000_000, 0, 16), 77.0),
    Number("Section 1", meta("pass-kv", 1_000_000, 0, 1), 1200.0),
    *(
        Number(
            "Figure 7",
            meta("pass-kv", TURN_TOKENS, 0, 1, 8 * nodes),
            ratio,
            meta("pass-kv", TURN_TOKENS, 0, nodes),
        )
        for nodes, ratio in ((2, 1.15), (8, 2.0))
    ),
    Number("Table 6", meta("decode", 1, 8000, 1), 0.044),
    *(
        Number("Table 7", meta("decode", 1, TURN_TOKENS, nodes), seconds)
        for nodes, seconds in ((1, 0.04626), (2, 0.06023), (4, 0.07131))
    ),
)
_RUNAHEAD = (
    *(
        Number(
            "Table 2" if "QA" in model else "Table 1", runahead(model, kind, each, gpus), seconds
        )
        for model, times in _TIMES.items()
        for each, row in times.items()
        for (kind, gpus), seconds in zip(_CHAIN, row, strict=True)
    ),
    *(
        Number("Table 3", runahead("Llama 7B", "chain", each, 1), seconds)
        for each, seconds in _ALONE.items()
    ),
    *(
        Number("Table 3", runahead("Llama 7B", "chain", each, gpus, speed), seconds)
        for (speed, gpus), row in _NETWORKS.items()
        for each, seconds in zip(_ALONE, row, strict=True)
    ),
)
_TETRIS = tuple(
    Number("Table 1", tetris(each.tokens, each.degree), each.seconds) for each in TABLE_1
)

NUMBERS: tuple[Number, ...] = (*_RUNAHEAD, *_TETRIS, *_META)
"""All published numbers that a simulation can be held against."""

_8, _16, _32 = (meta("decode", 1, TURN_TOKENS, 1, gpus) for gpus in (8, 16, 32))
_DECODES = [tetris_decode(*sizes) for sizes in ((1, 8), (1, 4), (1, 2), (1, 1))]
_SHARED = [tetris_decode(*sizes) for sizes in ((1, 8), (2, 4), (4, 2), (8, 1))]
ORDERS: tuple[Order, ...] = (
    # Nowhere are times of these: a fit may use the orders.
    Order("Section 4.3", _8, _16, fitted=True),
    Order("Section 4.3", _8, _32, fitted=True),
    Order("Section 4.3", _16, meta("decode", 1, TURN_TOKENS, 2), fitted=True),
    Order("Section 4.3", _32, meta("decode", 1, TURN_TOKENS, 4), fitted=True),
    *(Order("Figure 2a", *pair) for pair in pairwise(_DECODES)),
    *(Order("Figure 2b", *pair) for pair in pairwise(_SHARED)),
)


def speed_up(model: str, thousands: int, gpus: int, speed: float = FAST) -> tuple[Run, Run]:
    """Runs of KV-Runahead whose ratio is the chain's speed-up over all-gathers."""
    ways: tuple[Kind, Kind] = ("all-gather", "chain")
    first, second = (runahead(model, kind, thousands, gpus, speed) for kind in ways)
    return first, second


UNUSED = (
    (
        "Meta, Section 1",
        "about 60 s for 128K tokens on one node",
        "contradicts the 42 s of Table 6, which is used",
    ),
    (
        "Meta, Appendix A",
        "93% parallel efficiency with 1M tokens on 16 nodes",
        "follows from 1,200 s and 77 s within rounding (97%), which are used; the paper derives it "
        "from a FLOP count",
    ),
    (
        "Meta, Table 4",
        "shares of new tokens other than 2.5%, 5% and 10%",
        "the digest has no others",
    ),
    ("Meta, Tables 5 and 8", "microseconds of each exchange and kernel", "the digest has none"),
    (
        "Meta, Table 6",
        "60 to 66 ms a decoded token on 2 nodes, 8K to 128K tokens",
        "a range without its places: 60.23 ms, its lower end, is that of the most tokens (Table 7)",
    ),
    (
        "Meta, Figure 6b",
        "the network of 100 Gb/s scales as that of 400 Gb/s up to 4 nodes",
        "no numbers in the digest; the order is below",
    ),
    (
        "Meta, Table 7",
        "times with tensor parallelism of 16 and 32",
        "the digest says only that both are longer than with 8, and shorter than with 2 and 4 "
        "nodes of context parallelism",
    ),
    (
        "KV-Runahead, Table 2",
        "GQA8, 12K tokens on 4 GPUs: chains are 1.42 times as fast",
        "contradicts the paper's own times, 1.00 s over 0.72 s; the times are used",
    ),
    (
        "KV-Runahead, Figure 8, captions",
        "1.79 times for 8K tokens (e) and 1.57 times for 16K (f) at 10 GB/s",
        "the same figure's title says 1.55 times (4 GPUs, 8K) and 1.79 times (4 GPUs, 12K), "
        "Section 5 has no times of all-gathers at 10 GB/s",
    ),
    (
        "KV-Runahead, Figure 11",
        "all-gathers lose more than 10% on a noisy network, chains up to 3.7%",
        "the paper does not say how much traffic the noise is: runahead.md halves single links",
    ),
    (
        "KV-Runahead, Table 3",
        "4K tokens on 2 GPUs at 1 GB/s: 0.84 s",
        "used, though a searched partition cannot be slower than one GPU (0.65 s), nor than a "
        "chain that gives all tokens to one",
    ),
    (
        "Tetris, Figure 2",
        "decode steps take up to 5.73, 3.87 and 1.93 times as long with TP 1, 2 and 4 as with 8, "
        "and up to 1.83, 1.41 and 1.15 times with SP 8, 4 and 2",
        "largest values of a figure; the text gives neither batches nor lengths: orders alone",
    ),
    (
        "Tetris, Figures 8 to 13",
        "times to the first token under load",
        "of traces that are not published: cdsp_capacity.md",
    ),
    (
        "Tetris, Figure 14",
        "moving cached rows costs up to 1.8%",
        "cache_balancing.md simulates it",
    ),
    (
        "CSPS, Figures 2 and 3",
        "Sarathi-Serve: first tokens after 1.6 to 213 s, 0.54 to 9.6 s a token, 487 to 191 "
        "prefilled tokens/s",
        "1M tokens in 213 s are 4,700 tokens/s, and 3,900 chunks of 256 tokens in 213 s are 55 ms "
        "each, where a token takes 9.6 s: averages under load of an unknown mix",
    ),
    (
        "CSPS, Table 3",
        "1,173 and 984 ms to move a layer's keys and values of 1M and 406K tokens",
        "2.5 times the bytes in 1.2 times the time: no link does that",
    ),
    (
        "CSPS, Table 4",
        "prefilled and decoded tokens/s of five systems",
        "averages under load; its text contradicts its rows: csps_clusters.md",
    ),
    (
        "CSPS, Figure 5",
        "communication is 13% to 34% of a first token's time with SP-NTP, and 39% to 62% with "
        "SP-TP",
        "ranges over lengths and numbers of GPUs that the text does not give",
    ),
)
"""What the papers say that no simulation here is fitted to or judged by: place, what, and why."""

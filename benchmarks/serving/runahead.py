"""KV-Runahead's chains beside all-gathers, simulated, and what its paper measured.

    python benchmarks/serving/runahead.py --output benchmarks/results/serving

The costs of Llama 7B are fitted to the paper's times on one GPU (Table 3), those of other models to
its times with all-gathers on 4 GPUs from 4k tokens on (Tables 1 and 2), less the exchange. Chains,
even and searched, and all-gathers are then simulated by
`distca/simulate/serving/prefill_chain.py` with the paper's kernels, which compute products with
later keys, too. What partitions leave for decoding is simulated on H100s. Writes `runahead.md`,
and prints it.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from distca.cost.model_sizes import MODELS
from distca.plan import Mask, Placement
from distca.plan.span import Int64s
from distca.schedule.serving import (
    held_after,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.blocks import BlockPool, PrefixCache, SequenceBlocks
from distca.schedule.serving.moves import BlockTransfer, Mover
from distca.schedule.serving.partitions import (
    Chain,
    PartitionTable,
    cut_prompt,
    even_shares,
    search_partition,
)
from distca.simulate import CLUSTERS
from distca.simulate.serving import (
    PREFILL_OVERHEADS,
    SHARED_DECODE_OVERHEADS,
    InferenceCosts,
    searched_shares,
    simulate_block_moves,
    simulate_step,
)
from distca.simulate.serving.prefill_chain import ChainCosts, fit_alone

K = 1024
FINEST = 64
STRIPE = 16
FAST, SLOW, POOR = 300.0, 10.0, 1.0
"""Gigabytes a second of the paper's three networks."""

ALONE = {1: 0.10, 2: 0.24, 4: 0.65, 8: 1.95, 12: 3.95}
"""Table 3: seconds of Llama 7B on one GPU, by thousands of tokens."""
SLOW_NETWORKS = {
    (SLOW, 2): {1: 0.10, 2: 0.16, 4: 0.38, 8: 0.99, 12: 1.82},
    (SLOW, 4): {1: 0.10, 2: 0.19, 4: 0.36, 8: 0.72, 12: 1.15},
    (POOR, 2): {1: 0.11, 2: 0.21, 4: 0.84, 8: 1.31, 12: 2.28},
    (POOR, 4): {1: 0.19, 2: 0.35, 4: 0.93, 8: 2.06, 12: 2.30},
}
"""Table 3: seconds of Llama 7B's searched chains, by speed of the network and number of GPUs."""


@dataclass(frozen=True)
class Published:
    """Times of a model in Tables 1 and 2, seconds to the first token at 300 GB/s.

    Attributes:
        layers: layers of the model.
        kv_bytes: bytes of a token's keys and values in one layer, in 16 bits.
        times: by GPUs and thousands of tokens, seconds with all-gathers and with a searched chain.
    """

    layers: int
    kv_bytes: int
    times: dict[int, dict[int, tuple[float, float]]]


PUBLISHED = {
    "Llama 7B": Published(
        32,
        2 * 2 * 4096,
        {
            4: {4: (0.20, 0.17), 8: (0.54, 0.41), 12: (1.06, 0.76), 16: (1.76, 1.24)},
            8: {4: (0.12, 0.11), 8: (0.30, 0.22), 12: (0.57, 0.41), 16: (0.92, 0.65)},
        },
    ),
    "Llama 13B": Published(
        40,
        2 * 2 * 5120,
        {
            4: {4: (0.32, 0.29), 8: (0.87, 0.68), 12: (1.71, 1.25), 16: (2.89, 2.05)},
            8: {4: (0.19, 0.16), 8: (0.49, 0.36), 12: (0.91, 0.66), 16: (1.46, 1.05)},
        },
    ),
    "Falcon 1B": Published(
        24,
        2 * 2 * 2048,
        {4: {4: (0.09, 0.07), 8: (0.25, 0.19)}, 8: {4: (0.08, 0.06), 8: (0.15, 0.10)}},
    ),
    "Falcon 7B": Published(
        32,
        2 * 2 * 64,
        {4: {4: (0.28, 0.21), 8: (0.78, 0.54)}, 8: {4: (0.18, 0.12), 8: (0.47, 0.29)}},
    ),
    "Llama 7B, one kv head": Published(
        32,
        2 * 2 * 128,
        {
            4: {4: (0.18, 0.14), 8: (0.49, 0.37), 12: (0.98, 0.70), 16: (1.65, 1.16)},
            8: {4: (0.12, 0.10), 8: (0.26, 0.18), 12: (0.51, 0.35), 16: (0.84, 0.57)},
        },
    ),
    "Llama 7B, 8 kv heads": Published(
        32,
        2 * 2 * 8 * 128,
        {
            4: {4: (0.18, 0.15), 8: (0.50, 0.38), 12: (1.00, 0.72), 16: (1.67, 1.16)},
            8: {4: (0.12, 0.11), 8: (0.27, 0.19), 12: (0.52, 0.36), 16: (0.86, 0.59)},
        },
    ),
}


def llama(ranks: int, gb_per_s: float = FAST) -> ChainCosts:
    """Costs of Llama 7B, fitted to the times of one GPU."""
    token, product = fit_alone([each * K for each in ALONE], [*ALONE.values()])
    published = PUBLISHED["Llama 7B"]
    links = (gb_per_s,) * (ranks - 1)
    return ChainCosts(token, product, published.layers, published.kv_bytes, links)


def costs_of(name: str, ranks: int) -> ChainCosts:
    """Costs of a model in Tables 1 and 2."""
    if name == "Llama 7B":
        return llama(ranks)
    published = PUBLISHED[name]
    links = (FAST,) * 3
    free = ChainCosts(0.0, 0.0, published.layers, published.kv_bytes, links)
    times = {K * each: gather for each, (gather, _) in published.times[4].items()}
    alone = [4 * (seconds - free.all_gather_seconds(each)) for each, seconds in times.items()]
    token, product = fit_alone([*times], alone)
    return replace(
        free, token_seconds=token, product_seconds=product, gb_per_s=(FAST,) * (ranks - 1)
    )


def searched(costs: ChainCosts, tokens: int) -> Int64s:
    """The searched partition, int64 `[ranks]`."""
    return search_partition(tokens, costs.ranks, costs.chain_seconds, FINEST)


def seconds(costs: ChainCosts, parts: Int64s) -> float:
    """Seconds of a partition."""
    return float(costs.chain_seconds(parts[None])[0])


def alone_text() -> list[str]:
    """The fit to one GPU, and the partition of 10k tokens."""
    costs = llama(4)
    rows = [
        f"| {each}k | {measured:.2f} | {costs.alone(K * each):.3f} "
        f"| {costs.alone(K * each) / measured - 1:+.1%} |"
        for each, measured in ALONE.items()
    ]
    found = searched(costs, 10 * K) / (10 * K)
    shares = ", ".join(f"{share:.3f}" for share in found)
    worst = np.abs(found - [0.350, 0.255, 0.210, 0.185]).max()
    return [
        "## Llama 7B on one GPU (Table 3), and the partition of 10k tokens",
        "",
        "| tokens | measured, s | fit, s | error |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        f"Searched partition of 10k tokens over 4 ranks: [{shares}], published [0.350, 0.255, "
        f"0.210, 0.185]: at most {worst:.4f} apart.",
        "",
    ]


def speed_ups_text() -> list[str]:
    """Speed-ups over all-gathers, beside Tables 1 and 2."""
    rows = []
    for name, published in PUBLISHED.items():
        for ranks, times in published.times.items():
            costs = costs_of(name, ranks)
            for each, (gather, chain) in times.items():
                tokens = K * each
                best = seconds(costs, searched(costs, tokens))
                even = seconds(costs, cut_prompt(tokens, even_shares(ranks)))
                ours, theirs = costs.all_gather_seconds(tokens) / best, gather / chain
                rows.append(
                    f"| {name} | {ranks} | {each}k | {costs.all_gather_seconds(tokens):.3f} "
                    f"({gather:.2f}) | {best:.3f} ({chain:.2f}) | {even / best:.2f} "
                    f"| {costs.lower_bound(tokens):.3f} | {ours:.2f} | {theirs:.2f} "
                    f"| {ours / theirs - 1:+.0%} |"
                )
    return [
        "## Speed-ups over all-gathers at 300 GB/s (Tables 1 and 2)",
        "",
        "Seconds are simulated, in brackets the paper's. *Even* is an even chain's time over the "
        "searched one's; *bound* that of Eqs. 1 to 3, with the linear layers.",
        "",
        "| model | GPUs | tokens | all-gather, s | searched chain, s | even | bound, s | speed-up "
        "| published | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def slow_text() -> list[str]:
    """Slow networks, beside Table 3."""
    rows = []
    for (speed, ranks), times in SLOW_NETWORKS.items():
        costs = llama(ranks, speed)
        for each, measured in times.items():
            tokens = K * each
            parts = searched(costs, tokens)
            best, gather = seconds(costs, parts), costs.all_gather_seconds(tokens)
            choice = "chain" if parts[1] else "one GPU"
            theirs = "chain" if measured < ALONE[each] else "one GPU"
            rows.append(
                f"| {speed:g} GB/s | {ranks} | {each}k | {best:.2f} | {measured:.2f} "
                f"| {best / measured - 1:+.0%} | {gather:.2f} | {choice} | {theirs} |"
            )
    return [
        "## Slow networks (Table 3)",
        "",
        "| network | GPUs | tokens | searched chain, s | published, s | error | all-gather, s "
        "| faster here | published |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "The model has the stated speed for every message and none of the calls' overheads, which "
        "the paper does not give: its chains are slower than this on short prompts. At 1 GB/s its "
        "12k tokens over 4 GPUs took 2.30 s, less than the last link needs for the rows of the "
        f"partition that is best here: {_last_link_gigabytes(12, 4):.2f} GB.",
        "",
    ]


def _last_link_gigabytes(thousands: int, ranks: int) -> float:
    costs = llama(ranks, POOR)
    parts = searched(costs, K * thousands)
    return float(parts[:-1].sum()) * costs.kv_bytes * costs.layers / 1e9


def interpolated_text() -> list[str]:
    """Interpolated partitions (Figure 10), and single links at half speed (Figure 11)."""
    rows = []
    for ranks in (4, 8):
        costs = llama(ranks)
        known = {K * each: searched(costs, K * each) / (K * each) for each in (8, 16)}
        table = PartitionTable(
            "Llama 7B",
            "A100",
            ranks,
            {each: tuple(map(float, found)) for each, found in known.items()},
        )
        for each in (10, 12, 14):
            tokens = K * each
            looked_up = seconds(costs, cut_prompt(tokens, table.at(tokens)))
            best = seconds(costs, searched(costs, tokens))
            rows.append(f"| {ranks} | {each}k | {best:.3f} | {looked_up / best - 1:+.2%} |")
    return [
        "## Interpolated partitions (Figure 10)",
        "",
        "Searched at 8k and 16k tokens, interpolated between.",
        "",
        "| GPUs | tokens | searched, s | interpolated |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def noisy_text() -> list[str]:
    """Single links at half speed (Figure 11)."""
    noisy = []
    for speed in (FAST, SLOW):
        for ranks in (4, 8):
            costs = llama(ranks, speed)
            parts = searched(costs, 8 * K)
            gather = costs.all_gather_seconds(8 * K)
            chains, known, gathers = [], [], []
            for slow in range(ranks - 1):
                speeds = list(costs.gb_per_s)
                speeds[slow] /= 2
                hurt = replace(costs, gb_per_s=tuple(speeds))
                chains.append(seconds(hurt, parts) / seconds(costs, parts) - 1)
                again = seconds(hurt, searched(hurt, 8 * K))
                known.append(again / seconds(costs, parts) - 1)
                gathers.append(hurt.all_gather_seconds(8 * K) / gather - 1)
            noisy.append(
                f"| {speed:g} GB/s | {ranks} | {np.mean(chains):+.1%} | {max(chains):+.1%} "
                f"| {np.mean(known):+.1%} | {max(known):+.1%} | {np.mean(gathers):+.1%} |"
            )
    return [
        "## One link at half its speed (Figure 11), 8k tokens",
        "",
        "*Known*: the partition is searched for these links.",
        "",
        "| network | GPUs | chain, mean over links | worst link | known, mean | worst link "
        "| all-gather |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *noisy,
        "",
        "A chain's last links carry the most rows. Where links have room to spare a slow one costs "
        "nothing; where they are the limit, a slow last link costs a chain that was searched "
        "without it more than an all-gather. Searched for the links as they are, a chain loses "
        "less on average.",
        "",
    ]


def decode_text() -> list[str]:
    """Rows that partitions leave with ranks, and what moving them costs and gains."""
    costs = InferenceCosts(
        MODELS["llama-8b"],
        CLUSTERS["dgx-h100"],
        overheads=PREFILL_OVERHEADS,
        decode_overheads=SHARED_DECODE_OVERHEADS,
    )
    cost_model = costs.cluster.inference_cost(costs.shape)
    rows = []
    for ranks, thousands, sequences in itertools.product((4, 8), (32, 128), (1, 16)):
        ends = np.full(sequences, thousands * K)
        shares = searched_shares(thousands * K, costs, cost_model, ranks)
        chain = held_after(nobody_holds(ranks), Chain(ranks, shares)(0 * ends, ends))
        even = held_after(nobody_holds(ranks), shard_evenly(0 * ends, ends, ranks))
        held, moves = even_out(Chain(ranks, shares), thousands * K, sequences)
        assert moves, "a searched chain is uneven"
        moving, nbytes = simulate_block_moves(moves, STRIPE, ranks, costs)
        uneven, evened, ring = (decode_seconds(each, ends, costs) for each in (chain, held, even))
        most = chain.tokens_per_rank().max() / chain.tokens_per_rank().mean()
        gain = uneven - evened
        pays = str(int(np.ceil(moving / gain))) if gain > 1e-6 else "never"
        rows.append(
            f"| {ranks} | {thousands}k | {sequences} | {most:.2f} | {1e3 * uneven:.2f} "
            f"| {1e3 * evened:.2f} | {1e3 * ring:.2f} | {nbytes / 1e6:,.0f} | {1e3 * moving:.2f} "
            f"| {pays} |"
        )
    return [
        "## Decoding behind a chain, and equal shares before it (Llama 8B on H100s, one node)",
        "",
        "A ring's zigzag and an even partition leave equal shares of keys and values with all "
        "ranks, a searched chain does not, and a decode step takes as long as the rank with most. "
        "`--even-out` moves the surplus once. *Pays after*: decoded tokens whose gain is the "
        "move's time. Here the overheads of `distca simulate` are charged: the host launches each "
        f"layer's attention in {1e3 * SHARED_DECODE_OVERHEADS.host_layer_seconds:.2g} ms, so that "
        "nothing is gained where GPUs wait for it.",
        "",
        "| GPUs | tokens | sequences | rows, most over mean | decode step, ms | evened out, ms "
        "| behind a ring, ms | moved, MB | move, ms | pays after |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


@dataclass
class Filled:
    """A sequence with full blocks alone."""

    number: int
    blocks: SequenceBlocks
    settled: int = 0

    @property
    def full(self) -> int:
        """Its full blocks."""
        return len(self.blocks)


def even_out(chain: Chain, tokens: int, sequences: int) -> tuple[Placement, list[BlockTransfer]]:
    """Moves the blocks that a chain leaves until ranks hold equal shares.

    Returns:
        Who holds which tokens then, and the blocks that moved.
    """
    count, ranks = tokens // STRIPE, chain.ranks
    cache = PrefixCache(BlockPool(ranks, sequences * count, STRIPE))
    filled = [
        Filled(n, SequenceBlocks(map(cache.take, chain.owners(count, 0, tokens))))
        for n in range(sequences)
    ]
    moves = Mover(cache, 0, STRIPE).even_out(filled)
    owners = np.concatenate([each.blocks.ranks for each in filled])
    starts = np.tile(np.arange(count) * STRIPE, sequences)
    numbers = np.repeat(np.arange(sequences), count)
    return Placement(numbers, starts, starts + STRIPE, owners, ranks), moves


def decode_seconds(held: Placement, ends: Int64s, costs: InferenceCosts) -> float:
    """Seconds of a step that decodes a token of each sequence."""
    numbers = np.arange(len(ends))
    new = shard_in_stripes(ends, ends + 1, numbers, STRIPE, held.world_size)
    plan = step_plan(held, new, "pass-q", Mask())
    return simulate_step([plan] * costs.model.layers, costs).seconds


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder of the page")
    output = parser.parse_args().output
    lines = [
        "# KV-Runahead's chains, simulated beside the paper's times",
        "",
        "By `python benchmarks/serving/runahead.py --output DIR`. We measured nothing here. "
        "This is an older model: it charges chains and all-gathers for their work alone. "
        "[published.md](published.md) charges overheads, too. [claims.md](claims.md) quotes its "
        "figures rather than these. [The last section](#decoding-behind-a-chain-and-equal-shares-"
        "before-it-llama-8b-on-h100s-one-node) charges overheads.",
        "",
        *alone_text(),
        *speed_ups_text(),
        *slow_text(),
        *interpolated_text(),
        *noisy_text(),
        *decode_text(),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    output.mkdir(parents=True, exist_ok=True)
    pages.write(output / "runahead.md", text, __file__)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

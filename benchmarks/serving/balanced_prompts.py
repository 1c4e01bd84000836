"""Data-parallel attention with and without balance: iterations of prompts of unequal lengths.

    python benchmarks/serving/balanced_prompts.py --output DIR
    python benchmarks/serving/balanced_prompts.py --published DIR --output DIR

Ranks keep their own prompts, and all wait for the busiest one. Iterations of the engine's own
scheduler, with prompts always waiting, are run in three ways:

* *plain*: each rank computes the attention of its own prompts;
* *whole requests*: whole chunks move to the rank that has least, the longest first, as engines do
  that balance requests. Moving their keys and values is free here, and in simulations nothing
  moves where that would take longer;
* *tiles*: `--prefill-strategy tiles`.

The *ideal* is the mean of the ranks' compute in the plain way. Iterations on GPUs are simulated,
with answers that are decoded beside the prompts. On this machine a layer of prefills is replayed:
one process plays all ranks, copies all their bytes, and counts CPU seconds of each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.published_lengths import LISTS
from benchmarks.serving.prompt_mixes import (
    MIXES,
    Feeds,
    Load,
    drawn,
    iterations,
    whole_requests,
)
from benchmarks.serving.replayed_prefills import ReplayedLayer
from distca.cost.model_sizes import MODELS
from distca.cost.volume import AttentionShape
from distca.documents.lengths import Collection, LengthDistribution, read_lengths
from distca.inference.machine import TOLERANCE, Machine
from distca.machine import cpu_name
from distca.plan import Mask
from distca.progress import track
from distca.runtime.serving.step_exchange import build_stepped_exchange
from distca.schedule.base import ScheduleConfig
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.batches import PrefillStrategy
from distca.schedule.serving.iteration import plan_iteration
from distca.simulate import CLUSTERS
from distca.simulate.requests.vllm import room_of
from distca.simulate.serving import InferenceCosts
from distca.simulate.serving.iterations import simulate_iteration

SCRIPT = "benchmarks/serving/balanced_prompts.py"
WAYS = ("plain", "whole requests", "tiles")
_SKIPPED = 40
"""Iterations before those that count: ranks begin their first long prompts together."""

_TRIES = 5
"""Times that an iteration is planned: the least CPU time counts, as others use the machine, too."""

_LAYER = AttentionShape(heads=8, kv_heads=2, head_dim=64, dtype_bytes=4)
_FFN = 1536
_CHUNK, _LONGEST, _BLOCK = 2048, 32_768, 128
"""Sizes of the layer that is replayed, tokens of a rank's chunk, and of the longest prompt."""


@dataclass
class Case:
    """Figures of each iteration of a mix on some number of ranks.

    Attributes:
        mix: name of the mix.
        ranks: number of ranks.
        seconds: seconds of each way.
        ideal: mean of the ranks' compute, plain.
        nbytes: bytes that all ranks send in a layer, with tiles.
        planned: CPU seconds in which a rank plans tiles, and prepares its part of them.
        computed: mean of the ranks' compute, with tiles.
        busiest: the most compute of a rank, with tiles.
    """

    mix: str
    ranks: int
    seconds: dict[str, list[float]]
    ideal: list[float]
    nbytes: list[int]
    planned: list[float]
    computed: list[float]
    busiest: list[float]

    @staticmethod
    def of(mix: str, ranks: int) -> Case:
        """Makes a case without any figures."""
        return Case(mix, ranks, {way: [] for way in WAYS}, [], [], [], [], [])

    def mean(self, way: str) -> float:
        """Seconds of an iteration, on average."""
        return statistics.mean(self.seconds[way])

    def of_ideal(self, way: str) -> float:
        """Part of a way's time that would be left if all ranks had as much to compute."""
        return sum(self.ideal) / sum(self.seconds[way])

    def lost(self) -> tuple[float, float, float]:
        """Seconds of an iteration with tiles beyond the ideal, on average: for copies, launches and
        merging, for compute of the busiest rank above the mean, and for waiting."""
        ideal, computed, busiest = map(statistics.mean, (self.ideal, self.computed, self.busiest))
        return computed - ideal, busiest - computed, self.mean("tiles") - busiest

    @property
    def slower(self) -> int:
        """Iterations in which tiles take longer than the plain way, by over 0.1%."""
        both = zip(self.seconds["tiles"], self.seconds["plain"], strict=True)
        return sum(tiles > 1.001 * plain for tiles, plain in both)


def mixes_of(published: Path | None) -> dict[str, LengthDistribution]:
    """The built-in mixes, or those of the published lists of lengths."""
    if published is None:
        return MIXES
    return {
        name.removesuffix(".json"): Collection(tuple(read_lengths(published / name).tolist()))
        for name in LISTS
    }


def ways_of(
    feeds: Feeds, moved: Feeds, tiles: BalancedTiles
) -> list[tuple[str, Feeds, PrefillStrategy]]:
    """What each way feeds, and by which strategy.

    Args:
        feeds: what the scheduler decided.
        moved: the same, after whole requests have moved.
        tiles: strategy that moves tiles.
    """
    strategies: tuple[PrefillStrategy, ...] = ("pass-kv", "pass-kv", tiles)
    return [*zip(WAYS, (feeds, moved, feeds), strategies, strict=True)]


def simulated(
    mix: str, distribution: LengthDistribution, ranks: int, args: Any, fast_network: bool = False
) -> Case:
    """Simulates iterations on GPUs, of one GPU a rank.

    Args:
        mix: name of the mix.
        distribution: lengths of its prompts.
        ranks: GPUs.
        args: arguments of the command.
        fast_network: whether links between nodes are as fast as those inside.
    """
    cluster = CLUSTERS[args.cluster]
    if fast_network:
        cluster = replace(cluster, network_gb_per_s=cluster.node_gb_per_s)
    costs = InferenceCosts(MODELS[args.model], cluster)
    cost_model = cluster.inference_cost(costs.shape)
    config = ScheduleConfig(TOLERANCE, costs.shape, cost_model, links=costs.links)
    tiles = BalancedTiles(config, cluster.node_latency + cluster.launch_seconds)
    masks, size = costs.model.masks.masks, _BLOCK
    load = Load(ranks, args.chunk, room_of(costs), block_size=size)
    lengths = drawn(distribution, load.room, args.seed)
    case = Case.of(mix, ranks)

    whole = np.array([args.chunk])
    a_token = float((costs.pre_seconds(whole) + costs.post_seconds(whole))[0]) / args.chunk
    for feeds in iterations(load, lengths, args.iterations, _SKIPPED):
        moved = whole_requests(feeds, ranks, cost_model, lambda tokens: tokens * a_token)
        for way, given, strategy in ways_of(feeds, moved, tiles):
            tries = []
            for _ in range(_TRIES if way == "tiles" else 1):
                begin = time.process_time()
                plan = plan_iteration(given, masks, size, ranks, strategy)
                if plan.prefill is not None:
                    for stepped in plan.prefill.plans.by_mask.values():
                        build_stepped_exchange(stepped, 0)
                tries.append(time.process_time() - begin)
            found = simulate_iteration(plan, costs)
            case.seconds[way].append(float(found.clock.max()))
            if way == "plain":
                case.ideal.append(float(found.computed.mean()))
            elif way == "whole requests":
                # Who balances them may leave them as they are.
                both = case.seconds[way].pop(), case.seconds["plain"][-1]
                case.seconds[way].append(min(both))
            elif way == "tiles":
                sent = sum(int(each.sum()) for each in found.sent.values())
                case.nbytes.append(sent // costs.model.layers)
                case.computed.append(float(found.computed.mean()))
                case.busiest.append(float(found.computed.max()))
                if plan.prefill is not None:
                    case.planned.append(min(tries))
    return case


def replayed(mix: str, distribution: LengthDistribution, ranks: int, args: Any) -> Case:
    """Runs a layer of prefills, rank by rank."""
    layer, case = ReplayedLayer(_LAYER, _FFN), Case.of(mix, ranks)
    # No answers, and room for all prompts that run.
    load = Load(ranks, _CHUNK, 8 * _LONGEST, (1, 1), _BLOCK)
    machine = Machine.described(False, None, None)
    tiles = machine.tiles(_LAYER, ranks)
    cost_model = tiles.config.cost_model
    assert cost_model is not None
    layer.linear_seconds(_CHUNK)
    a_token = layer.linear_seconds(_CHUNK) / _CHUNK
    lengths = drawn(distribution, _LONGEST, args.seed)
    for feeds in iterations(load, lengths, args.replayed_iterations, _SKIPPED):
        chunks = tuple(each for each in feeds if each.count > 1 or not each.start)
        moved = whole_requests(chunks, ranks, cost_model, lambda tokens: tokens * a_token)
        totals = []
        for way, given, strategy in ways_of(chunks, moved, tiles):
            begin = time.process_time()
            plan = plan_iteration(given, [Mask()], _BLOCK, ranks, strategy)
            planned = time.process_time() - begin
            assert plan.prefill is not None
            found = layer.run(plan.prefill.plans.by_mask[Mask()])
            case.seconds[way].append(float(found.seconds.max()))
            totals.append(found.total)
            if way == "plain":
                case.ideal.append(float(found.seconds.mean()))
            elif way == "tiles":
                case.nbytes.append(found.bytes_sent)
                case.planned.append(planned)
        assert np.allclose(totals, totals[0], rtol=1e-4, atol=1.0), "other outputs"
    return case


def rows_of(cases: Sequence[Case], scale: float) -> Iterator[list[str]]:
    """Rows of a table.

    Args:
        cases: figures.
        scale: what seconds are multiplied by.
    """
    for case in cases:
        ideal = statistics.mean(case.ideal)
        yield [
            case.mix,
            str(case.ranks),
            *(f"{scale * case.mean(way):.1f}" for way in WAYS),
            f"{scale * ideal:.1f}",
            *(f"{case.of_ideal(way):.3f}" for way in WAYS),
            str(case.slower),
            f"{statistics.mean(case.nbytes) / case.ranks / 1e6:.2f}",
        ]


def page(
    args: Any, on_gpus: Sequence[Case], fast: Sequence[Case], here: Sequence[Case]
) -> Iterator[str]:
    """The lines of the page.

    Args:
        args: arguments of the command.
        on_gpus: simulated cases.
        fast: those on several nodes once more, with links between nodes as fast as inside.
        here: replayed cases.
    """
    yield from ("# Prompts of unequal lengths on data-parallel ranks", "")
    yield from (f"    {pages.typed(SCRIPT)}", "")
    yield (
        "Ranks keep their own prompts. *Plain*: each computes their attention. *Whole requests*: "
        "whole chunks move, with keys and values for free. *Tiles*: `--prefill-strategy tiles`. "
        "The ideal is the mean of the ranks' compute, plain. *Slower* counts iterations in which "
        "tiles take over 0.1% longer than plain."
    )
    columns = [*WAYS, "ideal", *(f"ideal / {way}" for way in WAYS)]
    columns += ["slower", "MB a rank and layer"]
    yield from ("", "## Simulated", "")
    yield (
        f"{args.model} on {args.cluster}, a GPU a rank, chunks of {args.chunk:,} tokens a rank, "
        f"{args.iterations} iterations of the engine's scheduler with prompts always waiting and "
        "answers of 4 to 16 tokens decoded beside them. Milliseconds of an iteration:"
    )
    yield ""
    yield pages.table(["mix", "GPUs", *columns], rows_of(on_gpus, 1e3))
    yield ""
    if fast:
        reached = ", ".join(
            f"{each.mix} on {each.ranks}: {each.of_ideal('tiles'):.3f}" for each in fast
        )
        yield (
            "With links between nodes as fast as those inside, tiles reach this part of the ideal: "
            f"{reached}."
        )
        yield ""
    yield (
        "Milliseconds of an iteration with tiles beyond the ideal. *Copies*: copying rows, merging "
        "outputs and launches. *Uneven*: compute of the busiest rank above the mean: the "
        f"tolerance, {TOLERANCE:.0%} of attention, and what nodes differ by where tiles between "
        "them would not end sooner. *Waiting*: the rest, most of it for rows and "
        "outputs that no kernel hides. A rank with few prompts of its own has nothing to compute "
        "until rows arrive, and the owner of a prompt waits for the last outputs:"
    )
    yield ""
    lost = [
        (case.mix, case.ranks, *(f"{1e3 * each:.1f}" for each in case.lost())) for case in on_gpus
    ]
    yield pages.table(("mix", "GPUs", "copies", "uneven", "waiting"), lost)
    yield ""
    yield (
        "CPU milliseconds in which a rank plans an iteration and prepares its part, and the part "
        f"of the iteration's time that they would take. Of {_TRIES} tries the shortest counts, as "
        "other work ran on the machine:"
    )
    yield ""
    rows = [
        (
            case.mix,
            case.ranks,
            f"{1e3 * statistics.mean(case.planned):.1f}",
            f"{sum(case.planned) / sum(case.seconds['tiles']):.1%}",
        )
        for case in on_gpus
        if case.planned
    ]
    yield pages.table(("mix", "GPUs", "ms", "part"), rows)
    if not here:
        return
    yield from ("", "## Replayed", "")
    yield (
        f"{cpu_name()}, one thread, float32. A layer of {_LAYER.heads} heads ({_LAYER.kv_heads} "
        f"of keys) of {_LAYER.head_dim}, chunks of {_CHUNK:,} tokens a rank, prompts of at most "
        f"{_LONGEST:,}, {args.replayed_iterations} iterations. CPU milliseconds of the busiest "
        "rank in a layer; outputs are the same in all ways, and bytes the plans':"
    )
    yield ""
    yield pages.table(["mix", "ranks", *columns], rows_of(here, 1e3))


def main() -> int:
    """Runs the benchmark; returns its exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--cluster", choices=CLUSTERS, default="dgx-h100")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a GPU's chunk")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[2, 4], help="that are replayed; none: no replay"
    )
    parser.add_argument("--replayed-iterations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--published", type=Path, metavar="DIR", help="Folder of published lengths, for the mixes."
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="Write the page there.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mixes = mixes_of(args.published)
    jobs = [(mix, gpus) for mix in mixes for gpus in args.gpus]
    on_gpus = [
        simulated(mix, mixes[mix], gpus, args)
        for mix, gpus in track(jobs, "balanced prompts, simulated", "cases")
    ]
    of_node = CLUSTERS[args.cluster].gpus_per_node
    fast = [
        simulated(mix, mixes[mix], gpus, args, fast_network=True)
        for mix, gpus in track(jobs, "balanced prompts, fast network", "cases")
        if gpus > of_node
    ]
    here = [
        replayed(mix, mixes[mix], ranks, args)
        for mix, ranks in track(
            [(mix, ranks) for mix in mixes for ranks in args.ranks],
            "balanced prompts, replayed",
            "cases",
        )
    ]
    text = "\n".join(page(args, on_gpus, fast, here))
    if args.output is None:
        sys.stdout.write(text + "\n")
    else:
        name = "balanced_prompts" if args.published is None else "balanced_published_lengths"
        figures = {"simulated": [vars(each) for each in on_gpus]}
        figures["replayed"] = [vars(each) for each in here]
        pages.save(args.output, name, text, __file__, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

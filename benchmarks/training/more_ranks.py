"""DistCA beside its peers on more ranks than this machine has cores, replayed on one core.

    python benchmarks/training/more_ranks.py --output benchmarks/results

Every rank's kernels and copies of a layer's core attention, forward and backward, run one after the
other, and their CPU seconds and bytes are counted. All other work of a training step is measured
once, on documents of one block, and counts by a rank's tokens. A step takes what its busiest rank
computes; ranks wait for each other after each round of hybrid context parallelism (CP) and after
each nano-batch of DistCA, those of a group before each micro-batch of dynamic CP, and bytes travel
for nothing. So the seconds tell balance and overhead, and the bytes stand beside them.

All ways train on the same documents. With `--ranks-of-longest 1` they are cut where plain Megatron
cuts them, at the end of a rank's tokens; with 4 they are up to four ranks long, which plain
Megatron cannot train on. CP and WLB-LLM are tried with groups of as many ranks as the longest
document needs, of four and of eight; hybrid and dynamic CP with as many ranks for the longest
document. WLB-LLM packs by the measured rates of all work. Dynamic CP, which no release of Megatron
has (`distca/schedule/baselines/dynamic_cp.py`), is shown beside the peers, and is none of them.

Documents are as much shorter than on a cluster as a rank's tokens are fewer, so chunks of CP in
large groups are far shorter than a kernel's block: on a cluster they take less. In favour of
Megatron, its all-gathers send no key that no query sees, and its hybrid CP runs the documents of a
round at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.plans.hybrid_cp import plan_way
from benchmarks.training.run import Measured, begin, parsed
from benchmarks.training.setting import MIXES, Setting, document_lengths
from benchmarks.virtual_ranks import Part, Replayed, Rows, replay
from distca.cost.kernel_time import AnalyticCost
from distca.cost.volume import AttentionShape
from distca.machine import cpu_name
from distca.plan import BLOCK, Plan
from distca.plan.span import Floats, Int64s
from distca.progress import progress
from distca.schedule import (
    ExecutionOptions,
    GlobalBatchPlanner,
    ScheduleConfig,
    documents_in_turn,
)
from distca.schedule.baselines.rounds import end_of_rounds
from distca.simulate.bins import AllWork

PLAIN = "plain Megatron"
PEERS = {"per-document-cp": "per-document CP", "hybrid-cp": "hybrid CP", "wlb-llm": "WLB-LLM"}
DYNAMIC = "dynamic CP"
_GROUPED = PEERS | {"dynamic-cp": DYNAMIC}
_MIXES = ("long-tail", "pretrain", "prolong", "lognormal", "fixed")
MODES = {False: "DistCA, whole", True: "DistCA, ping-pong"}


@dataclass(frozen=True)
class Way:
    """A way to share core attention out over ranks.

    Attributes:
        scheduler: name of the scheduler.
        size: number of ranks in a CP group, or of the longest document in hybrid and dynamic CP;
            None: neither.
        ping_pong: whether DistCA runs two nano-batches.
        tolerance: DistCA's tolerance; None for the others.
    """

    scheduler: str
    size: int | None = None
    ping_pong: bool = False
    tolerance: float | None = None

    def __str__(self) -> str:
        if self.tolerance is not None:
            return f"{MODES[self.ping_pong]}, tolerance {self.tolerance:g}"
        return PLAIN if self.size is None else f"{_GROUPED[self.scheduler]} of {self.size}"


@dataclass(frozen=True)
class Rates:
    """Measured seconds of a core, forward and backward.

    Attributes:
        token: of all work on a token but core attention, in all layers.
        pair: of core attention of a visible pair, in a layer.
    """

    token: float
    pair: float


@dataclass(frozen=True)
class Case:
    """Figures of a way with one batch of documents.

    Attributes:
        ranks: number of ranks.
        longest: number of ranks that the longest document may fill.
        mix: name of the mix of documents.
        seed: seed of their lengths.
        way: name of the way.
        attention: CPU seconds of a layer's core attention on the busiest rank, summed over parts.
        over_mean: those seconds over the mean rank's.
        step: CPU seconds of a training step on the busiest rank, summed over parts.
        mb_sent: megabytes (10^6) that the rank which sends most sends in a layer.
        mb_total: megabytes that all ranks send in a layer.
    """

    ranks: int
    longest: int
    mix: str
    seed: int
    way: str
    attention: float
    over_mean: float
    step: float
    mb_sent: float
    mb_total: float


def ways_of(ranks: int, longest: int, tolerances: Sequence[float]) -> list[Way]:
    """Lists the ways that are compared."""
    sizes = sorted(each for each in {longest, 4, 8} if longest <= each <= ranks)
    ways = [Way("packed")] if longest == 1 else []
    # A group of one rank is plain Megatron.
    ways += [Way("per-document-cp", size) for size in sizes if size > 1]
    # On all ranks each document would be a round of its own.
    ways += [
        Way(name, size) for name in ("hybrid-cp", "dynamic-cp") for size in sizes if size < ranks
    ]
    ways += [Way("wlb-llm", size) for size in sizes]
    return ways + [
        Way("tiles", None, ping_pong, tolerance)
        for tolerance, ping_pong in product(tolerances, MODES)
    ]


def parts_of(
    way: Way, lengths: Int64s, ranks: int, layers: int, shape: AttentionShape, rates: Rates
) -> list[Part]:
    """Plans a way's parts: rounds, nano-batches, or one."""
    config = ScheduleConfig(shape=shape, context_parallel_size=way.size)
    if way.tolerance is not None:
        servers = np.arange(ranks).reshape(1, ranks)
        options = ExecutionOptions(way.scheduler, ping_pong=way.ping_pong)
        planner = GlobalBatchPlanner(servers, replace(config, tolerance=way.tolerance), options)
        planned = planner.plan(documents_in_turn([lengths]))
        documents = planned.micro_batches[0].documents
        return [
            # A split document begins at the cut, but its plan has all of it.
            Part(plan, each.starts - (0 if plan.cached_prefix is None else plan.cached_prefix))
            for plan, each in zip(planned.ticks[0].plans, documents, strict=True)
        ]
    work = AllWork(AnalyticCost(1.0, 1 / rates.pair), 1.0, rates.token / layers)
    found = plan_way(way.scheduler, lengths, ranks, config, work)
    round_of = found.round_of_document
    starts = np.cumsum(lengths) - lengths
    return [
        Part(documents_of(found.plan, chosen), starts[chosen], groups)
        for chosen, groups in (
            (np.flatnonzero(round_of == number), None if found.waits_for_all else of_ranks)
            for number, of_ranks in enumerate(found.groups[: found.rounds])
        )
    ]


def documents_of(plan: Plan, chosen: Int64s) -> Plan:
    """Returns the plan of some of a plan's documents, numbered anew."""
    number = np.full(len(plan.lengths), -1, dtype=np.int64)
    number[chosen] = np.arange(len(chosen))
    placement = plan.placement.select(number[plan.placement.document] >= 0)
    tasks = plan.tasks[number[plan.tasks.document] >= 0]
    return replace(
        plan,
        lengths=plan.lengths[chosen],
        placement=replace(placement, document=number[placement.document]),
        tasks=replace(tasks, document=number[tasks.document]),
    )


def step_seconds(parts: Sequence[Part], found: Replayed, layers: int, rates: Rates) -> float:
    """Returns when the last rank has run a step's parts, in seconds; see `end_of_parts`."""
    tokens = np.array([part.plan.own_tokens_per_rank() for part in parts])
    return end_of_parts(parts, tokens * rates.token + layers * found.seconds)


def end_of_parts(parts: Sequence[Part], seconds: Floats) -> float:
    """Returns when the last rank has run all parts: where all ranks wait for each other, the
    seconds of the busiest rank of each part, summed over parts.

    Args:
        parts: the parts.
        seconds: what each rank's parts take, `[parts, ranks]`.
    """
    groups = [part.groups for part in parts if part.groups is not None]
    return end_of_rounds(seconds, np.array(groups) if groups else None)


def measure_rates(setting: Setting, shape: AttentionShape, runs: int) -> Rates:
    """Measures a core's rates: the fastest of several runs, after one that warms up.

    Args:
        setting: setting of one process.
        shape: attention heads.
        runs: number of runs.
    """
    tokens = setting.seq_length
    short = [BLOCK] * (tokens // BLOCK)
    plain = Measured(setting, [])
    batches = plain.batches(short * (runs + 1))
    steps = [plain.step(batches).cpu_seconds for _ in range(runs + 1)]
    batches.close()
    rows = Rows.random(tokens, shape)

    def attention(lengths: list[int]) -> float:
        zero = Rates(0.0, 1.0)
        parts = parts_of(Way("packed"), np.array(lengths), 1, setting.layers, shape, zero)
        return min(float(replay(parts, shape, rows).seconds.sum()) for _ in range(runs + 1))

    others = min(steps[1:]) - setting.layers * attention(short)
    return Rates(others / tokens, attention([tokens]) / (tokens * (tokens + 1) / 2))


def measure(
    setting: Setting,
    longest: int,
    ways: Sequence[Way],
    shape: AttentionShape,
    runs: int,
    rates: Rates,
) -> Iterator[Case]:
    """Measures all ways with one batch of each mix.

    Args:
        setting: sizes, mixes and seed.
        longest: number of ranks that the longest document may fill.
        ways: ways to measure.
        shape: attention heads.
        runs: number of runs, the fastest of which counts for each rank.
        rates: measured rates.
    """
    rows = Rows.random(setting.tokens, shape)
    for mix in setting.mixes:
        lengths = np.array(document_lengths(setting, mix, longest))
        planned = {
            way: parts_of(way, lengths, setting.processes, setting.layers, shape, rates)
            for way in ways
        }
        replayed: dict[Way, Replayed] = {}
        # All ways in turn, since other work on the machine comes and goes.
        for way in [*ways] * runs:
            found = replay(planned[way], shape, rows)
            replayed[way] = found.fastest(replayed.get(way, found))
        for way in ways:
            parts, found = planned[way], replayed[way]
            busiest = end_of_parts(parts, found.seconds)
            yield Case(
                setting.processes,
                longest,
                mix,
                setting.seed,
                str(way),
                busiest,
                busiest / float(found.seconds.sum(axis=0).mean()),
                step_seconds(parts, found, setting.layers, rates),
                found.bytes_sent.max() / 1e6,
                found.bytes_sent.sum() / 1e6,
            )


def mean_and_range(values: Floats, digits: int) -> str:
    """Formats the mean of values, and the least and the greatest if there are several."""
    mean, least, most = (
        f"{each:.{digits}f}" for each in (values.mean(), values.min(), values.max())
    )
    return f"{mean} ({least} to {most})" if len(values) > 1 else mean


def grouped(cases: Sequence[Case]) -> dict[str, dict[str, list[Case]]]:
    """Groups cases of one table by mix and way, each in the order of the seeds."""
    groups: dict[str, dict[str, list[Case]]] = {}
    for case in cases:
        groups.setdefault(case.mix, {}).setdefault(case.way, []).append(case)
    return groups


def column(cases: Sequence[Case], name: str) -> Floats:
    return np.array([getattr(case, name) for case in cases])


def peers_of(of_ways: dict[str, list[Case]]) -> dict[str, Floats]:
    """Returns the seconds of each peer's step in each batch; plain Megatron is no peer."""
    return steps_of(of_ways, tuple(PEERS.values()))


def steps_of(of_ways: dict[str, list[Case]], begins: tuple[str, ...]) -> dict[str, Floats]:
    """Returns the seconds of a step in each batch, of the ways whose names begin so."""
    names = [name for name in of_ways if name.startswith(begins)]
    return {name: column(of_ways[name], "step") for name in names}


def table(cases: Sequence[Case]) -> str:
    """Formats one row of each mix and way; speeds are over the first way."""
    groups, lines = grouped(cases), []
    base_name = next(iter(next(iter(groups.values()))))
    head = ["documents", "way", "core attention, CPU s", "busiest over mean rank", "step, CPU s"]
    head += [f"speed over {base_name}", "MB sent, busiest rank", "MB sent, all ranks"]
    for mix, of_ways in groups.items():
        base = column(of_ways[base_name], "step")
        for way, own in of_ways.items():
            lines.append(
                [
                    *(mix, way),
                    mean_and_range(column(own, "attention"), 3),
                    mean_and_range(column(own, "over_mean"), 2),
                    f"{column(own, 'step').mean():.3f}",
                    mean_and_range(base / column(own, "step"), 3),
                    mean_and_range(column(own, "mb_sent"), 2),
                    f"{column(own, 'mb_total').mean():.1f}",
                ]
            )
    return pages.table(head, lines)


def over_best_peer(cases: Sequence[Case]) -> str:
    """Formats DistCA's speed over each batch's fastest peer, and bytes, by mix.

    The bytes of a peer are those of the one whose mean step is the fastest.
    """
    head = ["documents", "peer with the fastest mean", "MB sent, busiest rank"]
    groups, lines = grouped(cases), []
    some = next(iter(groups.values()))
    names = [name for name in some if name.startswith("DistCA")]
    shows_dynamic = bool(steps_of(some, (DYNAMIC,)))
    if shows_dynamic:
        head.append(f"{DYNAMIC}, each batch's fastest: speed over each batch's fastest peer")
    for name in names:
        head += [f"{name}: speed over each batch's fastest peer", "MB sent, busiest rank"]
    for mix, of_ways in groups.items():
        peers = peers_of(of_ways)
        peer = min(peers, key=lambda name: float(peers[name].mean()))
        fastest = np.min([*peers.values()], axis=0)
        line = [mix, peer, f"{column(of_ways[peer], 'mb_sent').mean():.2f}"]
        if shows_dynamic:
            dynamic = np.min([*steps_of(of_ways, (DYNAMIC,)).values()], axis=0)
            line.append(mean_and_range(fastest / dynamic, 3))
        for name in names:
            ratios = fastest / column(of_ways[name], "step")
            line += [mean_and_range(ratios, 3), f"{column(of_ways[name], 'mb_sent').mean():.2f}"]
        lines.append(line)
    return pages.table(head, lines)


def page(figures: dict[str, Any]) -> str:
    """Makes the page from what `more_ranks.json` keeps."""
    cases = [Case(**each) for each in figures["cases"]]
    setting, rates, versions = figures["setting"], Rates(**figures["rates"]), figures["versions"]
    shape = AttentionShape(**figures["shape"])
    lines = [
        "# More ranks, replayed",
        "",
        f"    {figures['command']}",
        "",
        f"One core of {figures['device']} ran the core attention of all ranks, one rank after the "
        "other; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f". {setting['layers']} layers of width {setting['hidden_size']}, {shape.heads} heads "
        f"and {shape.kv_heads} key-value heads of {shape.head_dim}, fp32, "
        f"{setting['seq_length']:,} tokens a rank. Figures are means over batches, with the "
        f"least and the greatest in brackets. Each batch ran {figures['runs']} time(s), and the "
        "fastest run of each rank counts. Core attention of a document as long as a rank's tokens "
        f"takes {1e9 * rates.pair:.2f} ns for each visible pair and layer. All other work takes "
        f"{1e6 * rates.token:.1f} us for each token.",
        "",
        "*Core attention*: CPU seconds of the busiest rank in one layer, for kernels and copies, "
        "forward and backward. After a round of hybrid CP or a nano-batch, ranks wait for each "
        "other, so the seconds of the busiest rank of each round or nano-batch are summed. In "
        "dynamic CP, which no release of Megatron has and which is no peer here, the ranks of a "
        "group wait for each other before a micro-batch, and the last rank's end counts. *Step*: "
        "the same for all work of a step. *Speed over* another way: that way's step seconds over "
        "those of the row's or column's way. *Fastest peer*: the peer that is fastest "
        "for that batch, which no user knows beforehand. *Whole*: without ping-pong. Bytes are of "
        "one layer, forward and backward. "
        "`benchmarks/training/more_ranks.py` says what is counted.",
    ]
    for ranks, longest in dict.fromkeys((case.ranks, case.longest) for case in cases):
        own = [case for case in cases if (case.ranks, case.longest) == (ranks, longest)]
        end = "a rank's tokens" if longest == 1 else f"{longest} ranks' tokens"
        batches = len({case.seed for case in own})
        lines += ["", f"## {ranks} ranks, documents of at most {end}", ""]
        lines += [f"Batches of each mix: {batches}.", "", over_best_peer(own), "", table(own)]
    return "\n".join(lines)


def build_parser() -> Parser:
    parser = Parser(__doc__, {"tolerances": 0})
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--ranks-of-longest", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a rank")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--mixes", nargs="+", default=list(_MIXES), choices=MIXES)
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.02])
    parser.add_argument("--seeds", type=int, default=3, help="batches of each mix")
    parser.add_argument("--runs", type=int, default=2, help="of each batch")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    return parser


def settings_of(args: argparse.Namespace) -> list[tuple[Setting, int]]:
    """Makes the settings, one of each seed, each with how many ranks the longest document fills.

    Raises:
        ValueError: the flags don't go together.
    """
    if args.seq_length % (2 * BLOCK):
        raise ValueError(f"--seq-length {args.seq_length}: give a multiple of {2 * BLOCK}")
    for ranks, longest in product(args.ranks, args.ranks_of_longest):
        if ranks % longest:
            raise ValueError(
                f"--ranks-of-longest {longest} does not divide --ranks {ranks}: give a divisor"
            )
    return [
        (
            Setting(
                processes=ranks,
                stages=1,
                micro_batches=1,
                seq_length=args.seq_length,
                layers=args.num_layers,
                hidden_size=args.hidden_size,
                batches=1,
                rounds=args.runs,
                schedulers=(),
                modes=(),
                tolerances=tuple(args.tolerances),
                mixes=tuple(args.mixes),
                seed=seed,
            ),
            longest,
        )
        for ranks, seed, longest in product(args.ranks, range(args.seeds), args.ranks_of_longest)
    ]


def main() -> None:
    parser = build_parser()
    args = parser.parse_args()
    try:
        settings = settings_of(args)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    alone = replace(settings[0][0], processes=1)
    begin(alone, 0, 0, dist.HashStore())  # type: ignore[attr-defined]
    megatron = parsed(alone, [])
    shape = AttentionShape(
        megatron.num_attention_heads, megatron.num_query_groups, megatron.kv_channels, 4
    )
    rates = measure_rates(alone, shape, max(args.runs, 3))
    dist.destroy_process_group()
    figures: dict[str, Any] = {
        "command": pages.typed("benchmarks/training/more_ranks.py"),
        "device": cpu_name(),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
        "setting": asdict(settings[0][0]),
        "shape": asdict(shape),
        "rates": asdict(rates),
        "runs": args.runs,
        "cases": [],
    }
    with progress("more_ranks", "batches", len(settings) * len(args.mixes)) as shown:
        for setting, longest in settings:
            ways = ways_of(setting.processes, longest, args.tolerances)
            for case in measure(setting, longest, ways, shape, args.runs, rates):
                figures["cases"].append(asdict(case))
                shown.update(case.way == str(ways[-1]))
    pages.save(args.output, "more_ranks", page(figures), __file__, figures)


if __name__ == "__main__":
    main()

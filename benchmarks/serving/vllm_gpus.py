"""vLLM alone and vLLM with prefill ranks on as many GPUs, simulated.

    python benchmarks/serving/vllm_gpus.py --output benchmarks/results/serving

No GPU is needed. The loads are those of `vllm_prefill.py` with longer prompts and answers. vLLM
alone has all GPUs, as replicas of one size of tensor parallelism. With prefill ranks it has those
that they leave. The ranks' scheduler, strategies and plans are those of the engine.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.arrivals import LOADS, LONG, SHORT, SHORTEST, Load, draw_arrivals
from distca.cost.model_sizes import MODELS
from distca.progress import track
from distca.simulate import CLUSTERS
from distca.simulate.requests import Request, RequestTrace
from distca.simulate.requests.vllm import PrefillRanks, Replicas, answer
from distca.simulate.serving import InferenceCosts

LEAST = 1024
"""Fewest tokens of a prompt that ranks are asked for: the connector's default."""

ANSWERS = (64, 512)
"""Fewest and most tokens of an answer."""

LINK = 0.5
"""Part of the slowest link between two GPUs of the machine that a rank's rows go at."""


@dataclass(frozen=True)
class System:
    """GPUs of vLLM, and prefill ranks.

    Attributes:
        replicas: servers of vLLM.
        tensor: GPUs of each.
        ranks: prefill ranks; 0: none.
    """

    replicas: int
    tensor: int
    ranks: int = 0

    @property
    def name(self) -> str:
        """Its name in tables."""
        of_each = f"TP {self.tensor}"
        vllm = of_each if self.replicas == 1 else f"{self.replicas} replicas of {of_each}"
        return f"{vllm}, {self.ranks} prefill ranks" if self.ranks else f"{vllm}, alone"


def systems(gpus: int) -> list[System]:
    """All that are compared, with as many GPUs each."""
    sizes = [size for size in (1, 2, 4, 8) if gpus % size == 0]
    found = [System(gpus // size, size) for size in sizes]
    for ranks in (gpus // 4, gpus // 2, 3 * gpus // 4):
        rest = gpus - ranks
        layouts = dict.fromkeys((1, max(size for size in sizes if rest % size == 0)))
        found += [System(rest // size, size, ranks) for size in layouts]
    return found


def ideal_rate(trace: RequestTrace, costs: InferenceCosts, gpus: int) -> float:
    """Requests a second whose prompts alone keep all GPUs busy, each computed by one."""
    one = Replicas(costs, 1)
    seconds = [
        sum(
            one.seconds([(start, min(one.tokens, each.prompt - start))], [])
            for start in range(0, each.prompt, one.tokens)
        )
        for each in trace.requests
    ]
    return float(gpus / np.mean(seconds))


def measure(
    system: System, trace: RequestTrace, args: Any, transfer: float, host: float
) -> dict[str, Any]:
    """Simulates a system; gives its figures."""
    model, cluster = MODELS[args.model], CLUSTERS[args.cluster]
    ranks = None
    if system.ranks:
        ranks = PrefillRanks(
            InferenceCosts(model, cluster),
            system.ranks,
            LEAST,
            transfer,
            tokens=args.chunk,
            host_seconds=host,
        )
    vllm = Replicas(InferenceCosts(model, cluster, system.tensor), system.replicas)
    found = answer(trace, vllm, ranks)
    long = np.array([each.prompt >= LONG for each in trace.requests])
    return {
        "system": system.name,
        "ranks": system.ranks,
        "short": _percentiles(1e3 * found.ttft[~long]),
        "long": _percentiles(found.ttft[long]),
        "ms": _percentiles(1e3 * found.per_token),
        "taken": int(found.asked.sum()),
    }


def _percentiles(seconds: Any) -> list[float] | None:
    """Median and 99th percentile, or None."""
    return [float(x) for x in np.nanpercentile(seconds, (50, 99))] if len(seconds) else None


def rows_of(found: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Rows of a load's table; the least of a column is bold."""
    keys = [(name, at) for name in ("short", "long", "ms") for at in (0, 1)]
    least = {key: min(each[key[0]][key[1]] for each in found) for key in keys if found[0][key[0]]}
    for each in found:
        cells = [each["system"]]
        for key in keys:
            if key not in least:
                cells.append("")
                continue
            value = each[key[0]][key[1]]
            text = f"{value:.2f}" if key[0] == "long" else f"{value:.1f}"
            cells.append(f"**{text}**" if value == least[key] else text)
        yield [*cells, str(each["taken"])]


def verdict(found: Sequence[dict[str, Any]]) -> str:
    """Says what the best of both kinds is, by each kind of request."""
    alone, ours = ([e for e in found if bool(e["ranks"]) == with_] for with_ in (False, True))
    said = []
    for kind, of_kind in (("short", "TTFT of short"), ("long", "of long"), ("ms", "ms a token")):
        if found[0][kind] is None:
            continue
        for at, what in enumerate(("median", "p99")):
            a, b = (min(each[kind][at] for each in of) for of in (alone, ours))
            said.append(f"{of_kind} {what} {b / a:.3g}")
    return f"Least with ranks over least alone, each in its best system: {', '.join(said)}."


def page(found: dict[str, list[dict[str, Any]]], args: Any, transfer: float, host: float) -> str:
    """The page of the results."""
    head = [
        *("system", "TTFT of short prompts, ms", "p99", "TTFT of long prompts, s", "p99"),
        *("ms a token", "p99", "taken by ranks"),
    ]
    drawn = "as many of each octave" if args.lengths is None else f"from {args.lengths.name}"
    parts = [
        "# vLLM with prefill ranks on as many GPUs, simulated",
        f"`{pages.typed('benchmarks/serving/vllm_gpus.py')}`",
        f"No GPU was used. {args.gpus} GPUs of {args.cluster}, {args.model} in 16 bits. "
        f"{args.requests} requests a load with Poisson arrivals: short prompts of {SHORTEST} to "
        f"{SHORT} tokens, long ones of {LONG:,} to {args.longest:,} ({drawn}), answers of "
        f"{ANSWERS[0]} to {ANSWERS[1]}. vLLM alone has all GPUs. With prefill ranks it has those "
        f"that they leave; the ranks take prompts of at least {LEAST:,} tokens, with pass-KV and "
        f"{args.chunk:,} tokens an iteration.",
        "vLLM's steps of at most 8,192 tokens take what its linear layers, attention and "
        "collectives take by the described cluster; its scheduling takes no time. Iterations of "
        f"the ranks take what their plans take, and {1e3 * host:g} ms each in which the host "
        "schedules and plans (an assumption). Rows go to vLLM at "
        f"{transfer / 1e9:g} GB/s from each rank (an assumption: {LINK:g} of NVLink's rate). All "
        "have room for what they answer. The number in brackets is the part of all GPUs' time "
        "that prompts would take, each on one GPU. The least of a column is bold.",
    ]
    for title, of_load in found.items():
        parts += [f"## {title}", pages.table(head, rows_of(of_load)), verdict(of_load)]
    return "\n\n".join(parts)


def main() -> int:
    """Simulates all systems."""
    parser = Parser(__doc__)
    parser.add_argument("--gpus", type=int, default=8, help="of a node, for each system")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-8b")
    parser.add_argument("--cluster", choices=sorted(CLUSTERS), default="dgx-h100")
    parser.add_argument("--requests", type=int, default=300, help="of each load")
    parser.add_argument("--longest", type=int, default=131072, help="tokens of the longest prompt")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", help="JSON list from which long prompts are drawn"
    )
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.2, 0.6], help="of all GPUs, by prompts alone"
    )
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a ranks' iteration")
    parser.add_argument("--short-rate", type=float, default=40.0, help="short chats a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    cluster = CLUSTERS[args.cluster]
    if args.gpus % 4 or args.gpus > cluster.gpus_per_node:
        parser.error(f"--gpus {args.gpus}: give 4 or 8, as many as a node has at most")
    transfer, host = LINK * cluster.node_bytes_per_second, 0.01
    lengths = [] if args.lengths is None else json.loads(args.lengths.read_text())
    costs = InferenceCosts(MODELS[args.model], cluster)
    traces = {}
    for load in LOADS:
        trace = trace_of(load, args, lengths)
        ideal = ideal_rate(trace, costs, args.gpus)
        rates = [part * ideal for part in args.loads] if load.long else [args.short_rate]
        for rate in rates:
            title = f"{load.name}, {rate:.2f} a second ({rate / ideal:.2f})"
            traces[title] = trace.at_rate(rate)
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in traces}
    cases = [(title, system) for title in traces for system in systems(args.gpus)]
    for title, system in track(cases, "vllm_gpus", "systems"):
        found[title].append(measure(system, traces[title], args, transfer, host))
    pages.save(args.output, "vllm_gpus", page(found, args, transfer, host), __file__, found)
    return 0


def trace_of(load: Load, args: Any, lengths: Sequence[int]) -> RequestTrace:
    """Draws the requests of a load, one a second."""
    chance = random.Random(args.seed)
    drawn = draw_arrivals(args.requests, load.long, args.longest, 1.0, chance, ANSWERS, lengths)
    # The rate is that of all but the first, which arrives at once.
    return RequestTrace(tuple(Request(e.seconds, e.prompt, e.answer) for e in drawn))


if __name__ == "__main__":
    sys.exit(main())

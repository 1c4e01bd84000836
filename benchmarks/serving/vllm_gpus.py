"""vLLM alone and vLLM with prefill ranks on as many GPUs, simulated.

    python benchmarks/serving/vllm_gpus.py --output benchmarks/results/serving

No GPU is needed. The loads are those of `vllm_prefill.py` with longer prompts and answers. vLLM
alone has all GPUs, as replicas of one size of tensor parallelism. With prefill ranks it has those
that they leave. The ranks' scheduler, strategies and plans are those of the engine. A third kind is
vLLM's own disaggregated prefill: servers that only prefill, and compute each prompt by tensor
parallelism. All are charged the overheads of `distca simulate`.
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
from distca.simulate import CLUSTERS, Cluster
from distca.simulate.requests import Request, RequestTrace
from distca.simulate.requests.vllm import PrefillRanks, PrefillServers, Replicas, answer
from distca.simulate.serving import (
    DECODE_OVERHEADS,
    NO_OVERHEADS,
    PREFILL_OVERHEADS,
    InferenceCosts,
)

LEAST = 1024
"""Fewest tokens of a prompt that ranks are asked for: the connector's default."""

ANSWERS = (64, 512)
"""Fewest and most tokens of an answer."""

LINK = 0.5
"""Part of the slowest link between two GPUs of the machine that a rank's rows go at."""


ALONE, RANKS, SERVERS, LONG_ONLY = "alone", "ranks", "servers", "servers for long prompts"
"""Kinds of systems: vLLM alone, with prefill ranks, and with its own servers that only prefill,
which get all prompts or, as the ranks, long ones."""
CHARGED = {"charged": (PREFILL_OVERHEADS, DECODE_OVERHEADS), "free": (NO_OVERHEADS, NO_OVERHEADS)}
"""Overheads of prefills and of decode steps: those of `distca simulate`, and none."""


@dataclass(frozen=True)
class System:
    """GPUs of vLLM, and what prefills.

    Attributes:
        replicas: servers of vLLM that decode.
        tensor: GPUs of each.
        kind: one of the kinds above.
        prefilling: prefill ranks of a GPU each, or servers that only prefill.
        prefill_tensor: GPUs of each of these servers.
    """

    replicas: int
    tensor: int
    kind: str = ALONE
    prefilling: int = 0
    prefill_tensor: int = 1

    @property
    def name(self) -> str:
        """Its name in tables."""
        decodes = _servers(self.replicas, self.tensor)
        if self.kind == ALONE:
            return f"{decodes}, alone"
        if self.kind == RANKS:
            return f"{decodes}, {self.prefilling} prefill ranks"
        prompts = "all" if self.kind == SERVERS else "long"
        return f"{decodes}; {prompts} prompts on {_servers(self.prefilling, self.prefill_tensor)}"


def _servers(number: int, tensor: int) -> str:
    of_each = f"TP {tensor}"
    return of_each if number == 1 else f"{number} replicas of {of_each}"


def systems(gpus: int) -> list[System]:
    """All that are compared, with as many GPUs each."""
    sizes = [size for size in (1, 2, 4, 8) if gpus % size == 0]
    found = [System(gpus // size, size) for size in sizes]
    for ranks in (gpus // 4, gpus // 2, 3 * gpus // 4):
        rest = gpus - ranks
        layouts = dict.fromkeys((1, max(size for size in sizes if rest % size == 0)))
        found += [System(rest // size, size, RANKS, ranks) for size in layouts]
    half = gpus // 2
    for kind in (SERVERS, LONG_ONLY):
        found += [System(1, half, kind, half // size, size) for size in sizes if size <= half]
    return found


def costs_of(model: str, cluster: Cluster, tensor: int, charged: str) -> InferenceCosts:
    """Costs of a model on a server's GPUs, or on a prefill rank's; `charged` is of `CHARGED`."""
    prefill, decode = CHARGED[charged]
    return InferenceCosts(
        MODELS[model], cluster, tensor, overheads=prefill, decode_overheads=decode
    )


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
    system: System, trace: RequestTrace, args: Any, transfer: float, charged: str
) -> dict[str, Any]:
    """Simulates a system; gives its figures."""
    cluster, ranks = CLUSTERS[args.cluster], None
    if system.kind != ALONE:
        costs = costs_of(args.model, cluster, system.prefill_tensor, charged)
        number, least = system.prefilling, 0 if system.kind == SERVERS else LEAST
        ranks = (
            PrefillRanks(costs, number, least, transfer, tokens=args.chunk)
            if system.kind == RANKS
            else PrefillServers(Replicas(costs, number), least, transfer)
        )
    vllm = Replicas(costs_of(args.model, cluster, system.tensor, charged), system.replicas)
    assert vllm.gpus + (ranks.gpus if ranks else 0) == args.gpus
    found = answer(trace, vllm, ranks)
    long = np.array([each.prompt >= LONG for each in trace.requests])
    return {
        "system": system.name,
        "kind": system.kind,
        "apart": system.prefilling * system.prefill_tensor,
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


def best(of: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """The least median and 99th percentile of some systems, each of its own system, by what is
    measured."""
    return {
        name: [min(each[name][at] for each in of) for at in (0, 1)]
        for name in TOLD
        if of[0][name] is not None
    }


TOLD = {"short": "TTFT of short prompts", "long": "TTFT of long prompts", "ms": "ms a token"}
"""What is measured, by its name in the figures."""


def verdict(found: Sequence[dict[str, Any]]) -> str:
    """Says how the best with ranks compares with vLLM alone, and with servers that only prefill on
    as many GPUs as the ranks."""
    alone, ranks, servers = (
        [each for each in found if each["kind"] in kinds]
        for kinds in ([ALONE], [RANKS], [SERVERS, LONG_ONLY])
    )
    as_many = [each for each in ranks if each["apart"] == servers[0]["apart"]]
    said = []
    for ours, theirs in ((best(ranks), best(alone)), (best(as_many), best(servers))):
        ratios = [
            f"{TOLD[name]} {part} {mine / other:.3g}"
            for name in ours
            for part, mine, other in zip(("median", "p99"), ours[name], theirs[name], strict=True)
        ]
        said.append(", ".join(ratios))
    return (
        f"Least with ranks over vLLM alone, each figure in its best system: {said[0]}. With ranks "
        f"on as many GPUs as the servers that only prefill, over these: {said[1]}."
    )


def sample_of(trace: RequestTrace) -> str:
    """How many requests a load has."""
    long = sum(each.prompt >= LONG for each in trace.requests)
    return f"{len(trace.requests)} requests, {long} of them long."


def page(
    found: dict[str, dict[str, list[dict[str, Any]]]],
    samples: dict[str, str],
    args: Any,
    transfer: float,
) -> str:
    """The page of the results."""
    head = [
        *("system", "TTFT of short prompts, ms", "p99", "TTFT of long prompts, s", "p99"),
        *("ms a token", "p99", "prefilled apart"),
    ]
    drawn = "as many of each octave" if args.lengths is None else f"from {args.lengths.name}"
    prefill, decode = CHARGED["charged"]
    graph = Replicas(costs_of(args.model, CLUSTERS[args.cluster], 1, "charged"), 1).graph_tokens
    parts = [
        "# vLLM with prefill ranks on as many GPUs, simulated",
        f"`{pages.typed('benchmarks/serving/vllm_gpus.py')}`",
        f"No GPU was used. {args.gpus} GPUs of {args.cluster}, {args.model} in 16 bits. "
        f"{args.requests} requests a load with Poisson arrivals: short prompts of {SHORTEST} to "
        f"{SHORT} tokens, long ones of {LONG:,} to {args.longest:,} ({drawn}), answers of "
        f"{ANSWERS[0]} to {ANSWERS[1]}. Of fewer than 100 values, p99 lies between the two "
        "largest. vLLM alone has all GPUs. Else it has those that are left:",
        f"* *prefill ranks* share each prompt of at least {LEAST:,} tokens, with pass-KV and "
        f"{args.chunk:,} tokens an iteration;\n"
        "* *all prompts on* or *long prompts on* is vLLM's disaggregated prefill: servers of vLLM "
        "that only prefill, and send keys and values to one that decodes. A prompt goes to the "
        "server with the fewest tokens to compute. *Long prompts* are those that ranks would "
        "take. Rows leave layer by layer, as from the ranks.",
        "All are charged the overheads that `distca simulate` charges "
        f"([published.md](published.md)): {1e3 * prefill.collective_seconds:.2g} ms for a "
        "collective or a ring's step of a prefill, "
        f"{1e6 * decode.collective_seconds:.2g} us for a collective of a step that graphs launch, "
        f"and {1e3 * decode.iteration_seconds:.2g} ms of the host for each iteration. Graphs of "
        f"vLLM launch decode steps, and chunks of up to {graph} tokens. These were fitted "
        "to other systems than vLLM, which launched kernels one by one, and hosts were measured on "
        "our engine. So the last line of each load says what its figures are where nothing but "
        "the work is charged.",
        f"Rows go to vLLM at {transfer / 1e9:g} GB/s from each GPU (an assumption: {LINK:g} of "
        "NVLink's rate). All have room for what they answer. The number in brackets is the part of "
        "all GPUs' time that prompts would take, each on one GPU, nothing but the work charged. "
        "The least of a column is bold.",
    ]
    for title, of_load in found["charged"].items():
        free = verdict(found["free"][title])
        parts += [
            f"## {title}",
            samples[title],
            pages.table(head, rows_of(of_load)),
            verdict(of_load),
            f"*Without overheads*: {free[0].lower()}{free[1:]}",
        ]
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
    transfer = LINK * cluster.node_bytes_per_second
    lengths = [] if args.lengths is None else json.loads(args.lengths.read_text())
    costs = costs_of(args.model, cluster, 1, "free")
    traces = {}
    for load in LOADS:
        trace = trace_of(load, args, lengths)
        ideal = ideal_rate(trace, costs, args.gpus)
        rates = [part * ideal for part in args.loads] if load.long else [args.short_rate]
        for rate in rates:
            title = f"{load.name}, {rate:.2f} a second ({rate / ideal:.2f})"
            traces[title] = trace.at_rate(rate)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        charged: {title: [] for title in traces} for charged in CHARGED
    }
    cases = [
        (charged, title, system)
        for charged in CHARGED
        for title in traces
        for system in systems(args.gpus)
    ]
    for charged, title, system in track(cases, "vllm_gpus", "systems"):
        measured = measure(system, traces[title], args, transfer, charged)
        found[charged][title].append(measured)
    samples = {title: sample_of(trace) for title, trace in traces.items()}
    text = page(found, samples, args, transfer)
    pages.save(args.output, "vllm_gpus", text, __file__, found)
    return 0


def trace_of(load: Load, args: Any, lengths: Sequence[int]) -> RequestTrace:
    """Draws the requests of a load, one a second."""
    chance = random.Random(args.seed)
    drawn = draw_arrivals(args.requests, load.long, args.longest, 1.0, chance, ANSWERS, lengths)
    # The rate is that of all but the first, which arrives at once.
    return RequestTrace(tuple(Request(e.seconds, e.prompt, e.answer) for e in drawn))


if __name__ == "__main__":
    sys.exit(main())

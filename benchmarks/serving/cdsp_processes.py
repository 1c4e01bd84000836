"""First tokens of long and short prompts under load on real processes: CDSP beside fixed degrees.

    python benchmarks/serving/cdsp_processes.py --output benchmarks/results/serving

Each strategy is a `distca serve` with prefill ranks and one decode rank. Prompts that are alone on
servers of fixed degrees are timed first, and Eq. 1 is fitted to that; all servers that are compared
are given the fit, and the simulator runs on it. The servers are there at the same time, and are
sent the same requests in turn, in rounds. Seconds to first tokens are those of a client; CPU
seconds are of the prefill ranks, beside the rank-seconds that the simulator says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.serving.systems import (
    VOCABULARY,
    Asked,
    Server,
    cpu_seconds,
    is_ours,
    serving,
    write_model,
)
from distca.attention.kernel_timing import cpu_name
from distca.progress import track
from distca.schedule.serving.cdsp import ImprovementRates, Prefill, PrefillModel
from distca.schedule.serving.cdsp.load import IMPROVEMENT_RATES
from distca.serve.handoff.measure import hardware
from distca.simulate.requests import (
    DecodeTimes,
    Request,
    RequestTrace,
    ServingCluster,
    prefill_seconds,
)
from distca.simulate.requests.prefills import make_queue

ANSWER = 2
"""Tokens of every answer: one of the prefill, one that shows the hand-off."""


@dataclass
class Measured:
    """What became of requests with a strategy, beside the simulator's word.

    Attributes:
        ttft: seconds to the first token, by round and request.
        cpu: CPU seconds of the prefill ranks, by round.
        simulated: seconds to the first token of each request.
        rank_seconds: seconds that ranks are taken, of all requests.
    """

    simulated: list[float]
    rank_seconds: float
    ttft: list[list[float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--prefill-ranks", type=int, default=2, help="a power of two")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--load", type=float, default=0.7, help="of what single ranks bear")
    parser.add_argument("--long", type=int, default=4096, help="tokens of a long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    degrees = [1 << n for n in range(args.prefill_ranks.bit_length())]
    if degrees[-1] != args.prefill_ranks:
        parser.error(f"--prefill-ranks {args.prefill_ranks}: give 1, 2, 4, ...")
    with tempfile.TemporaryDirectory(prefix="served-") as name:
        folder = Path(name)
        # Long prompts are at most an eighth of what a server times by itself: it starts soon.
        write_model(folder, args.hidden_size, args.layers, 2 * args.long)
        times = time_prefills(args, folder, degrees)
        trace = draw(args, times, args.requests, seed=0)
        rates = choose_rates(args, times)
        found = measure(args, folder, times, rates, trace, degrees)
    page = "\n".join(lines(args, times, rates, trace, found)) + "\n"
    args.output.mkdir(parents=True, exist_ok=True)
    pages.write(args.output / "cdsp_processes.md", page, __file__)
    sys.stdout.write(page)


def command(args: argparse.Namespace, folder: Path, strategy: str, *more: str) -> list[str]:
    """The command of a server."""
    found = [sys.executable, "-m", "distca", "serve", str(folder), "--port", "{port}"]
    found += ["--prefill-ranks", str(args.prefill_ranks), "--decode-ranks", "1"]
    found += ["--kv-cache-memory-bytes", str(1 << 28), "--disable-uvicorn-access-log"]
    return [*found, "--prefill-strategy", strategy, *more]


def prompt_of(length: int, seed: Sequence[int]) -> str:
    """A prompt of so many tokens."""
    return " ".join(f"w{n}" for n in np.random.default_rng(seed).integers(0, VOCABULARY, length))


def time_prefills(args: argparse.Namespace, folder: Path, degrees: Sequence[int]) -> PrefillModel:
    """Times prompts that are alone, as a client sees them, and fits Eq. 1."""
    lengths = [args.long // part for part in (16, 8, 4, 2, 1)]
    taken = []
    for degree in track(degrees, "cdsp_processes", "degrees"):
        with serving(command(args, folder, f"fixed-{degree}"), str(folder), 1) as server:
            server.ask([Asked(0.0, prompt_of(args.long // 4, [degree]), 1)])
            for length in lengths:
                seconds = [
                    server.ask([Asked(0.0, prompt_of(length, [degree, length, n]), 1)])[0].first
                    for n in range(args.rounds)
                ]
                taken.append(Prefill(degree, length, statistics.median(seconds)))
    return PrefillModel.fit(taken, hardware(), str(folder))


def draw(args: argparse.Namespace, times: PrefillModel, count: int, seed: int) -> RequestTrace:
    """Poisson arrivals of prompts; one of four is long, others are a 16th to an 8th of that."""
    drawn = np.random.default_rng(seed)
    short = drawn.integers(args.long // 16, args.long // 8, count)
    prompts = [args.long if n % 4 == 2 else int(short[n]) for n in range(count)]
    work = np.mean([times.seconds(1, 0, prompt) for prompt in prompts]) / args.prefill_ranks
    arrivals = np.cumsum(drawn.exponential(work / args.load, count))
    pairs = zip(arrivals, prompts, strict=True)
    return RequestTrace(tuple(Request(float(arrival), prompt, ANSWER) for arrival, prompt in pairs))


def cluster_of(args: argparse.Namespace, times: PrefillModel) -> ServingCluster:
    """This machine, as the simulator is told it."""
    ranks = args.prefill_ranks
    return ServingCluster(times, DecodeTimes(1e-3, 1e-9), ranks, ranks, 1)


def choose_rates(args: argparse.Namespace, times: PrefillModel) -> ImprovementRates:
    """The improvement rate of least mean time, by the simulator, for other requests."""
    trace, cluster = draw(args, times, 500, seed=99), cluster_of(args, times)
    rates = [ImprovementRates({0.0: rate}) for rate in IMPROVEMENT_RATES]
    return min(rates, key=lambda rate: np.mean(prefill_seconds(trace, cluster, "cdsp", rate)))


def measure(
    args: argparse.Namespace,
    folder: Path,
    times: PrefillModel,
    rates: ImprovementRates,
    trace: RequestTrace,
    degrees: Sequence[int],
) -> dict[str, Measured]:
    """Sends all requests to each server in turn."""
    times.save(folder / "times.json")
    rates.save(folder / "rates.json")
    files = ["--prefill-times", str(folder / "times.json")]
    files += ["--improvement-rates", str(folder / "rates.json")]
    strategies = [*(f"fixed-{degree}" for degree in degrees), "cdsp"]
    found = {each: simulate(trace, cluster_of(args, times), each, rates) for each in strategies}
    with ExitStack() as running:
        servers = {
            each: running.enter_context(
                serving(command(args, folder, each, *files), str(folder), 1)
            )
            for each in strategies
        }
        for number in track(range(args.rounds + 1), "cdsp_processes", "rounds"):
            # The first round warms up. Ways take turns at being the first.
            turn = number % len(strategies)
            asked = [
                Asked(each.arrival, prompt_of(each.prompt, [number, place]), each.answer)
                for place, each in enumerate(trace.requests)
            ]
            for name in (*strategies[turn:], *strategies[:turn]):
                pids = prefill_pids(servers[name], args.prefill_ranks)
                before = cpu_seconds(pids)
                answers = servers[name].ask(asked)
                if number:
                    found[name].ttft.append([each.first for each in answers])
                    found[name].cpu.append(cpu_seconds(pids) - before)
    return found


def prefill_pids(server: Server, ranks: int) -> list[int]:
    """Processes of the prefill ranks: after the API and the engine, the first ones."""
    return [pid for pid in server.pids if is_ours(pid)][2 : 2 + ranks]


def simulate(
    trace: RequestTrace, cluster: ServingCluster, strategy: str, rates: ImprovementRates
) -> Measured:
    """What the simulator says."""
    queue = make_queue(cluster, strategy, rates)
    plans = [queue.place(request.arrival, request.prompt) for request in trace.requests]
    taken = sum(len(chunk.ranks) * chunk.seconds for plan in plans for chunk in plan.chunks)
    return Measured([plan.ttft for plan in plans], taken)


def lines(
    args: argparse.Namespace,
    times: PrefillModel,
    rates: ImprovementRates,
    trace: RequestTrace,
    found: dict[str, Measured],
) -> Iterator[str]:
    """The page."""
    flags = " ".join(sys.argv[1:]).replace(str(args.output), "DIR")
    is_long = np.array([each.prompt == args.long for each in trace.requests])
    mine = found["cdsp"]
    yield from (
        "# CDSP on real processes",
        "",
        f"    python benchmarks/serving/cdsp_processes.py {flags}",
        "",
        f"{args.requests} requests, every fourth of {args.long:,} tokens, others of "
        f"{args.long // 16} to {args.long // 8}, in {trace.requests[-1].arrival:.1f} s: "
        f"{args.load:g} of the load that {args.prefill_ranks} prefill ranks bear with one rank for "
        f"each prompt. One decode rank; a Llama of {args.layers} layers of {args.hidden_size}, "
        f"float32, a thread for each rank, on {os.cpu_count()} cores of {cpu_name()}, which they "
        f"share with engine, API and client; torch {torch.__version__}. Each cell: measured, all "
        f"of {args.rounds} rounds, and simulated by Eq. 1 as it was fitted here to prompts that "
        f"were alone. Improvement rate by the simulator: {rates.at(0.0):g}.",
        "",
    )
    heading = ["strategy", "TTFT mean, s", "short P50", "P90", "long P50", "P90"]
    heading += ["mean over CDSP's", "CPU s of prefill ranks, rank-seconds"]
    yield from (f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading)))
    for name, of in found.items():
        pairs = [np.array(of.ttft), np.array([of.simulated])]
        means = [float(each.mean()) for each in pairs]
        over = [np.mean(of.ttft) / np.mean(mine.ttft), means[1] / np.mean(mine.simulated)]
        cells = [means]
        for which, part in ((~is_long, 50), (~is_long, 90), (is_long, 50), (is_long, 90)):
            cells.append([float(np.percentile(each[:, which], part)) for each in pairs])
        cells += [[float(each) for each in over], [statistics.mean(of.cpu), of.rank_seconds]]
        yield f"| {' | '.join([name, *(f'{a:.2f}, {b:.2f}' for a, b in cells)])} |"
    yield from ("", "Seconds of a prompt that is alone, by the fit:", "")
    lengths = [args.long // part for part in (16, 4, 1)]
    yield from (f"| ranks | {' | '.join(f'{n:,}' for n in lengths)} |", "| --- | --- | --- | --- |")
    for degree in times.degrees:
        alone = " | ".join(f"{times.seconds(degree, 0, n):.3f}" for n in lengths)
        yield f"| {degree} | {alone} |"


if __name__ == "__main__":
    main()

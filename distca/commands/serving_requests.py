"""`distca simulate --serving`: what a serving cluster's strategies make of a trace of requests.

distca simulate --serving --trace short
distca simulate --serving --trace mine.json --prefill-times measured.json --prefill-ranks 8
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from distca.commands.command_line import Parser, check_picture, make_figure
from distca.commands.decode_graphs import overheads_of
from distca.commands.described import (
    add_charge_flags,
    add_cluster_flags,
    add_model_flags,
    cluster_of,
    flag_of,
    model_of,
)
from distca.json_files import read_text
from distca.palette import BLACK, colour_in_turn
from distca.progress import progress
from distca.schedule.serving.cdsp import (
    LOAD_AWARE,
    PREFILL_STRATEGIES,
    TABLE_1,
    ImprovementRates,
    Prefill,
    PrefillModel,
    published_model,
)
from distca.schedule.serving.cdsp.load import Growth
from distca.simulate.requests import (
    PATIENCE,
    PRESETS,
    RequestTrace,
    ServingCluster,
    describe_cluster,
    draw_trace,
    find_capacity,
    light_load,
    prefill_seconds,
    profile_rates,
    read_trace,
    serve,
)
from distca.whole_file import writing

_DESCRIPTION = """\
Predicts the sustainable request rate of a serving cluster, and the latency of first and later
tokens. It compares prefills on a fixed number of ranks, on as many as help the one request
(greedy), on as many as help enough (single-chunk), and in chunks on growing groups (cdsp).
Nothing is served, and no GPU is needed: requests are simulated.
"""
_EXAMPLES = """\
examples:
  distca simulate --serving --trace short
  distca simulate --serving --trace mine.json --prefill-times measured.json --prefill-ranks 8 \\
      --decode-ranks 1 --plot serving.png

A trace is a JSON list of {"arrival": seconds, "prompt": tokens, "answer": tokens}. Prefill times
are what PrefillModel.save wrote, or a JSON list of measured prefills of requests that were alone:
{"degree": ranks, "tokens": new, "seconds": s, "cached": before}.
"""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("simulate --serving", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--serving",
        action="store_true",
        help="Simulate the serving of requests instead of training.",
    )
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--trace",
        required=True,
        metavar="NAME|FILE",
        help="Lengths and arrival times of requests: a JSON file, or one of Tetris's mixes: "
        f"{', '.join(PRESETS)}.",
    )
    requests.add_argument(
        "--requests",
        type=int,
        default=1000,
        metavar="N",
        help="Number of requests to draw if --trace is a name.",
    )
    requests.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed with which requests are drawn."
    )
    requests.add_argument(
        "--arrivals-per-second",
        type=float,
        metavar="X",
        help="Request rate at which the latency per token is simulated. Arrival times are "
        "stretched to this rate. Default: the highest rate that a fixed or the greedy strategy "
        "sustains.",
    )
    ranks = parser.add_argument_group("ranks")
    for name, default, what in (
        ("prefill_ranks", 16, "Number of ranks that prefill, each with one GPU."),
        ("decode_ranks", 2, "Number of ranks that decode."),
        ("decode_tensor_parallel_size", 8, "Number of GPUs per decode rank."),
        ("backends", 4, "Maximum number of requests that a decode rank receives at the same time."),
        ("block_size", 128, "Number of tokens per block of the KV cache."),
        (
            "max_num_batched_tokens",
            131_072,
            "Maximum number of tokens in an iteration of the prefill ranks. Longer prompts are "
            "computed in chunks.",
        ),
    ):
        ranks.add_argument(flag_of(name), type=int, default=default, metavar="N", help=what)
    ranks.add_argument(
        "--prefill-strategies",
        nargs="+",
        choices=PREFILL_STRATEGIES,
        metavar="NAME",
        help=f"Strategies to compare: {', '.join(PREFILL_STRATEGIES)}. Default: all possible ones.",
    )
    ranks.add_argument(
        "--prefill-times",
        type=Path,
        metavar="FILE",
        help="Prefill times from `distca tune groups`, with which all strategies plan. "
        "Default: Tetris's Table 1, llama-8b on dgx-a100.",
    )
    add_model_flags(parser)
    add_cluster_flags(parser)
    add_charge_flags(parser)
    parser.set_defaults(model="llama-8b", cluster="dgx-a100")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="Draw the slowest times to the first token, by load, in the format of the suffix "
        "(.png, .svg).",
    )
    return parser


@dataclass(frozen=True)
class Row:
    """Figures of a strategy: requests a second, then seconds at the load that is shown."""

    strategy: str
    capacity: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    per_token_p50: float | None
    per_token_p99: float | None
    ranks: float
    improvement_rates: dict[float, Growth] | None


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    args = build_parser().parse(argv)
    check_picture("--plot", args.plot)
    if args.requests < 1 or args.seed < 0:
        raise ValueError("--requests must be at least 1, and --seed not negative")
    if args.arrivals_per_second is not None and not 0 < args.arrivals_per_second < float("inf"):
        raise ValueError(f"--arrivals-per-second {args.arrivals_per_second} must be positive")
    cluster = _cluster(args)
    trace = _trace(args, cluster)
    names = args.prefill_strategies or _possible(cluster)
    limit = PATIENCE * light_load(trace, cluster)
    rates: dict[str, ImprovementRates] = {}
    bears: dict[str, float] = {}
    # Those with profiled rates take longer than others.
    with progress("distca simulate --serving", "strategies", len(names), estimates=False) as shown:
        for name in names:
            shown.describe(name)
            rates[name] = _rates(trace, cluster, name, args.seed)
            bears[name] = find_capacity(trace, cluster, name, rates[name], limit).per_second
            shown.update()
    load = args.arrivals_per_second
    if load is None:
        fixed = [bears[name] for name in names if name not in LOAD_AWARE]
        load = max(fixed or bears.values())
    if load <= 0:
        raise ValueError("no strategy sustains any load: give more ranks, or shorter prompts")
    rows = [_row(trace, cluster, name, rates[name], bears[name], load) for name in names]
    # Before the picture, so that it is not lost where that cannot be written.
    if args.json:
        sys.stdout.write(
            json.dumps(
                {"limit": limit, "load": load, "strategies": [asdict(row) for row in rows]},
                indent=1,
            )
            + "\n"
        )
    else:
        sys.stdout.write("\n".join(_lines(args, cluster, trace, rows, limit, load)) + "\n")
    if args.plot is not None:
        _plot(args.plot, trace, cluster, {name: rates[name] for name in names}, limit, bears)
    return 0


def _cluster(args: argparse.Namespace) -> ServingCluster:
    times = _times(args)
    name = args.model if args.model is not None else "custom"
    times.check_is_of(args.cluster, name)
    cluster = describe_cluster(
        times,
        cluster_of(args),
        model_of(args),
        args.prefill_ranks,
        args.decode_ranks,
        args.decode_tensor_parallel_size,
        args.backends,
        args.block_size,
        args.max_num_batched_tokens,
        overheads_of(args, "steps")[1],
    )
    if min(times.degrees) > args.prefill_ranks:
        raise ValueError(
            f"--prefill-ranks {args.prefill_ranks} are fewer than the smallest group that was "
            f"measured, {min(times.degrees)}: give more, or measure prefills on fewer"
        )
    return cluster


def _times(args: argparse.Namespace) -> PrefillModel:
    path: Path | None = args.prefill_times
    if path is None:
        return published_model()
    wanted = f"give a JSON list of objects such as {json.dumps(asdict(TABLE_1[0]))}"
    text = read_text(path, wanted, "--prefill-times")
    try:
        rows = json.loads(text)
        if not isinstance(rows, list):
            return PrefillModel.load(path)
        measured = [
            Prefill(
                int(row["degree"]), int(row["tokens"]), float(row["seconds"]), row.get("cached", 0)
            )
            for row in rows
        ]
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--prefill-times {path} has no measured prefills: {wanted}") from error
    times = PrefillModel.fit(measured, args.cluster, args.model or "custom")
    worst = max(map(abs, times.errors(measured)))
    sys.stderr.write(f"distca simulate: Eq. 1 is within {worst:.1%} of every measured prefill\n")
    return times


def _trace(args: argparse.Namespace, cluster: ServingCluster) -> RequestTrace:
    if args.trace in PRESETS:
        trace = draw_trace(PRESETS[args.trace], args.requests, args.seed)
    elif Path(args.trace).is_file():
        trace = read_trace(Path(args.trace))
    else:
        raise ValueError(
            f"--trace {args.trace} is not a file, and none of {', '.join(PRESETS)}: give one"
        )
    longest = max(request.prompt + request.answer for request in trace.requests)
    if longest > cluster.decode_tokens:
        raise ValueError(
            f"a request of {longest} tokens is more than a decode rank holds, "
            f"{cluster.decode_tokens}: give --decode-tensor-parallel-size or --memory-gb more"
        )
    if trace.requests[-1].arrival <= 0:
        raise ValueError("all requests arrive at time 0: give arrival times that differ")
    return trace


def _possible(cluster: ServingCluster) -> list[str]:
    """Returns the strategies that the ranks and the measured degrees allow."""
    return [
        name
        for name in PREFILL_STRATEGIES
        if not name.startswith("fixed-") or _divides(int(name.removeprefix("fixed-")), cluster)
    ]


def _divides(degree: int, cluster: ServingCluster) -> bool:
    return cluster.prefill_ranks % degree == 0 and degree in cluster.times.degrees


def _rates(trace: RequestTrace, cluster: ServingCluster, name: str, seed: int) -> ImprovementRates:
    """Profiles improvement rates on the trace's lengths in another order."""
    if name not in LOAD_AWARE:
        return ImprovementRates({0.0: 0.0})
    order = np.random.default_rng(seed + 1).permutation(len(trace.requests))
    shuffled = RequestTrace(
        tuple(
            replace(trace.requests[other], arrival=request.arrival)
            for request, other in zip(trace.requests, order, strict=True)
        )
    )
    return profile_rates([shuffled], cluster, name)


def _row(
    trace: RequestTrace,
    cluster: ServingCluster,
    name: str,
    rates: ImprovementRates,
    capacity: float,
    load: float,
) -> Row:
    served = serve(trace.at_rate(load), cluster, name, rates)
    p50, p90, p99 = (float(np.percentile(served.ttft, percent)) for percent in (50, 90, 99))
    middle = slowest = None
    if served.per_token:
        middle, slowest = (float(np.percentile(served.per_token, each)) for each in (50, 99))
    ranks = float(np.mean(served.ranks))
    known = dict(rates.by_arrivals) if name in LOAD_AWARE else None
    return Row(name, capacity, p50, p90, p99, middle, slowest, ranks, known)


def _lines(
    args: argparse.Namespace,
    cluster: ServingCluster,
    trace: RequestTrace,
    rows: Sequence[Row],
    limit: float,
    load: float,
) -> list[str]:
    mean = np.mean([request.prompt for request in trace.requests])
    lines = [
        f"{len(trace.requests):,} requests of {args.trace}, {mean:,.0f} tokens on average; "
        f"{cluster.prefill_ranks} prefill and {cluster.decode_ranks} decode ranks (TP "
        f"{args.decode_tensor_parallel_size}) of {args.cluster}; simulated",
        f"load: requests/s with 99% of first tokens within {limit:.2f} s, {PATIENCE:.0f} times "
        "the mean of a request alone",
        f"seconds to the first token, and ms of each further one, at {load:.2f} requests/s",
        f"{'':14}{'load':>8}{'TTFT P50':>10}{'P90':>8}{'P99':>8}{'ms P50':>9}{'P99':>8}"
        f"{'ranks':>8}",
    ]
    for row in rows:
        ms = [
            "-" if x is None else f"{1e3 * x:.2f}" for x in (row.per_token_p50, row.per_token_p99)
        ]
        lines.append(
            f"{row.strategy:14}{row.capacity:>8.2f}{row.ttft_p50:>10.2f}{row.ttft_p90:>8.2f}"
            f"{row.ttft_p99:>8.2f}{ms[0]:>9}{ms[1]:>8}{row.ranks:>8.2f}"
        )
    for row in rows:
        if row.improvement_rates is not None:
            known = ", ".join(f"{at:.2f}: {_said(g)}" for at, g in row.improvement_rates.items())
            lines.append(f"improvement rates of {row.strategy} by requests/s: {known}")
    lines.append(
        "prefill ranks: DistCA's engine, in which all wait for an iteration's slowest group "
        "(benchmarks/results/serving/cdsp_ablations.md has Tetris's, whose groups do not)"
    )
    return lines


def _said(growth: Growth) -> str:
    if not isinstance(growth, tuple):
        return str(growth)
    rate, ranks = growth
    return f"{rate} on at most {ranks} rank{'s' * (ranks > 1)}"


def _plot(
    path: Path,
    trace: RequestTrace,
    cluster: ServingCluster,
    rates: dict[str, ImprovementRates],
    limit: float,
    bears: dict[str, float],
) -> None:
    figure = make_figure(figsize=(7, 4.5))
    axes = figure.subplots()
    colour_in_turn(axes)
    loads = np.linspace(0.1, 1.2, 9) * max(bears.values())
    for name, known in rates.items():
        slowest = [
            np.percentile(prefill_seconds(trace.at_rate(load), cluster, name, known), 99)
            for load in loads
        ]
        axes.plot(loads, slowest, marker="o", label=name)
    axes.axhline(limit, color=BLACK, linestyle="--", linewidth=1.0)
    axes.set(
        xlabel="requests/s",
        ylabel="P99 of seconds to the first token (dashed: limit)",
        ylim=(0, 2 * limit),
    )
    axes.legend()
    with writing(path) as written:
        figure.savefig(written, dpi=110)

"""`distca plan`: makes, compares, saves and draws plans for a batch of documents.

    distca plan --distribution pretrain --servers 64 --tokens-per-server 65536 --model llama-34b
    distca plan --lengths lengths.json --servers 64 --tokens-per-server 65536 --compare
    distca plan --lengths corpus.idx --servers 64 --tokens-per-server 65536 --seed 1 ...
    distca plan --load plan.json --plot plan.png

A JSON list is one batch, as it is; of a Megatron index as many documents are drawn as the servers
hold. Nothing runs on a GPU: it shows what a scheduler would do, and what it costs, exactly.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from distca.cost.link import Links
from distca.cost.model import CostModel
from distca.cost.models import MODELS, ModelSize
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan, load_plan, place_in_turn, save_plan
from distca.plan.span import Int64s
from distca.schedule import (
    SCHEDULERS,
    PlanSummary,
    ScheduleConfig,
    describe,
    even_rooms,
    format_summary,
    make_scheduler,
)


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="distca plan",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    documents = parser.add_argument_group("documents (one of)").add_mutually_exclusive_group(
        required=True
    )
    documents.add_argument(
        "--lengths", type=Path, metavar="FILE", help="a JSON list of lengths, or a Megatron .idx"
    )
    documents.add_argument(
        "--distribution", metavar="NAME", help="a named distribution: see data/lengths.py"
    )
    documents.add_argument("--load", type=Path, metavar="FILE", help="a saved plan, as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the distribution, or the draw")
    parser.add_argument(
        "--max-document-length", type=int, metavar="TOKENS", help="cut longer documents into pieces"
    )
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--servers", type=int, help="ranks, each of which is an attention server")
    ranks.add_argument("--tokens-per-server", type=int, help="tokens that a rank can own")
    ranks.add_argument("--server-speeds", metavar="S0,S1,...", help="relative; default: all alike")
    ranks.add_argument(
        "--servers-per-node", type=int, default=1, help="servers that share a node's fast links"
    )
    ranks.add_argument("--node-gb-per-s", type=float, default=450.0, help="within a node")
    ranks.add_argument("--network-gb-per-s", type=float, default=50.0, help="between nodes")
    model = parser.add_argument_group("model (a preset, or the heads)")
    model.add_argument("--model", metavar="NAME", help=", ".join(MODELS))
    model.add_argument("--heads", type=int, metavar="N")
    model.add_argument("--kv-heads", type=int, metavar="N")
    model.add_argument("--head-dim", type=int, default=128, metavar="N")
    model.add_argument("--dtype-bytes", type=int, default=2, metavar="N")
    model.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    model.add_argument("--window-left", type=int, metavar="TOKENS", help="sliding window")
    schedule = parser.add_argument_group("schedule")
    schedule.add_argument(
        "--scheduler", default="tiles", metavar="NAME", help=", ".join(SCHEDULERS)
    )
    schedule.add_argument("--tolerance", type=float, default=0.1)
    schedule.add_argument(
        "--placement",
        choices=("free", "sequential"),
        default="free",
        help="free: as the scheduler likes best; sequential: documents one after the other",
    )
    schedule.add_argument("--profile", type=Path, metavar="FILE", help="made by `distca profile`")
    schedule.add_argument("--max-buffer-bytes", type=int, help="received by a server at most")
    schedule.add_argument("--context-parallel-size", type=int, help="of the baselines with groups")
    output = parser.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="all schedulers in one table")
    output.add_argument("--json", action="store_true", help="all figures, as JSON")
    output.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the plan")
    output.add_argument("--save", type=Path, metavar="FILE", help="the plan itself, as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        _run(args)
    except (ValueError, ImportError) as error:
        parser.exit(2, f"distca plan: {error}\n")
    return 0


def _run(args: argparse.Namespace) -> None:
    if args.load is not None:
        plan, configuration = load_plan(args.load)
        config = _saved_config(args, configuration)
        _show(args, plan, config, describe(plan, config), {})
        return
    config = _config(args)
    rooms, lengths = _rooms_and_lengths(args)
    if args.compare:
        if args.save or args.plot:
            raise ValueError("--compare makes several plans: --save and --plot are for one")
        _compare(args, config, lengths, rooms)
        return
    plan, seconds = _timed_plan(args, args.scheduler, config, lengths, rooms)
    _show(args, plan, config, describe(plan, config), seconds)


def _rooms_and_lengths(args: argparse.Namespace) -> tuple[Int64s, Int64s]:
    from data.lengths import DISTRIBUTIONS, draw, read_lengths

    for flag, value in (
        ("--servers", args.servers),
        ("--tokens-per-server", args.tokens_per_server),
    ):
        if value is None or value < 1:
            raise ValueError(f"give {flag}, at least 1")
    total = args.servers * args.tokens_per_server
    if args.lengths is not None:
        lengths = read_lengths(args.lengths)
    elif args.distribution in DISTRIBUTIONS:
        lengths = draw(DISTRIBUTIONS[args.distribution], total, args.seed)
    else:
        raise ValueError(
            f"no distribution {args.distribution!r}: choose from {', '.join(DISTRIBUTIONS)}"
        )
    longest = args.max_document_length
    if longest is not None:
        if longest < 1:
            raise ValueError(f"--max-document-length {longest} must be at least 1")
        lengths = cut_to_pieces(lengths, longest)
    if args.lengths is not None and args.lengths.suffix == ".idx" and lengths.sum() > total:
        lengths = shuffled(lengths, total, args.seed)
    return even_rooms(int(lengths.sum()), args.servers, args.tokens_per_server), lengths


def cut_to_pieces(lengths: Int64s, longest: int) -> Int64s:
    """Documents as pieces of at most `longest` tokens, int64."""
    pieces = -(-lengths // longest)
    cut = np.full(int(pieces.sum()), longest, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * longest
    return cut


def shuffled(lengths: Int64s, tokens: int, seed: int) -> Int64s:
    """Documents of a corpus in a random order, int64, the last one cut where the tokens are full.

    Args:
        lengths: of the corpus, int64.
        tokens: how many; as many epochs as it takes, each in an order of its own.
        seed: of the orders.
    """
    generator = np.random.default_rng(seed)
    epochs = -(-tokens // int(lengths.sum()))
    drawn = np.concatenate([generator.permutation(lengths) for _ in range(epochs)])
    until = np.cumsum(drawn)
    count = int(np.searchsorted(until, tokens)) + 1
    drawn = drawn[:count].copy()
    drawn[-1] -= until[count - 1] - tokens
    return drawn


def _shape(args: argparse.Namespace) -> AttentionShape:
    if (args.model is None) == (args.heads is None):
        raise ValueError("give either --model or --heads (and --kv-heads)")
    if args.model is not None and args.model not in MODELS:
        raise ValueError(f"no model {args.model!r}: choose from {', '.join(MODELS)}")
    size = (
        MODELS[args.model]
        if args.model is not None
        else ModelSize(1, 0, args.heads, args.kv_heads or args.heads, args.head_dim, 0)
    )
    return size.attention_shape(args.tensor_model_parallel_size, args.dtype_bytes)


def _config(args: argparse.Namespace) -> ScheduleConfig:
    shape = _shape(args)
    cost_model: CostModel | None = None
    if args.profile is not None:
        cost_model = Profile.load(args.profile)
        if cost_model.shape != shape:
            raise ValueError(f"{args.profile} was measured for {cost_model.shape}, not {shape}")
    speeds = None
    if args.server_speeds is not None:
        try:
            speeds = tuple(float(part) for part in args.server_speeds.split(","))
        except ValueError as error:
            raise ValueError(f"--server-speeds {args.server_speeds}: {error}") from error
    if args.max_buffer_bytes is not None and args.scheduler != "tiles" and not args.compare:
        raise ValueError(f"--max-buffer-bytes binds tiles alone, not {args.scheduler}")
    return ScheduleConfig(
        tolerance=args.tolerance,
        shape=shape,
        cost_model=cost_model,
        links=Links(args.servers_per_node, args.node_gb_per_s, args.network_gb_per_s),
        server_speeds=speeds,
        max_buffer_bytes=args.max_buffer_bytes,
        context_parallel_size=args.context_parallel_size,
    )


def _saved_config(args: argparse.Namespace, configuration: dict[str, Any]) -> ScheduleConfig:
    """What a saved plan was made for; without measured times, which are not saved with it."""
    if args.model is not None or args.heads is not None or "shape" not in configuration:
        return _config(args)
    try:
        speeds = configuration.get("server_speeds")
        return ScheduleConfig(
            tolerance=float(configuration.get("tolerance", args.tolerance)),
            shape=AttentionShape(**configuration["shape"]),
            links=Links(**configuration.get("links", {})),
            server_speeds=None if speeds is None else tuple(speeds),
        )
    except TypeError as error:
        raise ValueError(f"{args.load}: its configuration cannot be read ({error})") from error


def _timed_plan(
    args: argparse.Namespace, name: str, config: ScheduleConfig, lengths: Int64s, rooms: Int64s
) -> tuple[Plan, dict[str, float]]:
    """A valid plan, with the seconds of planning and of what the runtime derives from it."""
    from distca.runtime.exchange import build_exchange

    scheduler, mask = make_scheduler(name, config), Mask(args.window_left)
    start = time.perf_counter()
    if args.placement == "free":
        plan = scheduler.plan(lengths, rooms, mask)
    else:
        plan = scheduler.schedule(lengths, place_in_turn(lengths, rooms), mask)
    planned = time.perf_counter()
    busiest = int(np.bincount(plan.tasks.server, minlength=len(rooms)).argmax())
    build_exchange(plan, busiest)
    seconds = {
        "plan_seconds": planned - start,
        "exchange_seconds": time.perf_counter() - planned,
    }
    plan.validate()
    return plan, seconds


def _show(
    args: argparse.Namespace,
    plan: Plan,
    config: ScheduleConfig,
    summary: PlanSummary,
    seconds: dict[str, float],
) -> None:
    """Prints the figures of one plan, and writes its files."""
    if args.save is not None:
        save_plan(plan, args.save, _configuration(args, config))
    if args.plot is not None:
        from distca.schedule.plot import plot_plan

        plot_plan(plan, config, args.plot)
    if args.json:
        _write(json.dumps({**asdict(summary), **seconds}, indent=1))
        return
    _write(format_summary(summary))
    if seconds:
        _write(
            f"  planned in      {1e3 * seconds['plan_seconds']:.1f} ms, one rank's exchange in "
            f"{1e3 * seconds['exchange_seconds']:.1f} ms"
        )


def _configuration(args: argparse.Namespace, config: ScheduleConfig) -> dict[str, Any]:
    return {
        "servers": args.servers,
        "tokens_per_server": args.tokens_per_server,
        "tolerance": config.tolerance,
        "shape": asdict(config.shape),
        "links": asdict(config.links),
        "server_speeds": config.server_speeds,
        "max_buffer_bytes": config.max_buffer_bytes,
        "cost_model": None if config.cost_model is None else config.cost_model.description,
    }


_COLUMNS = (
    ("max/mean", "load_max_over_mean", 1.0, 3),
    ("GB", "bytes_total", 1e9, 3),
    ("GB sent", "bytes_max_sent", 1e9, 3),
    ("GB recv", "bytes_max_received", 1e9, 3),
    ("link ms", "link_seconds_max", 1e-3, 2),
    ("tasks", "tasks", 1, 0),
    ("calls", "kernel_calls", 1, 0),
    ("tokens", "tokens_max_over_mean", 1.0, 3),
    ("plan ms", "plan_seconds", 1e-3, 1),
)


def _compare(
    args: argparse.Namespace, config: ScheduleConfig, lengths: Int64s, rooms: Int64s
) -> None:
    """One row for each scheduler; what cannot be made says why."""
    rows: dict[str, dict[str, Any]] = {}
    for name in SCHEDULERS:
        try:
            plan, seconds = _timed_plan(args, name, config, lengths, rooms)
            rows[name] = {**asdict(describe(plan, config)), **seconds}
        except ValueError as error:
            rows[name] = {"error": str(error)}
    if args.json:
        _write(json.dumps(rows, indent=1))
        return
    _write(f"{'scheduler':16}" + "".join(f"{title:>10}" for title, *_ in _COLUMNS))
    for name, row in rows.items():
        if "error" in row:
            _write(f"{name:16}{row['error']}")
            continue
        cells = (f"{row[key] / unit:>10,.{digits}f}" for _, key, unit, digits in _COLUMNS)
        _write(f"{name:16}" + "".join(cells))
    _write("(sent, recv: of the busiest rank; one layer, forward; tokens: most of a rank / mean)")


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())

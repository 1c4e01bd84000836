"""`distca plan` and `distca simulate` for inference: a prefill, or a step that decodes.

distca plan prefill --new-tokens 3200 --cached-tokens 124800 --context-parallel-size 4 \\
    --model llama-405b --tensor-parallel-size 8 --plot prefill.png
distca simulate decode --sequences 64 --cached-tokens 132000 --context-parallel-size 4 \\
    --model llama-70b --tensor-parallel-size 8
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from distca.commands.command_line import Parser, check_output
from distca.commands.described import (
    RUNAHEAD,
    add_charge_flags,
    add_cluster_flags,
    add_model_flags,
    add_selection_flags,
    cluster_of,
    given_shares,
    model_of,
)
from distca.commands.fewest_ranks import AUTO, add_ranks_flag
from distca.commands.layout_step import plan_layouts, simulate_layouts
from distca.commands.served_chain import SEARCHED
from distca.commands.served_layouts import SP_TP, layout_choice
from distca.commands.served_sparsity import CSPS, add_sparsity_flags, near_to_far
from distca.commands.serving_report import as_json, format_plan, format_simulated, plot_steps
from distca.cost.kernel_time import CostModel
from distca.cost.profile import Profile
from distca.plan import Mask, Placement, Plan, save_plan
from distca.plan.span import Int64s
from distca.schedule.serving import (
    SELECTORS,
    STRATEGIES,
    PaperRule,
    Selector,
    Sharding,
    Strategy,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.schedule.serving.csps.layouts import LayoutChoice
from distca.schedule.serving.csps.pipeline import NearToFar, shard_near
from distca.schedule.serving.layer_plans import plan_layers
from distca.schedule.serving.partitions import Chain, Shares, shard_in_chain
from distca.schedule.serving.report import describe_steps
from distca.simulate import save_trace
from distca.simulate.serving import (
    InferenceCosts,
    SimulatedSelector,
    memory_bytes,
    searched_shares,
    simulate_step,
)

Kind = Literal["prefill", "decode"]
KINDS: tuple[Kind, ...] = ("prefill", "decode")
HELD = ("evenly", "stripes", "first-rank")

_DESCRIPTIONS = {
    ("plan", "prefill"): "Plans the core attention of a prompt, or of a turn over cached tokens.",
    ("plan", "decode"): "Plans the core attention of a step that decodes a token of each sequence.",
    ("simulate", "prefill"): "Says how long a prefill takes on a cluster with each strategy.",
    ("simulate", "decode"): "Says how long a step takes that decodes a token of each sequence.",
}
_EXAMPLES = {
    "prefill": "{} prefill --new-tokens 3200 --cached-tokens 124800 --context-parallel-size 4 \\\n"
    "      --model llama-405b --tensor-parallel-size 8 --mlp-dtype-bytes 1",
    "decode": "{} decode --sequences 64 --cached-tokens 132000 --context-parallel-size 4 \\\n"
    "      --model llama-70b --tensor-parallel-size 8",
}


def build_parser(command: str, kind: Kind) -> Parser:
    """Makes the parser of a command's flags.

    Args:
        command: "plan" or "simulate".
        kind: what is planned or simulated.
    """
    example = _EXAMPLES[kind].format(f"distca {command}")
    epilog = f"example:\n  {example}\n"
    parser = Parser(f"{command} {kind}", f"{_DESCRIPTIONS[command, kind]}\n", epilog)
    _add_sequences(parser, kind)
    ranks = parser.add_argument_group("ranks")
    add_ranks_flag(ranks, "all sequences", required=True)
    ranks.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="T", help="GPUs of each rank."
    )
    ranks.add_argument(
        "--cp-kv-cache-interleave-size",
        type=int,
        default=16,
        metavar="N",
        help="Consecutive decoded positions that one rank owns.",
    )
    ranks.add_argument(
        "--held",
        choices=HELD,
        default="evenly",
        help="Who holds the cached tokens: all ranks as after one prefill, all in stripes as after "
        "decoding, or the first rank alone.",
    )
    if kind == "prefill":
        add_selection_flags(ranks, "auto", SEARCHED)
        add_sparsity_flags(ranks)
    model = add_model_flags(parser)
    model.add_argument(
        "--dtype-bytes", type=int, default=2, metavar="N", help="Bytes of an element: 2 for bf16."
    )
    model.add_argument(
        "--mlp-dtype-bytes",
        type=int,
        choices=(1, 2),
        default=2,
        help="Bytes of the MLP's weights; 1: its products take half the time, too.",
    )
    model.add_argument(
        "--window-left",
        type=int,
        metavar="TOKENS",
        help="Sliding window: a query sees so many earlier tokens. Default: all of its sequence.",
    )
    cluster = add_cluster_flags(parser)
    cluster.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="Kernel times that `distca profile` measured. Default: the cluster's rates.",
    )
    add_charge_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    if command == "plan":
        output.add_argument(
            "--plot", type=Path, metavar="FILE", help="Draw the steps; the suffix says how."
        )
        output.add_argument(
            "--save", type=Path, metavar="FILE", help="Write the plan as JSON (`plan --load`)."
        )
    else:
        output.add_argument(
            "--trace", type=Path, metavar="FILE", help="Write a timeline for ui.perfetto.dev."
        )
    return parser


def _add_sequences(parser: Parser, kind: Kind) -> None:
    group = parser.add_argument_group("sequences")
    if kind == "prefill":
        group.add_argument(
            "--new-tokens",
            type=int,
            nargs="+",
            required=True,
            metavar="T",
            help="New tokens of each sequence.",
        )
    else:
        group.add_argument(
            "--sequences", type=int, default=1, metavar="N", help="Sequences that are decoded."
        )
    group.add_argument(
        "--cached-tokens",
        type=int,
        nargs="+",
        default=[0],
        metavar="P",
        help="Tokens before those, whose keys and values are kept: one number for all sequences, "
        "or one for each.",
    )


@dataclass(frozen=True)
class StepCase:
    """What is planned.

    Attributes:
        kind: prefill or decode.
        held: who holds the cached tokens.
        new: who owns the new ones.
        mask: mask of all layers.
        costs: costs of the model on the cluster.
        cost_model: seconds of tasks.
        near: how keys travel from near to far; None: they don't.
    """

    kind: Kind
    held: Placement
    new: Placement
    mask: Mask
    costs: InferenceCosts
    cost_model: CostModel
    near: NearToFar | None = None

    def layers(self, strategy: Strategy | NearToFar) -> list[Plan]:
        """The plan of each layer."""
        layers = self.costs.model.layers
        if isinstance(strategy, str):
            return [self.plan(strategy)] * layers
        plans = plan_layers(lambda _: self.held, self.new, [self.mask], strategy)
        return [plans.of(layer, self.mask) for layer in range(layers)]

    def plan(self, strategy: Strategy | NearToFar) -> Plan:
        """The plan with a strategy, as `distca generate` makes it, of a layer that drops most."""
        if not isinstance(strategy, str):
            found = self.layers(strategy)
            return min(found, key=lambda plan: int(plan.tasks.kept_pairs(plan.mask).mean(1).sum()))
        prefill = self.kind == "prefill"
        shape, ranks = self.costs.shape, self.new.world_size
        groups = head_groups(shape.heads, shape.kv_heads, ranks)
        return step_plan(
            self.held, self.new, strategy, self.mask, in_steps=prefill, head_groups=groups
        )

    def chosen(self, strategy: str, selector: str) -> Strategy | NearToFar:
        """The strategy that flags ask for."""
        if self.near is not None:
            return self.near
        if self.kind == "decode":
            return "pass-q"
        if strategy in (RUNAHEAD, SP_TP):
            return "pass-kv"
        if strategy != "auto":
            return next(each for each in get_args(Strategy) if each == strategy)
        return self.selector(selector).choose(self.held, self.new, self.plan)

    def selector(self, name: str) -> Selector:
        """Who chooses, on the described cluster."""
        costs, ranks = self.costs, self.new.world_size
        if name == "paper":
            rate = costs.cluster.attention_tflops * 1e12
            return PaperRule(costs.shape, ranks, rate, costs.bytes_per_second(ranks))
        return SimulatedSelector(costs.shape, costs.cluster, costs.links, self.cost_model)


def read_case(args: argparse.Namespace, kind: Kind) -> StepCase:
    """Reads the flags.

    Raises:
        ValueError: they cannot be used.
    """
    ranks = args.context_parallel_size
    for flag, value in (
        ("--context-parallel-size", 1 if ranks == AUTO else ranks),
        ("--tensor-parallel-size", args.tensor_parallel_size),
        ("--cp-kv-cache-interleave-size", args.cp_kv_cache_interleave_size),
        ("--dtype-bytes", args.dtype_bytes),
        ("--sequences", getattr(args, "sequences", 1)),
        ("--new-tokens", min(getattr(args, "new_tokens", [1]))),
    ):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    if min(args.cached_tokens) < 0 or (args.window_left or 0) < 0:
        raise ValueError("--cached-tokens and --window-left must not be negative")
    new = np.array(args.new_tokens if kind == "prefill" else [1] * args.sequences, dtype=np.int64)
    cached = np.array(args.cached_tokens, dtype=np.int64)
    if len(cached) not in (1, len(new)):
        raise ValueError(
            f"--cached-tokens has {len(cached)} numbers for {len(new)} sequences: give one for "
            "all, or one for each"
        )
    starts = np.broadcast_to(cached, new.shape).copy()
    stripe = args.cp_kv_cache_interleave_size
    costs = InferenceCosts(
        model_of(args),
        cluster_of(args),
        args.tensor_parallel_size,
        args.dtype_bytes,
        args.mlp_dtype_bytes,
    )
    if ranks == AUTO:
        return _on_fewest_ranks(args, kind, costs, int((starts + new).sum()))
    numbers = np.arange(len(new), dtype=np.int64)
    cost_model = _cost_model(args, costs)
    if kind == "decode":
        owners = shard_in_stripes(starts, starts + new, numbers, stripe, ranks)
    elif args.prefill_strategy == RUNAHEAD:
        owners = _chain(args, costs, cost_model)(starts, starts + new)
    elif args.prefill_strategy == CSPS:
        given_shares(args, ranks)
        owners = shard_near(starts, starts + new, ranks)
    else:
        given_shares(args, ranks)
        owners = shard_evenly(starts, starts + new, ranks)
    return StepCase(
        kind,
        _held(starts, args.held, stripe, ranks),
        owners,
        Mask(args.window_left),
        costs,
        cost_model,
        _near_to_far(args, costs, ranks) if kind == "prefill" else None,
    )


_MORE_RANKS = 64
"""Numbers of ranks that are tried, beyond those that keys and values alone need."""


def _on_fewest_ranks(
    args: argparse.Namespace, kind: Kind, costs: InferenceCosts, tokens: int
) -> StepCase:
    """The case on as few ranks as have room for weights, keys, values and buffers, which the flags
    then have.

    Raises:
        ValueError: there is none.
    """
    room = costs.cluster.usable_bytes - costs.state_bytes()
    of_all = tokens * costs.model.layers * costs.shape.kv_row_bytes
    # Whole racks, if there are any.
    of_node = getattr(args, "ranks_per_node", None) or costs.links.ranks_per_node
    racks = getattr(args, "nodes_per_rack", None)
    unit = 1 if racks is None else max(of_node * racks, 1)
    first = int(-(-of_all // room)) if room > 0 else 0
    for number in range(_MORE_RANKS if room > 0 else 0):
        args.context_parallel_size = (-(-first // unit) + number) * unit
        case = read_case(args, kind)
        plans = case.layers(_chosen(args, case))
        if memory_bytes(plans, costs).max() <= costs.cluster.usable_bytes:
            return case
    raise ValueError(
        f"--context-parallel-size {AUTO}: weights take {costs.state_bytes() / 1e9:.1f} GB of the "
        f"{costs.cluster.usable_bytes / 1e9:.1f} of a GPU, and no number of ranks has room for the "
        "rest: raise --tensor-parallel-size"
    )


def _near_to_far(args: argparse.Namespace, costs: InferenceCosts, ranks: int) -> NearToFar | None:
    """How keys travel from near to far, as flags describe it; None: they don't."""
    windows = [args.window_left] * costs.model.layers
    heads = costs.shape.kv_heads, args.tensor_parallel_size
    return near_to_far(args, windows, *heads, ranks, costs.links.ranks_per_node)


def _chain(args: argparse.Namespace, costs: InferenceCosts, cost_model: CostModel) -> Sharding:
    """The chain of a prefill that `--partition` describes."""
    ranks = args.context_parallel_size
    shares = given_shares(args, ranks)
    if shares is None and args.partition != SEARCHED:
        raise ValueError(
            f"--partition {args.partition}: give even, {SEARCHED}, or a share for each rank, such "
            "as 0.4,0.33,0.27"
        )
    if shares is not None:
        return Chain(ranks, shares)

    @cache
    def searched(start: int, end: int) -> Shares:
        return searched_shares(end - start, costs, cost_model, ranks, start)

    return partial(shard_in_chain, ranks=ranks, shares_of=searched)


def _held(starts: Int64s, how: str, stripe: int, ranks: int) -> Placement:
    nothing, numbers = np.zeros_like(starts), np.arange(len(starts), dtype=np.int64)
    if not starts.any():
        return nobody_holds(ranks)
    if how == "evenly":
        return shard_evenly(nothing, starts, ranks)
    if how == "stripes":
        return shard_in_stripes(nothing, starts, numbers, stripe, ranks)
    having = starts > 0
    first = nothing[having]
    return Placement(numbers[having], first, starts[having], first, ranks)


def _cost_model(args: argparse.Namespace, costs: InferenceCosts) -> CostModel:
    if args.profile is None:
        return costs.cluster.inference_cost(costs.shape)
    profile = Profile.load(args.profile)
    if profile.shape != costs.shape:
        raise ValueError(
            f"--profile {args.profile} was measured for {profile.shape}, but this is "
            f"{costs.shape}: run `distca profile` with these heads"
        )
    return profile


def plan(argv: list[str]) -> int:
    """Runs `distca plan prefill` or `distca plan decode`; returns its exit status."""
    kind: Kind = "prefill" if argv[0] == "prefill" else "decode"
    args = build_parser("plan", kind).parse(argv[1:])
    check_output("--plot", args.plot)
    check_output("--save", args.save)
    case = read_case(args, kind)
    if layout := _layout(args, kind):
        return plan_layouts(args, layout, case.plan("pass-kv"), case.costs)
    strategy = _chosen(args, case)
    made = case.plan(strategy)
    made.validate()
    steps = describe_steps(made, case.costs.shape)
    if args.json:
        _write(json.dumps({"strategy": made.scheduler, "steps": [asdict(each) for each in steps]}))
    else:
        _write(format_plan(made, steps, kind))
    if args.save is not None:
        save_plan(made, args.save, {"shape": asdict(case.costs.shape)})
    if args.plot is not None:
        plot_steps(made, case.costs.shape, args.plot)
    return 0


def simulate(argv: list[str]) -> int:
    """Runs `distca simulate prefill` or `distca simulate decode`; returns its exit status."""
    kind: Kind = "prefill" if argv[0] == "prefill" else "decode"
    args = build_parser("simulate", kind).parse(argv[1:])
    check_output("--trace", args.trace)
    case = read_case(args, kind)
    if layout := _layout(args, kind):
        whole = case.plan("pass-kv")
        return simulate_layouts(args, layout, whole, case.costs, case.cost_model)
    strategy = _chosen(args, case)
    name = strategy if isinstance(strategy, str) else CSPS
    tried: dict[str, Strategy | NearToFar] = {name: strategy}
    choosing = kind == "prefill" and args.prefill_strategy in (*STRATEGIES, "auto")
    if choosing:
        tried = {each: each for each in STRATEGIES}
    plans = {each: case.plan(made) for each, made in tried.items()}
    found = {
        each: simulate_step(
            case.layers(made), case.costs, case.cost_model, args.trace is not None and each == name
        )
        for each, made in tried.items()
    }
    choices: dict[str, str] = {}
    if choosing:
        choices = {
            each: case.selector(each).choose(case.held, case.new, case.plan) for each in SELECTORS
        }
    if args.json:
        _write(json.dumps(as_json(found, name, choices), indent=1))
    else:
        _write(format_simulated(plans, found, case.costs, case.cost_model, name, choices))
    if args.trace is not None:
        args.trace.parent.mkdir(parents=True, exist_ok=True)
        save_trace(args.trace, found[name])
    return 0


def _layout(args: argparse.Namespace, kind: Kind) -> LayoutChoice | None:
    """How GPUs that split the weights share the rows of a prefill; None: they don't."""
    if kind == "decode" or sum(args.new_tokens) < args.tensor_parallel_size:
        return None
    ranks, size = args.context_parallel_size, args.tensor_parallel_size
    return layout_choice(args.prefill_strategy, args.selector, ranks, size)


def _chosen(args: argparse.Namespace, case: StepCase) -> Strategy | NearToFar:
    return case.chosen(getattr(args, "prefill_strategy", ""), getattr(args, "selector", ""))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")

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
from dataclasses import asdict
from pathlib import Path

from distca.commands.chosen_sparsity import (
    add_calibration_flags,
    choices_as_json,
    choices_within,
    described_choices,
    format_choices,
    lists_choices,
)
from distca.commands.command_line import Parser, check_output, check_outputs
from distca.commands.described import (
    add_charge_flags,
    add_cluster_flags,
    add_model_flags,
    add_selection_flags,
)
from distca.commands.fewest_ranks import add_ranks_flag
from distca.commands.layout_step import plan_layouts, simulate_layouts
from distca.commands.served_sparsity import CSPS, add_sparsity_flags
from distca.commands.served_strategy import SEARCHED, layout_choice
from distca.commands.serving_case import Kind, read_case
from distca.commands.serving_report import as_json, format_plan, format_simulated, plot_steps
from distca.cost.volume import AttentionShape
from distca.plan import SteppedPlan, save_plan, validate_stepped_plan
from distca.schedule.serving import SELECTORS, STRATEGIES, Strategy
from distca.schedule.serving.csps.layouts import LayoutChoice
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.report import describe_steps
from distca.simulate import save_trace
from distca.simulate.serving import simulate_step

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
        "--tensor-parallel-size", type=int, default=1, metavar="T", help="Number of GPUs per rank."
    )
    ranks.add_argument(
        "--cp-kv-cache-interleave-size",
        type=int,
        default=16,
        metavar="N",
        help="Number of consecutive decoded tokens that one rank owns. The next rank owns the "
        "next N.",
    )
    ranks.add_argument(
        "--held",
        choices=HELD,
        default="evenly",
        help="Ranks that hold the cached tokens. evenly: all ranks, as after one prefill; "
        "stripes: all ranks, as after decoding; first-rank: only the first rank.",
    )
    if kind == "prefill":
        add_selection_flags(ranks, "auto", SEARCHED)
        add_sparsity_flags(ranks)
        add_calibration_flags(ranks)
    model = add_model_flags(parser)
    model.add_argument(
        "--dtype-bytes", type=int, default=2, metavar="N", help="Bytes per element: 2 for bf16."
    )
    model.add_argument(
        "--mlp-dtype-bytes",
        type=int,
        choices=(1, 2),
        default=2,
        help="Bytes per element of the MLP's weights. With 1, the MLP's matrix products also "
        "take half the time.",
    )
    model.add_argument(
        "--window-left",
        type=int,
        metavar="TOKENS",
        help="Sliding window: a query sees TOKENS earlier tokens. Default: all earlier tokens "
        "of its sequence.",
    )
    cluster = add_cluster_flags(parser)
    cluster.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="Kernel times from `distca profile`. Default: computed from the cluster's speeds.",
    )
    add_charge_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    if command == "plan":
        output.add_argument(
            "--plot",
            type=Path,
            metavar="FILE",
            help="Draw the steps, in the format of the suffix (.png, .svg).",
        )
        output.add_argument(
            "--save",
            type=Path,
            metavar="FILE",
            help="Write the plan as JSON, for --load of `distca plan`.",
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
            help="Number of new tokens of each sequence.",
        )
    else:
        group.add_argument(
            "--sequences",
            type=int,
            default=1,
            metavar="N",
            help="Number of sequences that are decoded.",
        )
    group.add_argument(
        "--cached-tokens",
        type=int,
        nargs="+",
        default=[0],
        metavar="P",
        help="Number of earlier tokens whose keys and values are cached: one number for all "
        "sequences, or one for each.",
    )


def plan(argv: list[str]) -> int:
    """Runs `distca plan prefill` or `distca plan decode`; returns its exit status."""
    kind: Kind = "prefill" if argv[0] == "prefill" else "decode"
    args = build_parser("plan", kind).parse(argv[1:])
    check_outputs(args, "--plot", "--save")
    case = read_case(args, kind)
    if layout := _layout(args, kind):
        return plan_layouts(args, layout, case.plan("pass-kv"), case.costs)
    strategy = case.chosen(args)
    made = case.plan(strategy)
    validate_stepped_plan(made)
    show_plan(args, made, case.costs.shape, kind)
    return 0


def show_plan(
    args: argparse.Namespace, stepped: SteppedPlan, shape: AttentionShape, kind: Kind
) -> None:
    """Prints the figures of a plan's steps, and writes its files, as flags ask for."""
    steps = describe_steps(stepped, shape)
    if args.json:
        strategy = stepped.plan.scheduler
        _write(json.dumps({"strategy": strategy, "steps": [asdict(each) for each in steps]}))
    else:
        _write(format_plan(stepped, steps, kind))
    if args.save is not None:
        save_plan(stepped, args.save, {"shape": asdict(shape)})
    if args.plot is not None:
        plot_steps(stepped, shape, args.plot)


def simulate(argv: list[str]) -> int:
    """Runs `distca simulate prefill` or `distca simulate decode`; returns its exit status."""
    kind: Kind = "prefill" if argv[0] == "prefill" else "decode"
    args = build_parser("simulate", kind).parse(argv[1:])
    check_output("--trace", args.trace)
    if kind == "prefill" and lists_choices(args):
        return _list_choices(args)
    case = read_case(args, kind)
    if layout := _layout(args, kind):
        whole = case.plan("pass-kv")
        return simulate_layouts(args, layout, whole, case.costs, case.cost_model)
    strategy = case.chosen(args)
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
        of_kind = case.costs if kind == "prefill" else case.costs.of_decode()
        of = plans, found, case.costs, case.cost_model, name, choices, of_kind.overheads
        _write(format_simulated(*of))
    if args.trace is not None:
        save_trace(args.trace, found[name])
    return 0


def _list_choices(args: argparse.Namespace) -> int:
    """Prints latency against degradation, by a calibration; returns the exit status."""
    case = read_case(argparse.Namespace(**vars(args) | {"calibration": None}), "prefill")
    if case.near is None:
        raise ValueError(f"--calibration {args.calibration} needs --prefill-strategy {CSPS}")
    tokens, levels = max(args.new_tokens), case.near.levels
    partitions = None if args.micro_partitions is None else case.near.partitions
    choices = described_choices(args, case.costs, case.cost_model, tokens, levels, partitions)
    found = choices_within(choices)
    if args.json:
        _write(json.dumps({"choices": choices_as_json(found)}, indent=1))
        return 0
    title = f"csps, {tokens:,} tokens on {levels.ranks} ranks of {case.costs.cluster.name}"
    _write(format_choices(found, f"{title}; simulated, not measured"))
    return 0


def _layout(args: argparse.Namespace, kind: Kind) -> LayoutChoice | None:
    """How GPUs that split the weights share the rows of a prefill; None: they don't."""
    if kind == "decode" or sum(args.new_tokens) < args.tensor_parallel_size:
        return None
    ranks, size = args.context_parallel_size, args.tensor_parallel_size
    return layout_choice(args.prefill_strategy, args.selector, ranks, size)


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")

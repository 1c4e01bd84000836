"""`distca plan` and `distca simulate` for inference: a prefill, or a step that decodes.

distca plan prefill --new-tokens 3200 --cached-tokens 124800 --context-parallel-size 4 \\
    --model llama-405b --tensor-parallel-size 8 --plot prefill.png
distca simulate decode --sequences 32 --cached-tokens 132000 --context-parallel-size 4 \\
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
from distca.commands.compared_prefills import compared
from distca.commands.decode_graphs import add_graphs_flag, check_graphs_flag
from distca.commands.described import (
    RUNAHEAD,
    add_charge_flags,
    add_cluster_flags,
    add_model_flags,
    add_selection_flags,
)
from distca.commands.fewest_ranks import add_ranks_flag
from distca.commands.layout_step import plan_layouts
from distca.commands.served_sparsity import CSPS, add_sparsity_flags
from distca.commands.served_strategy import SEARCHED, layout_choice
from distca.commands.serving_answer import format_decode, format_prefill
from distca.commands.serving_case import Kind, StepCase, read_case
from distca.commands.serving_report import as_json, format_plan, plot_steps
from distca.commands.step_limits import add_sequences_flags, read_lengths_file
from distca.cost.volume import AttentionShape
from distca.plan import SteppedPlan, save_plan, validate_stepped_plan
from distca.schedule.serving import STRATEGIES, Strategy
from distca.schedule.serving.csps.layouts import LayoutChoice
from distca.schedule.serving.report import describe_steps
from distca.simulate import save_trace
from distca.simulate.serving import simulate_step

KINDS: tuple[Kind, ...] = ("prefill", "decode")
HELD = ("evenly", "stripes", "first-rank")

_DESCRIPTIONS = {
    ("plan", "prefill"): "Plans the core attention of a prompt, or of a turn over cached tokens.",
    ("plan", "decode"): "Plans the core attention of a step that decodes a token of each sequence.",
    ("simulate", "prefill"): "Says how long a prefill takes on a cluster with each exact strategy.",
    ("simulate", "decode"): "Says how long a step takes that decodes a token of each sequence.",
}
_EXAMPLES = {
    "prefill": "{} prefill --new-tokens 3200 --cached-tokens 124800 --context-parallel-size 4 \\\n"
    "      --model llama-405b --tensor-parallel-size 8 --mlp-dtype-bytes 1",
    "decode": "{} decode --sequences 32 --cached-tokens 132000 --context-parallel-size 4 \\\n"
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
    add_sequences_flags(parser, kind)
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
        add_selection_flags(ranks, "auto", SEARCHED, many_prompts=True)
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
    charges = add_charge_flags(parser)
    if (command, kind) == ("simulate", "decode"):
        add_graphs_flag(charges)
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


def plan(argv: list[str]) -> int:
    """Runs `distca plan prefill` or `distca plan decode`; returns its exit status."""
    kind: Kind = "prefill" if argv[0] == "prefill" else "decode"
    args = build_parser("plan", kind).parse(argv[1:])
    check_outputs(args, "--plot", "--save")
    read_lengths_file(args)
    case = read_case(args, kind)
    if layout := _layout(args, case.kind):
        return plan_layouts(args, layout, case.plan("pass-kv"), case.costs)
    strategy = case.chosen(args)
    made = case.plan(strategy)
    validate_stepped_plan(made)
    runs_ahead = case.kind == "prefill" and args.prefill_strategy == RUNAHEAD
    show_plan(args, made, case.costs.shape, case.kind, RUNAHEAD if runs_ahead else None)
    return 0


def show_plan(
    args: argparse.Namespace,
    stepped: SteppedPlan,
    shape: AttentionShape,
    kind: Kind,
    name: str | None = None,
) -> None:
    """Prints the figures of a plan's steps, and writes its files, as flags ask for.

    Args:
        args: flags.
        stepped: plan.
        shape: heads of one GPU.
        kind: prefill or decode.
        name: how the strategy is called, if not by the plan's scheduler.
    """
    steps = describe_steps(stepped, shape)
    if args.json:
        strategy = name or stepped.plan.scheduler
        _write(json.dumps({"strategy": strategy, "steps": [asdict(each) for each in steps]}))
    else:
        _write(format_plan(stepped, steps, kind, name))
    if args.save is not None:
        save_plan(stepped, args.save, {"shape": asdict(shape)})
    if args.plot is not None:
        plot_steps(stepped, shape, args.plot)


def simulate(argv: list[str]) -> int:
    """Runs `distca simulate prefill` or `distca simulate decode`; returns its exit status."""
    kind: Kind = "prefill" if argv[0] == "prefill" else "decode"
    args = build_parser("simulate", kind).parse(argv[1:])
    check_output("--trace", args.trace)
    read_lengths_file(args)
    if kind == "decode":
        check_graphs_flag(args)
    if kind == "prefill" and lists_choices(args):
        return _list_choices(args)
    case = read_case(args, kind)
    if case.kind == "decode":
        return _simulate_decode(args, case)
    return _simulate_prefill(args, case)


def _simulate_prefill(args: argparse.Namespace, case: StepCase) -> int:
    """Prints how long a prefill takes in each way; returns the exit status."""
    ways = compared(args, case)
    found = ways.simulated(args.trace is not None)
    choices: dict[str, str] = {}
    if ways.chosen is None:
        best = min(STRATEGIES, key=lambda name: found[name].seconds)
        choices = {"simulated": best, "paper": case.choose("paper")}
    chosen = ways.chosen or choices[args.selector]
    if args.json:
        _write(json.dumps(as_json(found, chosen, choices), indent=1))
    else:
        _write(format_prefill(args, ways, found, chosen, choices))
    if args.trace is not None:
        save_trace(args.trace, found[chosen])
    return 0


def _simulate_decode(args: argparse.Namespace, case: StepCase) -> int:
    """Prints how long a decode step takes; returns the exit status."""
    name: Strategy = "pass-q"
    records = args.trace is not None
    outcome = simulate_step(case.layers(name), case.costs, case.cost_model, records)
    if args.json:
        _write(json.dumps(as_json({name: outcome}, name, {}), indent=1))
    else:
        _write(format_decode(args, case, outcome))
    if args.trace is not None:
        save_trace(args.trace, outcome)
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

"""`distca plan`: makes, compares, saves and draws plans for a batch of documents.

distca plan --distribution pretrain --servers 64 --tokens-per-server 65536 --model llama-34b
distca plan --lengths lengths.json --servers 64 --tokens-per-server 65536 --compare
distca plan --load plan.json --plot plan.png
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from distca.commands import html_page, planned_heads, serving_step
from distca.commands.command_line import Parser, check_outputs, file_name, unknown
from distca.commands.least_buffer import refusal
from distca.commands.plan_compare import compare, timed_plan
from distca.commands.plan_config import (
    JUDGING,
    USED_WITH_LOAD,
    config_of,
    saved_config,
    to_json,
)
from distca.commands.plan_page import page_of
from distca.cost.model_sizes import ModelSize
from distca.documents.lengths import (
    DISTRIBUTIONS,
    check_tokens,
    cut_to_pieces,
    draw,
    read_lengths,
    shuffled,
)
from distca.plan import (
    Plan,
    load_stepped_plan,
    save_plan,
)
from distca.plan.span import Int64s
from distca.schedule import (
    BALANCING,
    COMPARED,
    IN_ROUNDS,
    BufferBoundError,
    PlanSummary,
    ScheduleConfig,
    describe,
    even_capacities,
    format_summary,
    make_scheduler,
)

_MOST_SERVERS = 1 << 16
_FLAGS_OF_SCHEDULERS = {
    "tolerance": BALANCING,
    "max_buffer_bytes": ("tiles",),
    "context_parallel_size": ("per-document-cp", "ring-zigzag", *IN_ROUNDS, "wlb-llm"),
}
"""Flags that some schedulers alone use."""
_DESCRIPTION = """\
Plans the core attention of one batch of documents, and prints how balanced it is and how many
bytes it moves. Nothing is trained, and no GPU is needed: the figures are what a run would have.
"""
_OF_SIMULATE = {"--context": "--max-document-length"}
"""Flags of `distca simulate`, and what they are here."""
_EXAMPLES = """\
examples:
  distca plan --distribution pretrain --servers 64 --tokens-per-server 65536 --model llama-34b
  distca plan --lengths lengths.json --servers 8 --tokens-per-server 8192 --model llama-8b --compare
  distca plan --lengths corpus.idx --seed 1 --max-document-length 131072 \\
      --servers 64 --tokens-per-server 65536 --model llama-8b --plot plan.png --save plan.json
  distca plan --load plan.json --plot plan.png

`distca plan prefill` and `distca plan decode` plan the steps of inference: see their --help.

"load max/mean 2.622 -> 1.099" reads: in plain data parallelism the busiest server has 2.622 times
the mean core attention, and 1.099 times in this plan.
"""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("plan", _DESCRIPTION, _EXAMPLES, serving_step.KINDS, _OF_SIMULATE)
    documents = parser.add_argument_group("documents (one of)").add_mutually_exclusive_group(
        required=True
    )
    documents.add_argument(
        "--lengths",
        type=file_name,
        metavar="FILE",
        help="File of document lengths in tokens: a JSON list, which is the batch, or the .idx "
        "file of a Megatron dataset, from which a batch is drawn.",
    )
    documents.add_argument(
        "--distribution",
        metavar="NAME",
        help=f"Draw lengths from a named distribution: {', '.join(DISTRIBUTIONS)}.",
    )
    documents.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help="Show a plan that --save wrote. Flags of links, speeds, --profile and the model "
        "override the saved values. Flags that would change the plan are refused.",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed with which documents are drawn."
    )
    parser.add_argument(
        "--max-document-length",
        type=int,
        metavar="TOKENS",
        help="Maximum document length. Longer documents are cut into pieces. Default: no limit.",
    )
    ranks = parser.add_argument_group("ranks (required unless --load is given)")
    ranks.add_argument(
        "--servers",
        type=int,
        metavar="N",
        help="Number of data-parallel ranks. Each is an attention server.",
    )
    ranks.add_argument(
        "--tokens-per-server",
        type=int,
        metavar="TOKENS",
        help="Tokens that each rank owns; at most, with a list of --lengths.",
    )
    ranks.add_argument(
        "--server-speeds",
        metavar="S0,S1,...",
        help="Relative speed of each server, such as 1,1,0.5. Default: equal.",
    )
    ranks.add_argument(
        "--servers-per-node",
        type=int,
        default=1,
        metavar="N",
        help="Number of servers per node. Servers of a node share its faster links.",
    )
    ranks.add_argument(
        "--node-gb-per-s",
        type=float,
        default=450.0,
        metavar="GB",
        help="Speed of a server's link within a node, in GB/s per direction.",
    )
    ranks.add_argument(
        "--network-gb-per-s",
        type=float,
        default=50.0,
        metavar="GB",
        help="Speed of a server's link between nodes, in GB/s per direction.",
    )
    planned_heads.add_flags(parser)
    schedule = parser.add_argument_group("schedule")
    schedule.add_argument(
        "--scheduler",
        default="tiles",
        metavar="NAME",
        help=f"Scheduler: {', '.join(COMPARED)}. hybrid-cp needs megatron-core.",
    )
    schedule.add_argument(
        "--tolerance",
        type=float,
        default=0.1,
        metavar="X",
        help="How far a server's load may exceed the mean load, as a fraction of the mean. "
        "Plans with a larger tolerance move fewer bytes.",
    )
    schedule.add_argument(
        "--placement",
        choices=("free", "sequential"),
        default="free",
        help="Place of documents. free: the scheduler chooses; sequential: one after the other.",
    )
    schedule.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="Kernel times from `distca profile`. Plans then balance these times. Default: "
        "plans balance query-key pairs.",
    )
    schedule.add_argument(
        "--max-buffer-bytes",
        type=int,
        metavar="BYTES",
        help="Maximum bytes of queries, keys and values that a server receives for one layer "
        "(scheduler tiles only). Default: no limit.",
    )
    schedule.add_argument(
        "--context-parallel-size",
        type=int,
        metavar="N",
        help="Number of ranks that share documents with the schedulers per-document-cp, "
        "ring-zigzag and wlb-llm, or the longest document with hybrid-cp and dynamic-cp. "
        "Default: the smallest number that holds the longest document.",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--compare",
        action="store_true",
        help="Plan with every scheduler and plain data parallelism, and print one table.",
    )
    output.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="Draw the plan, in the format of the suffix (.png, .svg).",
    )
    output.add_argument(
        "--save", type=Path, metavar="FILE", help="Write the plan as JSON, for --load."
    )
    html_page.add_flag(output)
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    if argv and argv[0] in serving_step.KINDS:
        return serving_step.plan(argv)
    parser = build_parser()
    args, given, command = parser.parse(argv), parser.given(argv), f"distca plan {shlex.join(argv)}"
    check_outputs(args, "--plot", "--save", "--html")
    if args.load is not None:
        _show_saved(args, given, command)
    else:
        _make(args, given, command)
    return 0


def _show_saved(args: argparse.Namespace, given: Mapping[str, str], command: str) -> None:
    """Shows a saved plan, judged by what was saved with it and by the flags that are given."""
    for name, flag in given.items():
        if name not in USED_WITH_LOAD:
            raise ValueError(
                f"{flag} is for making a plan, which --load {args.load} has already: remove one of "
                "the two"
            )
    stepped, saved = load_stepped_plan(args.load)
    if stepped.in_steps and (judging := {*given} & JUDGING):
        flags = ", ".join(given[name] for name in sorted(judging))
        raise ValueError(f"--load {args.load} is a prefill in steps, not judged by {flags}")
    config = saved_config(args, given, saved)
    _check_mask(args, stepped.plan)
    if stepped.in_steps:
        if args.html is not None:
            raise ValueError(f"--load {args.load} is a prefill in steps: leave --html out")
        serving_step.show_plan(args, stepped, config.shape, "prefill")
    else:
        made_for = {**saved, **to_json(config)}
        model = None if args.model is None else planned_heads.planned_model(args)
        summary = describe(stepped.plan, config)
        _show(args, command, stepped.plan, config, summary, {}, made_for, model)


def _check_mask(args: argparse.Namespace, plan: Plan) -> None:
    """Refuses a saved plan whose mask no layer of the model has."""
    if args.model is None:
        return
    seen = planned_heads.planned_model(args).masks.masks
    if plan.mask not in seen:
        ours = planned_heads.described_mask(plan.mask)
        theirs = " or ".join(map(planned_heads.described_mask, seen))
        raise ValueError(
            f"--load {args.load} was planned for layers that see {ours}, but those of --model "
            f"{args.model} see {theirs}: make a plan for that model, without --load"
        )


def _make(args: argparse.Namespace, given: Mapping[str, str], command: str) -> None:
    _check_flags(args, given)
    model = planned_heads.planned_model(args)
    config = config_of(args, model)
    capacities, lengths = _capacities_and_lengths(args)
    if args.compare:
        if args.save or args.plot:
            raise ValueError(
                "--compare makes several plans, but --save and --plot are for one: leave --compare "
                "out, and choose a --scheduler"
            )
        compare(args, command, model, config, lengths, capacities)
        return
    make = partial(timed_plan, args, args.scheduler, model)
    try:
        plan, seconds = make(config, lengths, capacities)
    except BufferBoundError as error:
        raise ValueError(refusal(error, config, lambda c: make(c, lengths, capacities))) from error
    sizes = {"servers": args.servers, "tokens_per_server": args.tokens_per_server}
    made_for = {**sizes, **to_json(config)}
    scheduler = make_scheduler(args.scheduler, config)
    others = [scheduler.schedule(lengths, plan.placement, m) for m in model.masks.masks[1:]]
    _show(args, command, plan, config, describe(plan, config), seconds, made_for, model, others)


def _check_flags(args: argparse.Namespace, given: Mapping[str, str]) -> None:
    """Refuses flags that would change nothing."""
    if args.compare and "scheduler" in given:
        raise ValueError("--compare plans with every scheduler: leave --scheduler out")
    if "seed" in given and args.lengths is not None and args.lengths.suffix != ".idx":
        raise ValueError("--seed draws documents, but the list of --lengths is taken as it is")
    if args.compare:
        return
    for name, schedulers in _FLAGS_OF_SCHEDULERS.items():
        if name in given and args.scheduler in COMPARED and args.scheduler not in schedulers:
            raise ValueError(
                f"{given[name]} is for {', '.join(schedulers)}, not for the scheduler "
                f"{args.scheduler}: remove one of the two"
            )


def _capacities_and_lengths(args: argparse.Namespace) -> tuple[Int64s, Int64s]:
    for flag, value, what in (
        ("--servers", args.servers, "the number of ranks"),
        ("--tokens-per-server", args.tokens_per_server, "how many tokens a rank holds"),
    ):
        if value is None or value < 1:
            raise ValueError(f"give {flag}, {what}, at least 1")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must not be negative")
    if args.servers > _MOST_SERVERS:
        raise ValueError(f"--servers {args.servers} is more than {_MOST_SERVERS:,}")
    total = args.servers * args.tokens_per_server
    check_tokens(total)
    if args.lengths is not None:
        lengths = read_lengths(args.lengths)
    elif args.distribution in DISTRIBUTIONS:
        lengths = draw(DISTRIBUTIONS[args.distribution], total, args.seed)
    else:
        raise ValueError(unknown("distribution", args.distribution, DISTRIBUTIONS))
    longest = args.max_document_length
    if longest is not None:
        if longest < 1:
            raise ValueError(f"--max-document-length {longest} must be at least 1")
        lengths = cut_to_pieces(lengths, longest)
    if args.lengths is not None and args.lengths.suffix == ".idx":
        lengths = shuffled(lengths, total, args.seed)
    try:
        capacities = even_capacities(int(lengths.sum()), args.servers, args.tokens_per_server)
    except ValueError as error:
        # `simulate` draws from the same file.
        listed = args.lengths is not None and args.lengths.suffix != ".idx"
        told = ". `distca plan` takes the list of --lengths as one batch" if listed else ""
        raise ValueError(f"{error}{told}") from None
    return capacities, lengths


def _show(
    args: argparse.Namespace,
    command: str,
    plan: Plan,
    config: ScheduleConfig,
    summary: PlanSummary,
    seconds: dict[str, float],
    made_for: dict[str, object],
    model: ModelSize | None = None,
    others: Sequence[Plan] = (),
) -> None:
    """Prints the figures of one plan, and writes its files.

    Args:
        args: flags, which name the files.
        command: what was typed.
        plan: plan to show.
        config: configuration by which it is judged.
        summary: its figures.
        seconds: seconds of planning; empty for a plan that was loaded.
        made_for: JSON values that are saved with the plan.
        model: model that it was made for, if that is known.
        others: plans of its layers with other masks, for the same tokens on each rank.
    """
    figures = {**asdict(summary), **seconds}
    if others:
        figures["other_layers"] = planned_heads.figures_of_other_layers(others, config)
    if args.json:
        _write(json.dumps(figures, indent=1))
    else:
        _write(format_summary(summary))
    if not args.json and model is not None and len(model.masks.masks) > 1:
        _write(f"  layers          {planned_heads.layers_of(plan.mask, model)}")
        for other in others:
            _write(f"  other layers    {planned_heads.balance_of(other, config)}")
    if seconds and not args.json:
        _write(
            f"  planned in      {1e3 * seconds['plan_seconds']:.1f} ms, one rank's exchange in "
            f"{1e3 * seconds['exchange_seconds']:.1f} ms"
        )
    # After the figures, so that they are not lost where a file cannot be written.
    if args.save is not None:
        save_plan(plan, args.save, made_for)
    if args.plot is not None:
        from distca.commands.plan_plot import plot_plan

        plot_plan(plan, config, args.plot)
    if args.html is not None:
        html_page.write_page(args.html, page_of(command, plan, config, summary, figures))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")

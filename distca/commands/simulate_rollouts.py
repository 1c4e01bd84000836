"""`distca simulate rollouts`: what it gains to compute shared prompts once, on all ranks.

    distca simulate rollouts --prompt 65536 --responses 16 --response 8192 --groups 32 \\
        --model llama-8b --cluster dgx-h200 --gpus 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from distca.commands.command_line import Parser, file_name
from distca.commands.described import (
    add_charge_flags,
    add_cluster_flags,
    add_model_flags,
    check_gpus,
    cluster_of,
    flag_of,
    model_of,
    once,
)
from distca.commands.simulate_report import RATES, charged_line, why_not
from distca.commands.verdict import TITLES, title_of
from distca.plan.paths import LEAST_SHARED
from distca.plan.span import Int64s
from distca.progress import progress
from distca.simulate import MEGATRON, Breakdown, Choice, Outcome, Workload, advise
from distca.simulate.groups import Group, check_rollouts, draw_from, draw_groups, read_groups
from distca.simulate.hybrid import HYBRID
from distca.simulate.rollouts import (
    TreeLayout,
    break_down_trees,
    layouts,
    least_memory,
    least_seconds,
    one_by_one,
    shared,
    simulate_trees,
)
from distca.simulate.speed_up import SpeedUp
from distca.wording import counted

SYSTEMS = (*(name for name in MEGATRON if name != HYBRID), "wlb-llm", "tiles")
_TOLERANCE = 0.05
_BOUND = 0.95
"""Part of the bound of an iteration's time that counts, since the bound is of whole documents."""
_DESCRIPTION = """\
Predicts the speed of a post-training job whose rollouts share prompts, in three ways: shared tokens
computed once and spread over all ranks, whole trees on groups of ranks, and rollouts one by one.
Iterations are simulated. Nothing is trained, and no GPU is needed.
"""
_EXAMPLES = """\
examples:
  distca simulate rollouts --prompt 65536 --responses 16 --response 8192 --groups 32 \\
      --model llama-8b --cluster dgx-h200 --gpus 64
  distca simulate rollouts --lengths rollouts.jsonl --groups 32 \\
      --model llama-8b --cluster dgx-h200 --gpus 64

Rollouts one by one are packed in sequences and simulated as `distca simulate` does, in the best
configuration of each system. Trees have no pipelines.
"""
_APART = "one by one: "
_FULL = 0.9
"""Part of sequences that rollouts fill, from which on their time is taken to grow with tokens."""
_MANY = 2000
"""Rollouts of a batch whose simulation takes long: 8,000 took more than five minutes."""
_MOVED = ("exchanges", "collectives", "interference")
_NOTHING_SHARED = (
    "Nothing is shared: {why}. The rows differ only in how ranks divide the rollouts' work."
)
_NUMBERS = {
    "prompt": "Mean number of tokens in a prompt.",
    "responses": "Number of responses to each prompt.",
    "response": "Mean number of tokens in a response.",
    "groups": "Number of prompts in a global batch. With --lengths, the default is all prompts "
    "of the file.",
}
_DRAWN = ("prompt", "responses", "response")
"""Numbers that a file of lengths replaces."""
_SPREAD = 0.5


@dataclass(frozen=True)
class Row:
    """A way to train, in its best configuration.

    Attributes:
        title: what it is.
        configuration: its sizes.
        seconds: time of an iteration of each batch, of as many tokens as the batch's rollouts have.
        memory_gb: memory of the GPU that needs most.
        idle: share of the time in which compute is not busy.
        parts: of trees, seconds of the first batch's iteration by what they are spent on.
    """

    title: str
    configuration: str
    seconds: tuple[float, ...]
    memory_gb: float
    idle: float
    parts: Breakdown | None = None


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("simulate rollouts", _DESCRIPTION, _EXAMPLES)
    rollouts = parser.add_argument_group("rollouts")
    for name, what in _NUMBERS.items():
        rollouts.add_argument(flag_of(name), type=int, metavar="N", help=what)
    rollouts.add_argument(
        "--lengths",
        type=file_name,
        metavar="FILE",
        help="Measured lengths, instead of --prompt, --responses and --response. Each prompt "
        'is a JSON object such as {"prompt": 4096, "responses": [512, 730]}. The file has one '
        "object on each line, or a list of all. Batches are drawn from these prompts.",
    )
    rollouts.add_argument(
        "--spread",
        type=float,
        metavar="X",
        help="How much lengths differ: the standard deviation of their logarithm. With 0, all "
        "are equal. Not with --lengths. Default: 0.5.",
    )
    rollouts.add_argument(
        "--least",
        type=int,
        default=LEAST_SHARED,
        metavar="N",
        help="Minimum number of tokens of a prompt that is shared. Default: "
        f"{LEAST_SHARED}, as with --distca-share-prefixes.",
    )
    rollouts.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help="Number of global batches. Default: 3, or 1 if each batch has all prompts of "
        "--lengths.",
    )
    rollouts.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed with which lengths are drawn."
    )
    add_model_flags(parser)
    cluster = add_cluster_flags(parser)
    cluster.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="Number of GPUs of the whole job."
    )
    add_charge_flags(parser)
    search = parser.add_argument_group("search (layouts to try)")
    search.add_argument(
        "--tensor-model-parallel-sizes",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="Tensor-parallel sizes to try.",
    )
    search.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        metavar="NAME",
        help="Systems that compute rollouts one by one, named as in `distca simulate`. "
        "Default: all.",
    )
    parser.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    args = build_parser().parse(argv)
    for name in (*_NUMBERS, "least", "gpus", "batches"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise ValueError(f"{flag_of(name)} {number}: give at least 1")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must not be negative")
    if min(args.tensor_model_parallel_sizes) < 1:
        raise ValueError("--tensor-model-parallel-sizes: every size must be at least 1")
    cluster = cluster_of(args)
    check_gpus(args.gpus, cluster)
    batches = _batches(args)
    context, packed = one_by_one(batches, args.gpus)
    workload = Workload(model_of(args), cluster, args.gpus, context, len(packed[0]), _TOLERANCE)
    if workload.model.experts is not None:
        raise ValueError("models with experts are not simulated on rollouts: give another --model")
    sizes, systems = once(args.tensor_model_parallel_sizes), once(args.systems)
    rollouts = max(sum(len(group.rollouts) for group in groups) for groups in batches)
    if rollouts > _MANY:
        sys.stderr.write(
            f"distca simulate rollouts: {rollouts:,} rollouts in a batch take many minutes to "
            "simulate: fewer --groups or --tensor-model-parallel-sizes take less\n"
        )
    rows, unfit = compare(batches, workload, packed, sizes, systems, args.least)
    if not rows:
        raise ValueError(
            f"nothing fits in the {cluster.usable_bytes / 1e9:g} GB that training may fill of a "
            f"GPU, neither trees nor rollouts one by one ({', '.join(systems)}): use more GPUs"
        )
    if args.json:
        found = _as_json(rows, unfit, batches, args.least)
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write(_report(rows, unfit, batches, workload, args.least) + "\n")
    return 0


def _batches(args: argparse.Namespace) -> list[list[Group]]:
    """Returns the groups of each global batch, drawn from numbers or from a file.

    Raises:
        ValueError: flags are missing or contradict each other, or the file is none of groups.
    """
    given = [flag_of(name) for name in _DRAWN if getattr(args, name) is not None]
    if args.lengths is not None:
        if args.spread is not None:
            given.append("--spread")
        if given:
            raise ValueError(f"--lengths FILE has the lengths: leave out {', '.join(given)}")
        known = read_groups(args.lengths)
        batches = args.batches or (3 if args.groups else 1)
        return draw_from(known, args.groups or len(known), batches, args.seed)
    names = (*_DRAWN, "groups")
    missing = [flag_of(name) for name in names if getattr(args, name) is None]
    if missing:
        raise ValueError(f"give {', '.join(missing)}, or --lengths FILE with measured lengths")
    numbers = (args.prompt, args.responses, args.response, args.groups)
    spread, batches = _SPREAD if args.spread is None else args.spread, args.batches or 3
    check_rollouts(args.groups * args.responses * batches)
    return [draw_groups(*numbers, spread, args.seed + n) for n in range(batches)]


def compare(
    batches: Sequence[Sequence[Group]],
    workload: Workload,
    packed: Sequence[Sequence[Int64s]],
    tensor_sizes: Sequence[int],
    systems: Sequence[str] = SYSTEMS,
    least: int = LEAST_SHARED,
) -> tuple[list[Row], dict[str, str]]:
    """Simulates trees over all ranks, whole trees on groups of ranks, and rollouts one by one.

    Args:
        batches: groups of each global batch.
        workload: model, cluster, GPUs, and sizes of the packed sequences.
        packed: what `one_by_one` makes of the batches.
        tensor_sizes: sizes of tensor parallelism to try.
        systems: what computes rollouts one by one.
        least: fewest tokens of a prompt that trees share.

    Returns:
        Trees in their best layouts, if any fits in memory, and then the systems that fit, the
        fastest first; and why others don't, by their titles. Systems that come down to the same,
        such as plain Megatron, are one row.

    Raises:
        ValueError: no size of tensor parallelism divides the GPUs, a node and the heads.
    """
    tried = layouts(len(batches[0]), workload, tensor_sizes)
    if not tried:
        raise ValueError(
            "no size of --tensor-model-parallel-sizes divides "
            f"{counted(workload.gpus, 'GPU')}, nodes of "
            f"{workload.cluster.gpus_per_node} and the model's heads: give another one, such as 1"
        )
    of_trees = [shared(groups, least) for groups in batches]
    rows: list[Row] = []
    unfit: dict[str, str] = {}
    # Layouts take from none of the time, where others rule them out, to minutes.
    with progress("distca simulate", "layouts of trees", len(tried), estimates=False) as shown:
        for title, some in (
            ("trees over all ranks (DistCA)", [e for e in tried if e.ranks_of_tree is None]),
            ("each tree on some ranks", [e for e in tried if e.ranks_of_tree is not None]),
        ):
            row = _best_of_trees(title, some, of_trees, workload, shown.update)
            if row is not None:
                rows.append(row)
            elif some:
                unfit[title] = f"out of memory in all {counted(len(some), 'layout')}"
            else:
                unfit[title] = "no layout divides the job"
    with progress("distca simulate", doing="rollouts one by one, which takes minutes"):
        choices = advise(workload, packed, systems, tensor_sizes, [1, 2, 4, 8])
    unfit |= {
        f"{_APART}{TITLES[choice.system]}": why_not(choice, workload)
        for choice in choices
        if choice.candidate is None
    }
    apart = [_row_of(choice, batches, workload) for choice in choices if choice.candidate]
    fastest: dict[str, Row] = {}
    for row in sorted(apart, key=lambda row: sum(row.seconds)):
        fastest.setdefault(row.title, row)
    return [*rows, *fastest.values()], unfit


def _best_of_trees(
    title: str,
    tried: Sequence[TreeLayout],
    batches: Sequence[Sequence[Group]],
    workload: Workload,
    told: Callable[[], None],
) -> Row | None:
    """Returns the layout that is fastest in the first batch of those that fit in all, or None.

    Of layouts that differ in the number of micro-batches alone, the two with fewest that fit run:
    more of them only cost launches and smaller exchanges. Layouts whose busiest ranks compute for
    longer than the best one takes do not run.
    """
    found: list[tuple[float, TreeLayout, Outcome]] = []
    fitting = Counter[TreeLayout]()
    for layout in sorted(tried, key=lambda each: each.micro_batches):
        told()
        sizes = replace(layout, micro_batches=1)
        usable = workload.cluster.usable_bytes
        if fitting[sizes] == 2 or least_memory(batches[0], workload, layout) > usable:
            continue
        least = least_seconds(batches[0], workload, layout)
        if found and least * _BOUND > min(seconds for seconds, _, _ in found):
            continue
        outcome = simulate_trees(batches[0], workload, layout)
        if outcome.fits:
            fitting[sizes] += 1
            found.append((outcome.seconds, layout, outcome))
    for seconds, layout, _ in sorted(found, key=lambda each: each[0])[:1]:
        kept = replace(layout, keeps_inputs=True)
        outcome = simulate_trees(batches[0], workload, kept)
        if outcome.fits and outcome.seconds < seconds:
            found.append((outcome.seconds, kept, outcome))
    for _, layout, first in sorted(found, key=lambda each: each[0]):
        outcomes = [first]
        outcomes += (simulate_trees(groups, workload, layout) for groups in batches[1:])
        if all(outcome.fits for outcome in outcomes):
            return Row(
                title,
                str(layout),
                tuple(outcome.seconds for outcome in outcomes),
                max(float(outcome.memory_bytes.max()) for outcome in outcomes) / 1e9,
                sum(outcome.idle for outcome in outcomes) / len(outcomes),
                break_down_trees(batches[0], workload, layout)[1],
            )
    return None


def _row_of(choice: Choice, batches: Sequence[Sequence[Group]], workload: Workload) -> Row:
    """Returns a system's row, whose sequences have somewhat more tokens than the rollouts: these
    take less time in proportion."""
    packed = workload.sequences * workload.context
    shares = [sum(sum(group.rollouts) for group in groups) / packed for groups in batches]
    # Of fewer rollouts, launches and the longest ones take the time, which no filler adds to.
    shares = [each if each >= _FULL else 1.0 for each in shares]
    return Row(
        f"{_APART}{title_of(choice)}",
        str(choice.candidate),
        tuple(each * s for each, s in zip(choice.seconds_of_batches, shares, strict=True)),
        choice.memory_gb,
        choice.idle,
    )


def _tokens(batches: Sequence[Sequence[Group]], least: int) -> tuple[list[int], list[int]]:
    """Returns the tokens of each batch one by one, and as trees."""
    held = [sum(tree.tokens for tree in shared(groups, least)) for groups in batches]
    return [sum(sum(group.rollouts) for group in groups) for groups in batches], held


def _as_json(
    rows: Sequence[Row],
    unfit: Mapping[str, str],
    batches: Sequence[Sequence[Group]],
    least: int,
) -> list[dict[str, object]]:
    tokens, held = _tokens(batches, least)
    found: list[dict[str, object]] = []
    for row in rows:
        over = asdict(SpeedUp.of(rows[0].seconds, row.seconds)).items()
        more = {
            "why_not": None,
            "tokens_one_by_one": tokens,
            "tokens_as_trees": held,
            "tokens_per_second": sum(tokens) / sum(row.seconds),
            # JSON has no NaN.
            "first_row_over_it": {name: None if each != each else each for name, each in over},
        }
        found.append(asdict(row) | more)
    found += [{"title": title, "seconds": None, "why_not": unfit[title]} for title in unfit]
    return found


def _report(
    rows: Sequence[Row],
    unfit: Mapping[str, str],
    batches: Sequence[Sequence[Group]],
    workload: Workload,
    least: int,
) -> str:
    apart = [row for row in rows if row.title.startswith(_APART)]
    trees = [row for row in rows if not row.title.startswith(_APART)]
    tokens, of_trees = _tokens(batches, least)
    held = sum(of_trees)
    cluster, mean = workload.cluster, sum(tokens) / len(tokens)
    lines = [
        _answer(trees, apart) if held < sum(tokens) else _nothing_shared(batches, least),
        f"{counted(workload.gpus, 'GPU')} of {cluster.name}, "
        f"{counted(len(batches[0]), 'prompt')} with {_responses(batches)} each, "
        f"{mean:,.0f} tokens one by one, "
        f"{held / len(batches):,.0f} as trees,\n{len(batches)} batch(es); simulated, not measured",
        f"{'':48}{'tokens/s':>12}{'s':>9}{'GB a GPU':>10}{'idle':>7}  "
        f"{'first row over it':24}configuration",
    ]
    for row in rows:
        over = "" if row is rows[0] else str(SpeedUp.of(rows[0].seconds, row.seconds))
        each = _seconds(sum(row.seconds) / len(row.seconds))
        lines.append(
            f"{row.title:48}{sum(tokens) / sum(row.seconds):>12,.0f}{each:>9}"
            f"{row.memory_gb:>10.1f}{row.idle:>7.1%}  "
            f"{over:24}{row.configuration}"
        )
    lines += [f"{title:48}{reason}" for title, reason in unfit.items()]
    for row in trees:
        assert row.parts is not None
        lines.append(f"{row.title}: {spent(row.parts)}")
    lines += [
        "tokens/s counts a shared token once for each rollout that has it.",
        RATES.format(
            attention=cluster.attention_tflops, mfu=cluster.linear_mfu, peak=cluster.peak_tflops
        ),
        charged_line(cluster.charges),
    ]
    return "\n".join(lines)


def _nothing_shared(batches: Sequence[Sequence[Group]], least: int) -> str:
    """Says why nothing is shared."""
    several = any(len(group.responses) > 1 for groups in batches for group in groups)
    short = f"prompts with several responses have fewer than {counted(least, 'token')} (--least)"
    return _NOTHING_SHARED.format(why=short if several else "no prompt has several responses")


def _responses(batches: Sequence[Sequence[Group]]) -> str:
    """Says how many responses prompts have."""
    numbers = {len(group.responses) for groups in batches for group in groups}
    fewest, most = min(numbers), max(numbers)
    return counted(most, "response") if fewest == most else f"{fewest} to {most} responses"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.2g}"


def spent(parts: Breakdown) -> str:
    """Says what an iteration's time is spent on."""
    shown = parts.as_shown()
    shares = {
        "linear layers": shown["linear"],
        "core attention": shown["attention"],
        "communication that nothing hides": sum(shown[name] for name in _MOVED),
        "copies and launches": shown["copies"] + shown["launches"],
        "waiting": shown["waiting"],
    }
    return ", ".join(f"{each / parts.seconds:.1%} {name}" for name, each in shares.items())


def _answer(trees: Sequence[Row], apart: Sequence[Row]) -> str:
    if not trees:
        return "Trees do not fit in memory without pipelines: use more GPUs."
    if not apart:
        return "Share prompts: one by one no layout of these systems divides the job and fits."
    ours, *others = sorted(trees, key=lambda row: sum(row.seconds))
    gain = SpeedUp.of(ours.seconds, apart[0].seconds)
    best = apart[0].title.removeprefix(_APART)
    if gain.mean < 1 or gain.faster is False:
        return f"Don't share prompts: {gain} times as fast as rollouts one by one with {best}."
    answer = f"Share prompts: {gain} times as fast as rollouts one by one with the fastest, {best}"
    if others:
        over = SpeedUp.of(ours.seconds, others[0].seconds)
        first, second = "trees over all ranks", "whole trees on groups of ranks"
        if ours is not trees[0]:
            first, second = second, first
        answer += f"; {first} are {over} times as fast as {second}"
    return answer + "."

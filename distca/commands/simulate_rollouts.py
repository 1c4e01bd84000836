"""`distca simulate rollouts`: what it gains to compute shared prompts once, on all ranks.

    distca simulate rollouts --prompt 65536 --responses 16 --response 8192 --groups 32 \\
        --model llama-8b --cluster dgx-h200 --gpus 64
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from distca.commands.command_line import Parser
from distca.commands.described import (
    add_charge_flags,
    add_cluster_flags,
    add_model_flags,
    check_gpus,
    cluster_of,
    flag_of,
    model_of,
)
from distca.commands.simulate_report import RATES, charged_line
from distca.commands.verdict import title_of
from distca.plan.paths import LEAST_SHARED
from distca.plan.span import Int64s
from distca.progress import progress
from distca.simulate import MEGATRON, Breakdown, Choice, Outcome, Workload, advise
from distca.simulate.hybrid import HYBRID
from distca.simulate.rollouts import (
    Group,
    TreeLayout,
    break_down_trees,
    draw_groups,
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
example:
  distca simulate rollouts --prompt 65536 --responses 16 --response 8192 --groups 32 \\
      --model llama-8b --cluster dgx-h200 --gpus 64

Rollouts one by one are packed in sequences and simulated as `distca simulate` does, in the best
configuration of each system. Trees have no pipelines.
"""
_NOTHING_SHARED = (
    "Nothing is shared, and so nothing gained: each prompt has one response, or fewer than "
    "{least:,} tokens (--least)."
)
_NUMBERS = {
    "prompt": "Tokens of a prompt, on average.",
    "responses": "Responses to each prompt.",
    "response": "Tokens of a response, on average.",
    "groups": "Prompts of a global batch.",
}


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
        rollouts.add_argument(flag_of(name), type=int, required=True, metavar="N", help=what)
    rollouts.add_argument(
        "--spread",
        type=float,
        default=0.5,
        metavar="X",
        help="How much lengths differ: the standard deviation of their logarithm. 0: all are "
        "equal. Default: 0.5.",
    )
    rollouts.add_argument(
        "--least",
        type=int,
        default=LEAST_SHARED,
        metavar="N",
        help="Shorter prompts are not shared, as in training. Default: "
        f"{LEAST_SHARED}, which --distca-share-prefixes has.",
    )
    rollouts.add_argument(
        "--batches", type=int, default=3, metavar="N", help="Global batches. Default: 3."
    )
    rollouts.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Another seed draws other lengths."
    )
    add_model_flags(parser)
    cluster = add_cluster_flags(parser)
    cluster.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="GPUs of the whole job."
    )
    add_charge_flags(parser)
    search = parser.add_argument_group("search (layouts to try for each way)")
    search.add_argument(
        "--tensor-model-parallel-sizes",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="Sizes of tensor parallelism to try.",
    )
    search.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        metavar="NAME",
        help="What computes rollouts one by one, as in `distca simulate`. Default: all.",
    )
    parser.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    args = build_parser().parse(argv)
    for name in (*_NUMBERS, "least", "gpus", "batches"):
        if getattr(args, name) < 1:
            raise ValueError(f"{flag_of(name)} {getattr(args, name)}: give at least 1")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must not be negative")
    if min(args.tensor_model_parallel_sizes) < 1:
        raise ValueError("--tensor-model-parallel-sizes: every size must be at least 1")
    cluster = cluster_of(args)
    check_gpus(args.gpus, cluster)
    numbers = (args.prompt, args.responses, args.response, args.groups, args.spread)
    batches = [draw_groups(*numbers, args.seed + n) for n in range(args.batches)]
    context, packed = one_by_one(batches, args.gpus)
    workload = Workload(model_of(args), cluster, args.gpus, context, len(packed[0]), _TOLERANCE)
    if workload.model.experts is not None:
        raise ValueError("models with experts are not simulated on rollouts: give another --model")
    sizes = args.tensor_model_parallel_sizes
    rows = compare(batches, workload, packed, sizes, args.systems, args.least)
    if args.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    else:
        sys.stdout.write(_report(rows, batches, workload, args.least) + "\n")
    return 0


def compare(
    batches: Sequence[Sequence[Group]],
    workload: Workload,
    packed: Sequence[Sequence[Int64s]],
    tensor_sizes: Sequence[int],
    systems: Sequence[str] = SYSTEMS,
    least: int = LEAST_SHARED,
) -> list[Row]:
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
        fastest first.

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
    with progress("distca simulate", "layouts of trees", len(tried)) as shown:
        for title, some in (
            ("trees over all ranks (DistCA)", [e for e in tried if e.ranks_of_tree is None]),
            ("each tree on some ranks", [e for e in tried if e.ranks_of_tree is not None]),
        ):
            row = _best_of_trees(title, some, of_trees, workload, shown.update)
            rows += [] if row is None else [row]
    with progress("distca simulate", doing="rollouts one by one, which takes minutes"):
        choices = advise(workload, packed, systems, tensor_sizes, [1, 2, 4, 8])
    apart = [_row_of(choice, batches, workload) for choice in choices if choice.candidate]
    return rows + sorted(apart, key=lambda row: sum(row.seconds))


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
    """Returns a system's row, whose sequences have somewhat more tokens than the rollouts."""
    packed = workload.sequences * workload.context
    shares = [sum(sum(group.rollouts) for group in groups) / packed for groups in batches]
    return Row(
        f"one by one: {title_of(choice)}",
        str(choice.candidate),
        tuple(each * s for each, s in zip(choice.seconds_of_batches, shares, strict=True)),
        choice.memory_gb,
        choice.idle,
    )


def _report(
    rows: Sequence[Row], batches: Sequence[Sequence[Group]], workload: Workload, least: int
) -> str:
    apart = [row for row in rows if row.title.startswith("one by one")]
    trees = [row for row in rows if not row.title.startswith("one by one")]
    tokens = [sum(sum(group.rollouts) for group in groups) for groups in batches]
    held = sum(sum(tree.tokens for tree in shared(groups, least)) for groups in batches)
    cluster, mean = workload.cluster, sum(tokens) / len(tokens)
    lines = [
        _answer(trees, apart) if held < sum(tokens) else _NOTHING_SHARED.format(least=least),
        f"{counted(workload.gpus, 'GPU')} of {cluster.name}, {len(batches[0])} prompts with "
        f"{len(batches[0][0].responses)} responses each, {mean:,.0f} tokens one by one, "
        f"{held / len(batches):,.0f} as trees,\n{len(batches)} batch(es); simulated, not measured",
        f"{'':48}{'tokens/s':>12}{'s':>9}{'GB a GPU':>10}{'idle':>7}  "
        f"{'first row over it':24}configuration",
    ]
    for row in rows:
        over = "" if row is rows[0] else str(SpeedUp.of(rows[0].seconds, row.seconds))
        lines.append(
            f"{row.title:48}{sum(tokens) / sum(row.seconds):>12,.0f}"
            f"{sum(row.seconds) / len(row.seconds):>9.3f}{row.memory_gb:>10.1f}{row.idle:>7.1%}  "
            f"{over:24}{row.configuration}"
        )
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


def spent(parts: Breakdown) -> str:
    """Says what an iteration's time is spent on."""
    moved = parts.exchanges + parts.collectives + parts.interference
    shares = {
        "linear layers": parts.linear,
        "core attention": parts.attention,
        "communication that nothing hides": moved,
        "copies and launches": parts.copies + parts.launches,
        "waiting": parts.waiting,
    }
    return ", ".join(f"{each / parts.seconds:.1%} {name}" for name, each in shares.items())


def _answer(trees: Sequence[Row], apart: Sequence[Row]) -> str:
    if not trees:
        return "Trees do not fit in memory without pipelines: use more GPUs."
    if not apart:
        return "Share prompts: one by one no layout of these systems divides the job and fits."
    ours, *others = sorted(trees, key=lambda row: sum(row.seconds))
    gain = SpeedUp.of(ours.seconds, apart[0].seconds)
    best = apart[0].title.removeprefix("one by one: ")
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

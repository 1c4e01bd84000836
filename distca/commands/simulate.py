"""`distca simulate`: finds a training job's gain and its best parallel configuration.

    distca simulate --distribution pretrain --context 131072 --sequences 32 \\
        --model llama-8b --cluster dgx-h200 --gpus 64
    distca simulate --lengths lengths.json ... --plot advice.png --trace iteration.json

Iterations are simulated without a GPU: of Megatron with its kinds of context parallelism, of
WLB-LLM and DistCA, each in its best configuration among those that fit in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from distca.commands import serving_requests, serving_step, simulate_rollouts
from distca.commands.command_line import Parser, check_outputs, file_name, unknown
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
from distca.commands.html_page import add_flag, write_page
from distca.commands.simulate_page import page_of
from distca.commands.simulate_progress import simulating, telling_the_best
from distca.commands.simulate_report import (
    as_json,
    format_choices,
    format_parts,
    plot_choices,
)
from distca.commands.verdict import Verdict, fastest
from distca.cost.latent_rows import LATENT_ROWS
from distca.cost.training_memory import Recompute
from distca.documents.lengths import (
    DISTRIBUTIONS,
    check_tokens,
    cut_to_pieces,
    draw,
    read_lengths,
    shuffled,
)
from distca.plan.span import Int64s
from distca.progress import progress
from distca.schedule.baselines.hybrid_cp import find_balanced_scheduler
from distca.simulate import (
    DISTCA_SYSTEMS,
    MEGATRON,
    SYSTEMS,
    Breakdown,
    Choice,
    Workload,
    advise,
    pack_sequences,
    save_trace,
    simulate,
)
from distca.simulate.cluster import Cluster
from distca.simulate.dynamic import DYNAMIC
from distca.simulate.hybrid import HYBRID
from distca.simulate.space import divisions
from distca.simulate.speed_up import enough_batches
from distca.simulate.trials import Trials
from distca.simulate.workload import experts_of_a_node
from distca.wording import counted

_TOLERANCES = (0.05, 0.02, 0.1)
"""Tolerances to choose from; configurations are compared with the first."""
_OF_DISTCA = ("tolerance", "finalists", "whole_iterations", "latent_rows", "exchanges")
"""Flags that say nothing of other systems."""
_SHORTEST = 1024
"""Tokens of the shortest sequences that the command asks for in place of longer ones."""
_MOST_PROCESSES = 8
"""Bound on the processes that simulate: as many iterations run at a time."""
_RECORDS = "records DistCA's iteration of the first batch, for its timeline"
"""What takes a while after the report, without a figure on the screen."""
_DESCRIPTION = """\
Of training; for inference see the --help of `distca simulate prefill`, `decode` and `--serving`.

Says how fast a training job would be on a cluster with plain Megatron, its context parallelism,
WLB-LLM and DistCA, each in the parallel configuration that is best for it among those that fit in
memory.
Nothing is trained, and no GPU is needed: iterations are simulated.
"""
_EXAMPLES = """\
examples:
  distca simulate --distribution pretrain --context 131072 --sequences 32 \\
      --model llama-8b --cluster dgx-h200 --gpus 64
  distca simulate --lengths corpus.idx --context 131072 --sequences 32 \\
      --model llama-34b --gpus 256 --plot advice.png --trace iteration.json

Documents are packed into sequences of --context tokens and cut where these end, the same for all
systems. Below the table are the flags of pretrain_gpt.py that train in DistCA's best configuration.
Ctrl-C, or SIGTERM as of `timeout 60`, ends a search with a line on the fastest up to then.

`distca simulate rollouts` simulates rollouts that share prompts, `distca simulate prefill` and
`distca simulate decode` inference, and `distca simulate --serving` a cluster that serves: see their
--help.
"""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("simulate", _DESCRIPTION, _EXAMPLES, serving_step.KINDS)
    documents = parser.add_argument_group("documents")
    source = documents.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths",
        type=file_name,
        metavar="FILE",
        help="File of document lengths in tokens, from which batches are drawn: a JSON list, "
        "or the .idx file of a Megatron dataset.",
    )
    source.add_argument(
        "--distribution",
        metavar="NAME",
        help=f"Draw lengths from a named distribution: {', '.join(DISTRIBUTIONS)}.",
    )
    documents.add_argument(
        "--context",
        type=int,
        required=True,
        metavar="TOKENS",
        help="Length of a sequence in tokens. Longer documents are cut.",
    )
    documents.add_argument(
        "--sequences",
        type=int,
        required=True,
        metavar="N",
        help="Number of sequences in a global batch, which one iteration trains.",
    )
    documents.add_argument(
        "--batches",
        type=int,
        metavar="N",
        help="Number of global batches to simulate. Default: enough for ratios within about 0.01, "
        f"such as {enough_batches(32)} batches of 32 sequences. For 96 sequences or more it is "
        f"{enough_batches(96)}, and the range may be wider.",
    )
    documents.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Seed with which documents are drawn."
    )
    model = add_model_flags(parser, training=True)
    model.add_argument(
        "--recompute",
        nargs="?",
        const="full",
        default="none",
        choices=get_args(Recompute),
        help="What all systems recompute. full: every layer keeps only its input, and runs its "
        "forward pass again before its backward pass, as with --recompute-granularity full and "
        "one layer; mlp: the same for each MLP, as with --recompute-granularity selective "
        "--recompute-modules mlp.",
    )
    model.add_argument(
        "--latent-rows",
        choices=LATENT_ROWS,
        default="auto",
        help="For DistCA with multi-latent attention and without a pipeline: what ranks send "
        "to servers. on: latents, which servers expand; off: keys and values; auto: what takes "
        "less time.",
    )
    cluster = add_cluster_flags(parser)
    cluster.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="Number of GPUs of the whole job."
    )
    add_charge_flags(parser).add_argument(
        "--exchanges",
        choices=("kernels", "copy-engines"),
        default="kernels",
        help="What moves DistCA's queries, keys, values and outputs. kernels: GPU kernels, "
        "which take the share --interference of compute; copy-engines: copy engines and "
        "network cards, as with --distca-nvshmem-mode copy-engine. These take no compute, but "
        "the host starts each message with a launch. Nobody has measured copy-engines.",
    )
    search = parser.add_argument_group("search (layouts to try for each system)")
    for name in ("tensor", "pipeline"):
        search.add_argument(
            f"--{name}-model-parallel-sizes",
            type=int,
            nargs="+",
            default=[1, 2, 4, 8],
            metavar="N",
            help=f"{name.capitalize()}-parallel sizes to try.",
        )
    search.add_argument(
        "--expert-model-parallel-size",
        type=int,
        default=None,
        metavar="N",
        help="Number of GPUs of a stage that share each layer's routed experts, in all systems. "
        "Default: as many GPUs of a node as divide the experts.",
    )
    search.add_argument(
        "--systems",
        nargs="+",
        default=None,
        choices=SYSTEMS,
        help="Systems to compare. plain: Megatron without context parallelism; cp-p2p, cp-a2a, "
        "cp-a2a+p2p: Megatron with that --cp-comm-type; per-document-cp: Megatron with "
        "--cp-comm-type all_gather; hybrid-cp: Megatron with the scheduler of megatron-core, "
        "if that is installed; dynamic-cp: the rules of Megatron-LM's branch dev, commit "
        "d48bd6be; wlb-llm: WLB-LLM; wlb-llm-paper: WLB-LLM as the paper ran it; greedy, "
        "tiles: DistCA with that scheduler. Default: all except greedy and wlb-llm-paper.",
        metavar="NAME",
    )
    search.add_argument(
        "--finalists",
        type=int,
        default=4,
        metavar="N",
        help="Number of DistCA's configurations that are simulated in full, after a quick "
        "estimate of all.",
    )
    search.add_argument(
        "--whole-iterations",
        action="store_true",
        help="Simulate whole iterations of DistCA's best configurations in all batches. Without "
        "this flag a part stands for the whole in large jobs, in which this can take an hour.",
    )
    search.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="How far a server's load may exceed the mean load, as a fraction of the mean. The "
        "printed flags have this value as --distca-tolerance. Default: the best of "
        f"{', '.join(map(str, _TOLERANCES))} for the best configuration.",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="Draw the table, in the format of the suffix (.png, .svg).",
    )
    add_flag(output)
    output.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Write a timeline of DistCA's best configuration, for ui.perfetto.dev.",
    )
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    if argv and argv[0] in serving_step.KINDS:
        return serving_step.simulate(argv)
    if argv and argv[0] == "rollouts":
        return simulate_rollouts.main(argv[1:])
    if "--serving" in argv:
        return serving_requests.main(argv)
    parser = build_parser()
    _run(parser.parse(argv), parser.given(argv), f"distca simulate {shlex.join(argv)}")
    return 0


def _run(args: argparse.Namespace, given: Mapping[str, str], command: str) -> None:
    if args.batches is None:
        args.batches = enough_batches(max(args.sequences, 1))
    for name in (
        *("batches", "finalists", "sequences", "context", "gpus"),
        "expert_model_parallel_size",
    ):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"{flag_of(name)} {getattr(args, name)} must be at least 1")
    for name in ("tensor_model_parallel_sizes", "pipeline_model_parallel_sizes"):
        if min(getattr(args, name)) < 1:
            raise ValueError(f"{flag_of(name)}: every size must be at least 1")
        setattr(args, name, once(getattr(args, name)))
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed} must not be negative")
    if args.tolerance is not None and not 0 <= args.tolerance < 1:
        raise ValueError(
            f"--tolerance {args.tolerance} is out of range: give a fraction of the mean load from "
            "0 to below 1, such as 0.05"
        )
    check_tokens(args.sequences * args.context)
    args.systems = once(args.systems or _systems())
    _check_outputs(args)
    of_distca = [given[name] for name in _OF_DISTCA if name in given]
    if of_distca and not set(DISTCA_SYSTEMS) & set(args.systems):
        raise ValueError(
            f"{of_distca[0]} is for DistCA: add one of {', '.join(DISTCA_SYSTEMS)} to --systems"
        )
    model, cluster = model_of(args), _cluster_of(args)
    workload = Workload(
        model,
        cluster,
        args.gpus,
        args.context,
        args.sequences,
        _TOLERANCES[0] if args.tolerance is None else args.tolerance,
        args.recompute,
        args.expert_model_parallel_size or experts_of_a_node(model, cluster, args.gpus),
        args.latent_rows,
    )
    check_gpus(workload.gpus, workload.cluster)
    _check_divides(args, workload)
    batches = _batches(args)
    choices, parts = _advise(args, workload, batches)
    best = Verdict.of(choices).distca
    # Before the files, so that it is not lost where one of these cannot be written.
    figures = as_json(choices, workload, len(batches), parts)
    if args.json:
        _write(json.dumps(figures, indent=1))
    else:
        table = format_choices(choices, workload, len(batches))
        with_parts = [format_parts(parts)] if parts else []
        _write("\n".join([table, *with_parts, *Verdict.of(choices).how_to_train(workload)]))
    if args.plot is not None:
        plot_choices(choices, workload, parts, args.plot)
    recorded = None
    if best is not None and best.candidate is not None and (args.trace or args.html):
        with progress("distca simulate", doing=_RECORDS):
            recorded = simulate(best.candidate, workload, batches[0], recording=True)
    if args.html is not None:
        with progress("distca simulate", doing=f"writes {args.html}"):
            text = page_of(command, choices, workload, batches, parts, figures, recorded)
            write_page(args.html, text)
    if args.trace is not None:
        if recorded is None:
            raise ValueError("--trace: nothing of DistCA fits, so there is no timeline")
        save_trace(args.trace, recorded)


def _cluster_of(args: argparse.Namespace) -> Cluster:
    """Returns the cluster, with what moves DistCA's rows."""
    cluster, by_copy_engines = cluster_of(args), args.exchanges == "copy-engines"
    if by_copy_engines and args.baseline_ideal:
        raise ValueError(
            "--exchanges copy-engines says what an exchange costs, but --baseline-ideal charges "
            "nothing: remove one"
        )
    return replace(cluster, charges=replace(cluster.charges, copy_engines=by_copy_engines))


def _systems() -> list[str]:
    """What is compared by default; without megatron-core all but what asks it."""
    others = DYNAMIC, "wlb-llm", "tiles"
    try:
        find_balanced_scheduler()
    except ImportError as error:
        sys.stderr.write(f"distca simulate: left out, as {error}\n")
        return [*(name for name in MEGATRON if name != HYBRID), *others]
    return [*MEGATRON, *others]


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuses files that cannot be written, before any work is done for them."""
    check_outputs(args, "--plot", "--trace", "--html")
    if args.trace is not None and not set(DISTCA_SYSTEMS) & set(args.systems):
        raise ValueError(
            f"--trace is of DistCA: add one of {', '.join(DISTCA_SYSTEMS)} to --systems"
        )


def _batches(args: argparse.Namespace) -> list[list[Int64s]]:
    """Draws the documents, and packs them into the sequences of each global batch."""
    tokens = args.sequences * args.context
    # First of one batch, whose size the user gave; how many batches there are may be chosen here.
    check_tokens(tokens)
    check_tokens(args.batches * tokens)
    if args.distribution is not None:
        if args.distribution not in DISTRIBUTIONS:
            raise ValueError(unknown("distribution", args.distribution, DISTRIBUTIONS))
        lengths = draw(DISTRIBUTIONS[args.distribution], args.batches * tokens, args.seed)
    else:
        lengths = read_lengths(args.lengths)
        _check_context(args, int(lengths.max(initial=0)))
        lengths = shuffled(lengths, args.batches * tokens, args.seed)
    lengths = cut_to_pieces(lengths, args.context)
    sequences = pack_sequences(lengths, args.batches * args.sequences, args.context)
    return [
        sequences[number * args.sequences : (number + 1) * args.sequences]
        for number in range(args.batches)
    ]


def _check_context(args: argparse.Namespace, longest: int) -> None:
    """Checks that sequences are not much longer than documents.

    Peers hold whole sequences, so that documents in needlessly long ones would flatter DistCA.

    Args:
        args: arguments of the command.
        longest: tokens of the longest document.

    Raises:
        ValueError: sequences of half the length would hold every document.
    """
    parts = 1
    while args.context % (2 * parts) == 0 and args.context // (2 * parts) >= max(
        longest, _SHORTEST
    ):
        parts *= 2
    if parts > 1:
        raise ValueError(
            f"--context {args.context}: no document of {args.lengths} has more than {longest:,} "
            f"tokens, and systems without DistCA are faster with shorter sequences: give --context "
            f"{args.context // parts} --sequences {args.sequences * parts}, which are as many "
            "tokens"
        )


def _advise(
    args: argparse.Namespace, workload: Workload, batches: list[list[Int64s]]
) -> tuple[list[Choice], dict[str, Breakdown]]:
    """Returns the best configurations, and what an iteration's time is spent on with two."""
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    tolerances = _TOLERANCES[1:] if args.tolerance is None else ()
    with (
        telling_the_best(args.systems, len(batches)) as watch,
        simulating(args.systems) as searching,
        Trials(workload, batches, processes, searching.told) as trials,
    ):
        watch(trials)
        choices = advise(
            workload,
            batches,
            args.systems,
            args.tensor_model_parallel_sizes,
            args.pipeline_model_parallel_sizes,
            args.finalists,
            tolerances,
            trials,
            searching.reached,
            args.whole_iterations,
        )
        return choices, _parts(choices, trials)


def _parts(choices: Sequence[Choice], trials: Trials) -> dict[str, Breakdown]:
    """Says what an iteration's time is spent on with DistCA and with the fastest of the others."""
    best = Verdict.of(choices).distca
    peer = fastest(choices, [name for name in SYSTEMS if name not in DISTCA_SYSTEMS])
    return {
        choice.system: choice.parts or trials.break_down(choice.candidate)
        for choice in (best, peer)
        if choice and choice.candidate
    }


def _check_divides(args: argparse.Namespace, workload: Workload) -> None:
    """Refuses sizes that no layout of any system divides, before iterations are simulated."""
    sizes = args.tensor_model_parallel_sizes, args.pipeline_model_parallel_sizes

    def divides(gpus: int) -> bool:
        other = replace(workload, gpus=gpus)
        return any(divisions(system, other, *sizes) for system in args.systems)

    if divides(workload.gpus):
        return
    more = (gpus for gpus in range(workload.gpus + 1, 2 * workload.gpus + 1) if divides(gpus))
    fewer = (gpus for gpus in range(workload.gpus - 1, 0, -1) if divides(gpus))
    near = [str(gpus) for gpus in (next(fewer, None), next(more, None)) if gpus is not None]
    raise ValueError(
        f"no layout divides {counted(workload.gpus, 'GPU')}: ranks must share "
        f"{workload.sequences} sequences of {workload.context} tokens evenly, "
        f"tensor-parallel ranks {workload.model.kv_heads} key-value heads, and pipeline stages "
        f"{workload.model.layers} layers. "
        + (f"Give --gpus {' or '.join(near)}, or other" if near else "Give other")
        + " --sequences, --tensor-model-parallel-sizes or --pipeline-model-parallel-sizes"
    )


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")

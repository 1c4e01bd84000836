"""`distca simulate`: what a training job would gain, and its best parallel configuration.

    distca simulate --distribution pretrain --context 131072 --sequences 32 \\
        --model llama-8b --cluster dgx-h200 --gpus 64
    distca simulate --lengths lengths.json ... --plot advice.png --trace iteration.json

Iterations are simulated, on no GPU: plain Megatron, context parallelism and DistCA, each in the
configuration that is best for it among those that fit in memory. Documents are packed into
sequences of `--context` tokens and cut where these end, for all alike. Below the table are the
flags of `pretrain_gpt.py` that train in DistCA's best configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from distca.cost.models import MODELS, ModelSize
from distca.plan.span import Int64s
from distca.plan_command import cut_to_pieces, shuffled
from distca.simulate import (
    CLUSTERS,
    SYSTEMS,
    WAYS,
    Choice,
    Cluster,
    Job,
    advise,
    best_of_distca,
    how_to_train,
    pack_sequences,
    save_trace,
    simulate,
)
from distca.simulate.advice_report import as_json, format_choices, make_figure, plot_choices

_SIZES = {
    "layers": "transformer layers",
    "hidden_size": "width of the residual stream",
    "heads": "query heads",
    "kv_heads": "key-value heads",
    "head_dim": "elements of a head",
    "ffn_hidden_size": "width of the gated MLP",
    "vocab_size": "tokens of the vocabulary",
}
_OVERRIDES = {
    "gpus_per_node": "GPUs of a node",
    "memory_gb": "of a GPU, 10^9 bytes",
    "peak_tflops": "of a GPU, dense 16-bit",
    "linear_mfu": "the part of the peak that linear layers reach",
    "attention_tflops": "of the attention kernel, forward",
    "node_gb_per_s": "between two GPUs of a node",
    "network_gb_per_s": "of a GPU, between nodes",
}


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="distca simulate",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    documents = parser.add_argument_group("documents")
    source = documents.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--lengths", type=Path, metavar="FILE", help="a JSON list of lengths, or a Megatron .idx"
    )
    source.add_argument(
        "--distribution", metavar="NAME", help="a named distribution: see data/lengths.py"
    )
    documents.add_argument(
        "--context", type=int, required=True, help="tokens of a sequence; longer documents are cut"
    )
    documents.add_argument("--sequences", type=int, required=True, help="of a global batch")
    documents.add_argument("--batches", type=int, default=2, help="global batches to simulate")
    documents.add_argument("--seed", type=int, default=0, help="of the order, or the distribution")
    model = parser.add_argument_group("model (a preset, or all sizes)")
    model.add_argument("--model", metavar="NAME", help=", ".join(MODELS))
    for name, what in _SIZES.items():
        model.add_argument(_flag(name), type=int, metavar="N", help=what)
    cluster = parser.add_argument_group("cluster (a preset, and what differs from it)")
    cluster.add_argument(
        "--cluster", default="dgx-h100", metavar="NAME", help=f"{', '.join(CLUSTERS)}"
    )
    cluster.add_argument("--gpus", type=int, required=True, help="of the whole job")
    for name, what in _OVERRIDES.items():
        kind = int if name == "gpus_per_node" else float
        cluster.add_argument(_flag(name), type=kind, metavar="X", help=what)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--tensor-model-parallel-sizes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N"
    )
    search.add_argument(
        "--pipeline-model-parallel-sizes", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N"
    )
    search.add_argument(
        "--systems",
        nargs="+",
        default=["packed", "per-document-cp", "wlb-llm", "tiles"],
        choices=SYSTEMS,
        help=f"{', '.join(SYSTEMS)}",
        metavar="NAME",
    )
    search.add_argument(
        "--finalists", type=int, default=6, help="configurations with DistCA that are compared"
    )
    search.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        help="of servers' loads; the printed flags have it as --distca-tolerance",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="all figures, as JSON")
    output.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the table")
    output.add_argument(
        "--trace", type=Path, metavar="FILE", help="a timeline of DistCA's best, for Perfetto"
    )
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        _run(args)
    except (ValueError, ImportError, OSError) as error:
        parser.exit(2, f"distca simulate: {error}\n")
    return 0


def _run(args: argparse.Namespace) -> None:
    for name in ("batches", "finalists", "sequences", "context"):
        if getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} {getattr(args, name)} must be at least 1")
    for name in ("tensor_model_parallel_sizes", "pipeline_model_parallel_sizes"):
        if min(getattr(args, name)) < 1:
            raise ValueError(f"{_flag(name)}: every size must be at least 1")
    if not 0 <= args.tolerance < 1:
        raise ValueError(f"--tolerance {args.tolerance} is out of range: 0 to below 1")
    _check_outputs(args)
    job = Job(
        _model(args),
        _cluster(args),
        args.gpus,
        args.context,
        args.sequences,
        args.tolerance,
    )
    batches = _batches(args)
    choices = _advise(args, job, batches)
    # Before the files, so that it is not lost where one of these cannot be written.
    if args.json:
        _write(json.dumps([as_json(choice, job) for choice in choices], indent=1))
    else:
        _write("\n".join([format_choices(choices, job), *how_to_train(choices, job)]))
    if args.plot is not None:
        plot_choices(choices, job, args.plot)
    if args.trace is not None:
        _trace(args.trace, job, batches[0], choices)


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuses files that could not be written, before any work is done for them."""
    for flag, path in (("--plot", args.plot), ("--trace", args.trace)):
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{flag} {path} is a folder: give the name of a file")
        there = next(parent for parent in path.absolute().parents if parent.exists())
        if not there.is_dir():
            raise ValueError(f"{flag} {path}: {there} is not a folder")
        if not os.access(there, os.W_OK):
            raise ValueError(f"{flag} {path}: {there} cannot be written to")
    if args.trace is not None and not set(WAYS) & set(args.systems):
        raise ValueError(f"--trace is of DistCA: add one of {', '.join(WAYS)} to --systems")
    if args.plot is not None:
        written = make_figure().canvas.get_supported_filetypes()
        if args.plot.suffix[1:] not in written:
            raise ValueError(f"--plot {args.plot}: the suffix must be one of {', '.join(written)}")


def _model(args: argparse.Namespace) -> ModelSize:
    sizes = {name: getattr(args, name) for name in _SIZES}
    given = {name: value for name, value in sizes.items() if value is not None}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{_flag(name)} {value} must be at least 1")
    if args.model is None:
        defaults = {field.name for field in fields(ModelSize) if field.name == "vocab_size"}
        missing = [_flag(name) for name in _SIZES if name not in given and name not in defaults]
        if missing:
            raise ValueError(f"give --model, or all sizes: {', '.join(missing)} missing")
        return ModelSize(**given)
    if args.model not in MODELS:
        raise ValueError(f"no model {args.model!r}: choose from {', '.join(MODELS)}")
    return replace(MODELS[args.model], **given)


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster not in CLUSTERS:
        raise ValueError(f"no cluster {args.cluster!r}: choose from {', '.join(CLUSTERS)}")
    given = {name: getattr(args, name) for name in _OVERRIDES if getattr(args, name) is not None}
    return replace(CLUSTERS[args.cluster], **given)


def _batches(args: argparse.Namespace) -> list[list[Int64s]]:
    """Global batches of sequences: see the module."""
    from data.lengths import DISTRIBUTIONS, draw, read_lengths

    tokens = args.sequences * args.context
    if args.distribution is not None:
        if args.distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"no distribution {args.distribution!r}: choose from {', '.join(DISTRIBUTIONS)}"
            )
        lengths = draw(DISTRIBUTIONS[args.distribution], args.batches * tokens, args.seed)
    else:
        lengths = shuffled(read_lengths(args.lengths), args.batches * tokens, args.seed)
    lengths = cut_to_pieces(lengths, args.context)
    sequences = pack_sequences(lengths, args.batches * args.sequences, args.context)
    return [
        sequences[number * args.sequences : (number + 1) * args.sequences]
        for number in range(args.batches)
    ]


def _advise(args: argparse.Namespace, job: Job, batches: list[list[Int64s]]) -> list[Choice]:
    from tqdm import tqdm

    with tqdm(unit=" iterations", disable=None) as bar:

        def progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        told: Callable[[str], None] = progress
        choices = advise(
            job,
            batches,
            args.systems,
            args.tensor_model_parallel_sizes,
            args.pipeline_model_parallel_sizes,
            args.finalists,
            told,
        )
    if not any(choice.tried for choice in choices):
        raise ValueError(
            f"no configuration divides {job.gpus} GPUs, {job.model.layers} layers, "
            f"{job.model.kv_heads} key-value heads and {job.sequences} sequences: give other sizes "
            "of tensor or pipeline parallelism, or another batch"
        )
    return choices


def _trace(path: Path, job: Job, batch: list[Int64s], choices: Sequence[Choice]) -> None:
    best = best_of_distca(choices)
    if best is None:
        raise ValueError("--trace: nothing of DistCA fits, so there is no timeline")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_trace(path, simulate(best, job, batch, recording=True))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())

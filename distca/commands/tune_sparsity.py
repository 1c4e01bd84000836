"""`distca tune sparsity`: measures what dropping far keys does to a model's answers."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distca.commands import html_page, tune_page
from distca.commands.command_line import Parser, check_outputs
from distca.commands.engine_flags import add_dtype_flag, served_dtype
from distca.commands.served_sparsity import add_node_parts_flag
from distca.cost.link import Links
from distca.progress import progress
from distca.schedule.serving.csps import NODE_PARTS, Levels
from distca.schedule.serving.csps.calibration_file import CalibrationFile, load_calibration

_EPILOG = """
example:
  distca tune sparsity MODEL --prompts prompts.json --context-parallel-size 4 --ranks-per-node 2 \\
      --output calibration.json

Prompts are run by one process, with their keys dropped as that many ranks would drop them. Every
fourth one is held out: it says how far predictions are off. What the file has of these prompts
already is kept, so an interrupted measurement goes on.
"""


def build_parser() -> Parser:
    """Builds the parser of the command's flags."""
    parser = Parser("tune sparsity", f"{__doc__.splitlines()[0]}\n", _EPILOG)
    parser.add_argument("model", metavar="MODEL", help="Folder of a Hugging Face model.")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON file with a list of typical prompts. Each prompt is a text, or a list of "
        "token ids.",
    )
    parser.add_argument(
        "--context-parallel-size",
        type=int,
        required=True,
        metavar="N",
        help="Number of ranks that will answer.",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="Number of ranks per node. Default: all ranks.",
    )
    parser.add_argument(
        "--nodes-per-rack",
        type=int,
        metavar="N",
        help="Number of nodes per rack. Default: all nodes.",
    )
    add_node_parts_flag(parser)
    parser.add_argument(
        "--samples",
        type=int,
        default=24,
        metavar="N",
        help="Number of sparsities to measure on each prompt.",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Seed with which sparsities and needles are drawn.",
    )
    add_dtype_flag(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("calibration.json"),
        metavar="FILE",
        help="File for the calibration, as JSON.",
    )
    html_page.add_flag(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status.

    Raises:
        ValueError: the flags, the model, the prompts or the file cannot be used.
        ImportError: a package is missing.
    """
    args = build_parser().parse(argv)
    levels = _levels_of(args)
    args.dtype = served_dtype(args.dtype)
    check_outputs(args, "--output", "--html")
    with progress("distca tune sparsity", doing="loads libraries and the model"):
        from distca.inference.models import DTYPES, read_model
        from distca.inference.sparsity_calibration import calibrate, measured_on, read_prompts

        model = read_model(args.model, DTYPES[args.dtype])
    prompts = read_prompts(args.prompts, model)
    on = measured_on(model, levels, prompts, args.seed)
    file = CalibrationFile(on, [], [])
    if args.output.exists():
        file = load_calibration(args.output)
        if file.measured_on != on or len(file.samples) != args.samples:
            raise ValueError(
                f"--output {args.output} was measured on another model, or with other prompts or "
                "flags: give another file, or the flags that made it"
            )
    total = len(prompts) * (1 + args.samples)
    done = len(file.measured) * (1 + args.samples)
    with progress("distca tune sparsity", "runs", total, done=done) as shown:
        for found in calibrate(file, model, levels, prompts, args.samples, args.seed, shown.update):
            file = found
            file.save(args.output)
    described = _described(file)
    sys.stdout.write(f"{described}\nwritten to {args.output}\n")
    if args.html is not None:
        command = f"distca tune sparsity {shlex.join(argv)}"
        saved = json.loads(args.output.read_text())
        rows = {
            f"{_NAMES[measure]}: {what}": value
            for measure, fit in file.calibration.fits.items()
            for what, value in (("median error", fit.error), ("headroom", fit.headroom))
        }
        rows["needles that the dense model recalls"] = file.calibration.recalled
        page = tune_page.figures("sparsity", command, described.splitlines(), rows, saved)
        html_page.write_page(args.html, page)
    return 0


def _levels_of(args: argparse.Namespace) -> Levels:
    """Returns the levels that the flags describe."""
    ranks = args.context_parallel_size
    if ranks < 2:
        raise ValueError(f"--context-parallel-size {ranks}: one rank has no far keys: give 2")
    if args.samples < 1:
        raise ValueError(f"--samples {args.samples}: give at least 1")
    of_node = ranks if args.ranks_per_node is None else args.ranks_per_node
    links = Links(of_node, nodes_per_rack=args.nodes_per_rack)
    return Levels(links, ranks, args.node_parts or NODE_PARTS[0])


def _described(file: CalibrationFile) -> str:
    """What was found, for a reader."""
    calibration, on = file.calibration, file.measured_on
    lengths = [each.tokens for each in calibration.measured]
    lines = [
        f"{on.model}: {on.prompts} prompts of {min(lengths):,} to {max(lengths):,} tokens on "
        f"{on.ranks} ranks, {len(calibration.held_out)} of them held out; "
        f"{len(file.samples)} sparsities each"
    ]
    for measure, fit in calibration.fits.items():
        found = [each.degraded[measure].mean() for each in calibration.held_out]
        lines.append(
            f"  {_NAMES[measure]}: {np.mean(found):.3g} on average over what was run; predictions "
            f"are {fit.error:.0%} off (median); held-out prompts lost up to {fit.headroom:.2f} "
            "times the prediction (headroom)"
        )
    recalled = calibration.recalled
    lines.append(f"  needles that the dense model recalls: {recalled:.0%} of their tokens")
    if not recalled:
        lines.append("  none can be lost, so --max-recall-loss bounds nothing for this model")
    return "\n".join(lines)


_NAMES = {"kl": "divergence (nats)", "recall_loss": "needles lost"}

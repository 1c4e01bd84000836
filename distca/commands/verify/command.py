"""The parser of `distca verify`, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from distca.commands.command_line import Parser, write_on
from distca.commands.verify.cost_model import CLUSTER, PROFILE
from distca.commands.verify.ranks import verify_machine, verify_under_torchrun
from distca.commands.verify.report import (
    REPORT,
    describe_machine,
    keep_older,
    report,
    save_report,
)
from distca.commands.verify.stage import Line
from distca.commands.verify.stages import STAGES
from distca.lifetime import check_processes
from distca.progress import progress
from distca.torchrun import read_torchrun

_NAMES = [stage.name for stage in STAGES]
_ON_CPUS = 2
"""Ranks on a machine without GPUs: how many by default, and at most."""
_DESCRIPTION = """\
Proves that DistCA works on this machine, stage by stage, and measures what it costs: kernels,
transports, answers and training against references, and rates against the simulator's predictions.
Each stage is one line. The first that fails says what to do, and the command ends with status 1.
"""
_EXAMPLES = """\
examples:
  distca verify
  distca verify --output machine/
  distca verify --stages kernels transports
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:PORT --rdzv-backend c10d \\
      -m distca verify

It starts a process for each GPU, or two on CPUs. Under torchrun it runs on torchrun's processes, on
several machines. It is meant to take about ten minutes on a machine with eight GPUs; no GPU has run
it yet.
"""


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("verify", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=f"Number of processes. Default: one for each GPU, or {_ON_CPUS} on CPUs.",
    )
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=_NAMES,
        metavar="NAME",
        default=_NAMES,
        help=f"Stages to run: some of {', '.join(_NAMES)}. Default: all.",
    )
    parser.add_argument(
        "--output",
        type=_folder,
        metavar="DIR",
        help="Folder for three files: verify.json has all that we need to know if something "
        "fails; profile.json is for --distca-profile in training and --profile of `distca "
        "plan`; cluster.json is for --cluster of `distca simulate`.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object at the end.")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 1 if a stage failed."""
    args = build_parser().parse(argv)
    names = [name for name in _NAMES if name in args.stages]
    launched = read_torchrun()
    if launched is not None and args.ranks is not None:
        raise ValueError("--ranks: torchrun has started the processes: leave it out")
    ranks = 0 if launched is not None else _ranks(args.ranks)
    machine: dict[str, object] = {}
    if args.output is not None:
        _make_folder(args.output)
        machine = describe_machine()
    lines: list[Line] = []
    writes = args.output is not None and (launched is None or launched.rank == 0)

    def take(line: Line) -> None:
        lines.append(line)
        try:
            # First: a file outlasts whoever reads what is printed.
            if args.output is not None:
                save_report(args.output, lines, names, machine)
        finally:
            _print_last(lines, names, args.json, args.output)

    try:
        if writes and args.output is not None:
            keep_older(args.output)
            # Should this process be killed in the first stage.
            save_report(args.output, lines, names, machine)
        if launched is not None:
            verify_under_torchrun(names, args.output, take, lines.append)
        # Training takes longer than all others together, so an estimate would count up.
        with progress(
            "distca verify", "stages", len(names), doing=_doing(names), estimates=False
        ) as shown:

            def tell(line: Line) -> None:
                take(line)
                shown.describe(_doing(names[len(lines) :]))
                shown.update()

            verify_machine(ranks, names, args.output, tell)
    except KeyboardInterrupt:
        if writes and args.output is not None:
            save_report(args.output, lines, names, machine, interrupted=True)
        raise
    return int(lines[-1].state == "failed")


def _folder(text: str) -> Path:
    """Returns the folder of `--output`.

    Raises:
        ArgumentTypeError: it has no name, as with a variable that is not set.
    """
    if not text:
        raise argparse.ArgumentTypeError("give a folder, such as machine")
    return Path(text)


def _make_folder(path: Path) -> None:
    """Makes the folder of `--output`.

    Raises:
        ValueError: it cannot be made, or what it is for cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"--output {path} is a file: give a folder") from None
    except OSError as error:
        raise ValueError(f"--output {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"--output {path} cannot be written to")
    for name in (REPORT, PROFILE, CLUSTER):
        if (path / name).is_dir():
            raise ValueError(
                f"--output {path}: {name} is a folder there: remove it or give another --output"
            )


def _ranks(given: int | None) -> int:
    """Returns the number of ranks.

    Raises:
        ValueError: there are fewer GPUs, or none are asked for.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = given if given is not None else gpus or _ON_CPUS
    if ranks < 1:
        raise ValueError(f"--ranks {ranks} must be at least 1")
    check_processes(ranks, gpus, f"--ranks {ranks}")
    return ranks


def _doing(left: Sequence[str]) -> str:
    """Names the stage that runs, and its limit."""
    limits = {stage.name: stage.seconds for stage in STAGES}
    return f"{left[0]}, for {limits[left[0]] / 60:g} min at most" if left else ""


def _print_last(
    lines: Sequence[Line], names: Sequence[str], as_json: bool, output: Path | None
) -> None:
    """Prints the last line; with JSON all are printed after the last stage."""
    line = lines[-1]
    if as_json:
        if line.state == "failed" or len(lines) == len(names):
            write_on(json.dumps(report(lines, names), indent=1) + "\n")
        return
    text = format_line(line)
    left = names[len(lines) :]
    if line.state == "failed":
        more = f"; not run: {', '.join(left)}" if left else ""
        text += f"{line.stage} failed{more}\n"
    elif not left:
        text += f"{_summary(lines)}\n"
    if output is not None and (line.state == "failed" or not left):
        text += f"the report, which is what to send us: {output / REPORT}\n"
    write_on(text)


def _summary(lines: Sequence[Line]) -> str:
    """What it means that no stage failed."""
    ran = [line.stage for line in lines if line.state == "ok"]
    others = [name for name in _NAMES if name not in ran]
    if not others:
        return f"nothing failed in all {len(_NAMES)} stages"
    return f"nothing failed in {len(ran)} of {len(_NAMES)} stages; not run: {', '.join(others)}"


def format_line(line: Line) -> str:
    """Returns a stage's line, and what to do where it failed."""
    width = max(map(len, _NAMES))
    text = f"{line.state:8} {line.stage:{width}} {line.seconds:6.1f} s  {line.text}\n"
    return text + (f"{'':8} {'':{width}} {'':8}  {line.cure}\n" if line.cure else "")

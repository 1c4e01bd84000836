"""`distca report`: summarizes training runs from what they wrote, as text, JSON or a page.

    distca report demo
    distca report logs/1234 --html report.html

Reads TensorBoard's files, logs, timelines of `--distca-trace` and plans, wherever they are in the
folder.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distca.commands import html_page
from distca.commands.command_line import Parser, check_output
from distca.commands.report_losses import LossComparison
from distca.commands.report_page import page_of
from distca.plan import Plan, load_plan
from distca.run_figures import (
    AFTER,
    ALLOCATED,
    ATTENTION_BUSIEST,
    ATTENTION_MEAN,
    BEFORE,
    BUSIEST,
    LOSS,
    MEAN,
    MFU,
    MOVED,
    PLAN_WAIT,
    RESIDENT,
    SECONDS,
    SPEED,
    TFLOPS,
    WAIT,
    Scalars,
    board_files,
    read_boards,
    read_log,
)
from distca.timeline import TimelineEvent
from distca.wording import counted

SHOWN = (
    # CPU seconds stand first: runs on CPUs alone have them, whose seconds say nothing.
    *(BUSIEST, MEAN, SPEED, SECONDS, MFU, TFLOPS, BEFORE, AFTER, ATTENTION_BUSIEST, ATTENTION_MEAN),
    *(WAIT, MOVED, PLAN_WAIT, ALLOCATED, RESIDENT),
)
"""Figures that a report has, in its order, if a run has them."""
ON_CPUS = (
    "These ranks ran on CPUs. If they shared cores, tokens/s and seconds of a step say nothing: a "
    "rank that waits leaves its core to others. Compare CPU seconds."
)
_LOGS = ("*.log", "*.out")
_TRACE = "traceEvents"
_PLAN = ("documents", "placement", "tasks")
_DESCRIPTION = """\
Summarizes the training runs of a folder, and compares them: speed, loss, balance, waits, memory. It
reads TensorBoard's files, or logs where there are none, timelines of --distca-trace, and the plan
that a run with --tensorboard-dir saves.
"""
_EXAMPLES = """\
examples:
  distca report demo
  distca report logs/1234 --html report.html
"""


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        name: where its figures are in the folder.
        scalars: figures by name and iteration.
        compared: iterations whose figures are compared; None: all except the first that was
            logged, in which a run warms up.
    """

    name: str
    scalars: Scalars
    compared: frozenset[int] | None = None

    @property
    def losses(self) -> Mapping[int, float]:
        """The loss of each iteration that was logged."""
        return self.scalars.get(LOSS, {})

    def medians(self) -> dict[str, float]:
        """Returns the medians of its figures over the iterations that are compared."""
        found = {}
        for name in SHOWN:
            logged = self.scalars.get(name, {})
            steps = sorted(logged if self.compared is None else self.compared & logged.keys())
            if self.compared is None:
                steps = steps[1:] or steps
            if steps:
                found[name] = statistics.median(logged[step] for step in steps)
        return found

    def figures(self) -> dict[str, Any]:
        """Returns its figures as JSON values."""
        steps = sorted(self.losses)
        return {
            "first_iteration": steps[0] if steps else None,
            "last_iteration": steps[-1] if steps else None,
            "first_loss": self.losses[steps[0]] if steps else None,
            "last_loss": self.losses[steps[-1]] if steps else None,
            "medians": self.medians(),
        }


@dataclass(frozen=True)
class Files:
    """What runs wrote.

    Attributes:
        runs: runs by name.
        trace: name and spans of each rank in the newest timeline; empty: there is none.
        plan: newest plan, and what was saved with it, or None.
    """

    runs: tuple[Run, ...]
    trace: Mapping[str, list[TimelineEvent]]
    plan: tuple[Plan, dict[str, Any]] | None

    def compared_losses(self) -> LossComparison | None:
        """Returns the losses of the iterations that all runs logged; None: no iteration is of
        all of them."""
        planned = [run.name for run in self.runs if AFTER in run.scalars]
        return LossComparison.of({run.name: run.losses for run in self.runs}, planned)


def build_parser() -> Parser:
    """Makes the parser of the command's flags."""
    parser = Parser("report", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "folder",
        type=Path,
        metavar="LOGDIR",
        help="Folder to which the runs wrote (--tensorboard-dir), or a folder that contains "
        "such folders.",
    )
    parser.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    html_page.add_flag(parser)
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    args = build_parser().parse(argv)
    check_output("--html", args.html)
    files = read_files(args.folder)
    figures = figures_of(files)
    if args.json:
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    else:
        sys.stdout.write("\n".join([answer(files), *_table(files)]) + "\n")
    if args.html is not None:
        command = f"distca report {shlex.join(argv)}"
        compared = files.compared_losses()
        said = "" if compared is None else compared.sentence()
        page = page_of(command, answer(files), figures, said, files.trace, files.plan)
        html_page.write_page(args.html, page)
    return 0


def read_files(folder: Path) -> Files:
    """Reads what runs wrote into a folder and those inside of it.

    Raises:
        ValueError: there is no such folder, or no run wrote to it.
        ImportError: tensorboard is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the one that a run wrote to")
    boards = sorted({file.parent for file in folder.rglob("events.*")})
    runs = [Run(_name(each, folder), read_boards(board_files(each))) for each in boards]
    if not runs:
        logs = sorted(path for pattern in _LOGS for path in folder.rglob(pattern))
        read = [Run(_name(path, folder), read_log(path)) for path in logs]
        # All ranks have a log, and one prints these lines.
        runs = [run for run in read if run.scalars]
    trace: Mapping[str, list[TimelineEvent]] = {}
    plan = None
    for path in sorted(folder.rglob("*.json"), key=lambda each: each.stat().st_mtime_ns):
        saved = _read_json(path)
        if _TRACE in saved:
            trace = _spans(saved[_TRACE])
        elif {*_PLAN} <= saved.keys():
            plan = load_plan(path)
    if not (runs or trace or plan):
        raise ValueError(
            f"{folder} has no figures of a run: train with --tensorboard-dir or --distca-trace in "
            "it, or give the folder of its logs"
        )
    return Files(_comparable(runs), trace, plan)


def _comparable(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Compares several runs in the iterations that all of them logged, except the first."""
    steps = [run.scalars.get(BUSIEST) or run.losses for run in runs]
    shared = sorted(set.intersection(*map(set, steps))) if len(runs) > 1 else []
    if len(shared) < 2:
        return tuple(runs)
    return tuple(replace(run, compared=frozenset(shared[1:])) for run in runs)


def _name(path: Path, folder: Path) -> str:
    name = path.relative_to(folder).as_posix()
    return folder.resolve().name if name == "." else name


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file has; empty: it has none."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _spans(events: list[dict[str, Any]]) -> dict[str, list[TimelineEvent]]:
    """Returns the spans of each rank, by its name."""
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    spans: dict[str, list[TimelineEvent]] = {names[rank]: [] for rank in sorted(names)}
    for each in events:
        if each["ph"] == "X":
            spans[names[each["pid"]]].append(each)  # type: ignore[arg-type]
    return spans


def seconds_of(spans: list[TimelineEvent]) -> dict[str, float]:
    """Returns what a rank spends its recorded time on, in seconds."""
    if not spans:
        return dict.fromkeys(("core attention", "waits", "other layers", "between ticks"), 0.0)
    whole = max(each["ts"] + each["dur"] for each in spans) - min(each["ts"] for each in spans)

    def total(of: Iterator[TimelineEvent]) -> float:
        return sum(each["dur"] for each in of) / 1e6

    ticks = total(each for each in spans if each["cat"] == "ticks")
    kernels = total(each for each in spans if each["cat"] == "kernels")
    waits = total(each for each in spans if each["name"].startswith("wait"))
    return {
        "core attention": kernels,
        "waits": waits,
        "other layers": max(ticks - kernels - waits, 0.0),
        "between ticks": max(whole / 1e6 - ticks, 0.0),
    }


def figures_of(files: Files) -> dict[str, Any]:
    """Returns all figures as JSON values."""
    compared = files.compared_losses()
    return {
        "runs": {run.name: run.figures() for run in files.runs},
        "losses": {
            run.name: [[step, run.losses[step]] for step in sorted(run.losses)]
            for run in files.runs
        },
        "compared_losses": None if compared is None else compared.figures(),
        "timeline_seconds": {name: seconds_of(spans) for name, spans in files.trace.items()},
    }


def answer(files: Files) -> str:
    """Says in a sentence or two how runs went, and which is fastest."""
    if not files.runs:
        parts = [counted(len(files.trace), "rank") + " in a timeline"] if files.trace else []
        return f"No figures of iterations; {', '.join([*parts, *['a plan'] * bool(files.plan)])}."
    measures = (BUSIEST, SECONDS)
    medians = {run.name: run.medians() for run in files.runs}
    shared = [name for name in measures if all(name in each for each in medians.values())]
    first = min(files.runs, key=lambda run: medians[run.name].get(shared[0], 0.0) if shared else 0)
    said = [f"{first.name}: {_progress(first)}"]
    if shared and len(files.runs) > 1:
        of = {name: each[shared[0]] for name, each in medians.items()}
        others = ", ".join(
            f"{name} needs {of[name]:.3g} ({of[name] / of[first.name]:.2f} times as many)"
            for name in of
            if name != first.name
        )
        what = "CPU seconds on its busiest rank" if shared[0] == BUSIEST else "seconds"
        said.append(f"A step of {first.name} needs {of[first.name]:.3g} {what}; {others}.")
    found = medians[first.name]
    if AFTER in found and BEFORE in found:
        said.append(
            f"Its busiest rank has {found[AFTER]:.2f} times the mean core attention; in plain data "
            f"parallelism it would have {found[BEFORE]:.2f} times."
        )
    if any(BUSIEST in each and SPEED in each for each in medians.values()):
        said.append(ON_CPUS)
    return " ".join(said)


def _progress(run: Run) -> str:
    """Says how far a run came, how its loss went, and how fast it was."""
    steps, parts = sorted(run.losses), []
    if steps:
        parts.append(
            f"iterations {steps[0]} to {steps[-1]}, loss {run.losses[steps[0]]:.4g} to "
            f"{run.losses[steps[-1]]:.4g}"
        )
    found = run.medians()
    if BUSIEST in found:
        parts.append(f"{found[BUSIEST]:.3g} CPU seconds of a step's busiest rank")
    elif SPEED in found:
        parts.append(f"{found[SPEED]:,.0f} tokens/s")
    return f"{', '.join(parts) or 'no losses'}."


def _table(files: Files) -> list[str]:
    """Returns a line for each figure, with a column for each run."""
    medians = {run.name: run.medians() for run in files.runs}
    compared = files.compared_losses()
    losses = {} if compared is None else compared.rows()
    width = max(map(len, (*SHOWN, *losses)))
    columns = [max(len(name), 10) for name in medians]

    def row(title: str, cells: Iterable[str]) -> str:
        return f"{title:{width}}" + "".join(
            f"  {cell:>{at}}" for cell, at in zip(cells, columns, strict=True)
        )

    lines = [row("median after the first line", medians)] if medians else []
    for name in SHOWN:
        if any(name in each for each in medians.values()):
            cells = (f"{each[name]:.4g}" if name in each else "" for each in medians.values())
            lines.append(row(name, cells))
    for title, each in losses.items():
        lines.append(row(title, (f"{each[n]:.5g}" if n in each else "" for n in medians)))
    if compared is not None and (said := compared.sentence()):
        lines.append(said)
    for name, spans in files.trace.items():
        parts = ", ".join(f"{what} {seconds:.3g}" for what, seconds in seconds_of(spans).items())
        lines.append(f"{name}: seconds of the timeline: {parts}")
    return lines

"""The paper's experiments on simulated DGX H200 clusters, each beside what the paper published.

    python benchmarks/cluster/paper.py table3 --output results/cluster
    python benchmarks/cluster/paper.py all --batches 10 --output results/cluster

* **table3**, which is **fig9**: 3D parallelism (no pipeline); **table4**, which is **fig10**: 4D
  (2, 4 or 8 stages), both with TP 8. For each row of the paper's Tables 3 and 4 and both length
  distributions: WLB-LLM in its ideal form, swept over DP, CP, micro-batches (and PP in 4D), against
  the paper's greedy scheduler and against tiles, swept over the same without CP. Plain Megatron,
  its kinds of context parallelism, and WLB-LLM as the paper's authors ran it (`wlb-llm-paper`)
  stand beside them.
* **table3_batches**, **table4_batches**: the configurations of the stored tables on other
  documents: with `--published`, published lengths.
* **fig3**: per-document CP: share of the all-gather, and of gathered keys in memory.
* **fig4**: variable-length packing: activation memory it needs, and idle time that is left.
* **fig6**: DP against CP for WLB-LLM, 64 GPUs, 128K to 512K.
* **fig11**: signal and single-stream. **fig12**: the tolerance.
* **appendix**: the bound of Appendix A.
* **chains**: beyond the paper: micro-batches smaller than a document (`--distca-chain`).
* **beyond**: other jobs at any TP and PP of up to 8: two of the paper's, 1M tokens, 70B, experts,
  attention windows and chunks.

With `--systems`, a table simulates these systems alone, and takes all others from the stored one;
with `--most-sequences`, so the jobs of few sequences.

In all of them all systems have the same charges (`distca.simulate.charges`); with
`--baseline-ideal` nothing is charged, and the files are `NAME_ideal.*`. Every experiment writes
`NAME.csv`, `NAME.md` and most `NAME.png`. All iterations that were simulated are kept in
`runs.jsonl`: an interrupted run goes on where it stopped. The model (see `distca/simulate`) and the
documents (see `sweep.py`) differ from the paper's. With `--published DIR` the lengths are published
ones (see `../plans/schedulers.py`), the attention kernel's rate is that of
`DIR/attention_forward_h100.csv`, and the files are `NAME_published.*`.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.cluster.figures import (
    appendix,
    chains,
    figure_3,
    figure_4,
    figure_6,
    figure_11,
    figure_12,
)
from benchmarks.cluster.report import BATCHES, Options, Report
from benchmarks.cluster.spread import over_batches
from benchmarks.cluster.sweep import Runner
from benchmarks.cluster.tables import GROUPS, end_to_end, not_stored
from distca.simulate import SYSTEMS
from distca.simulate.speed_up import enough_batches
from distca.whole_file import writing

MODEL_NAMES = list(dict.fromkeys(model for group in GROUPS.values() for model, _ in group.jobs))
DOCUMENTS = ["pretrain", "prolong"]

EXPERIMENTS: dict[str, Callable[[Runner, Options], Report]] = {
    "fig3": figure_3,
    "fig4": figure_4,
    "fig6": figure_6,
    "fig11": figure_11,
    "fig12": figure_12,
    **{name: partial(end_to_end, name) for name in GROUPS},
    "table3_batches": partial(over_batches, "table3"),
    "table4_batches": partial(over_batches, "table4"),
    "appendix": appendix,
    "chains": chains,
}
SAME = {"fig9": "table3", "fig10": "table4"}
PUBLISHED = (
    "Documents: lengths published with WLB-LLM and of ProLong's data, one in ten of those below "
    "10,000 tokens; attention at the highest published rate of the kernel on an H100."
)
PAPERS = (
    "Documents: lengths published with WLB-LLM and of ProLong's data, lengthened, repeated and "
    "left out as in the paper's public experiments; attention at the highest published rate of "
    "the kernel on an H100."
)
DRAWN = "Documents are drawn from distributions like the paper's; they are not the paper's."


def write(
    name: str, report: Report, folder: Path, command: str, documents: str, in_part: bool
) -> None:
    """Writes `NAME.csv`, `NAME.md` and `NAME.png`, and prints the Markdown.

    Args:
        name: name of the files.
        report: what they say.
        folder: where they go.
        command: the command, as a user types it.
        documents: a sentence about the documents.
        in_part: whether only a part of the figures was made anew.
    """
    with writing(folder / f"{name}.csv") as written, written.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(report.rows[0]))
        writer.writeheader()
        writer.writerows(report.rows)
    lines = [f"# {report.title}", "", f"Simulated, not measured: `{command}`. {documents}", ""]
    lines += report.text
    if report.draw is not None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        report.draw(figure)
        with writing(folder / f"{name}.png") as written:
            figure.savefig(written, dpi=80)
        lines += ["", f"![{report.title}]({name}.png)"]
    # A page with only some parts made again has no mark: the rest is of older code.
    pages.write(folder / f"{name}.md", "\n".join(lines), None if in_part else __file__)
    print("\n".join(lines))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, *SAME, "all"])
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument(
        "--batches",
        type=int,
        help=f"of each case; default: {BATCHES} for figures, enough for ratios within about 0.01 "
        f"for tables ({enough_batches(32)} of 32 sequences)",
    )
    parser.add_argument(
        "--finalists",
        type=int,
        default=4,
        help="configurations of DistCA that are to fit in the first batch",
    )
    parser.add_argument(
        "--models", nargs="+", default=MODEL_NAMES, choices=MODEL_NAMES, help="of an experiment's"
    )
    parser.add_argument("--documents", nargs="+", default=DOCUMENTS, choices=DOCUMENTS)
    parser.add_argument(
        "--systems",
        nargs="+",
        default=[],
        choices=SYSTEMS,
        help="only these, in a table whose other systems are those of the stored one",
    )
    parser.add_argument(
        "--most-sequences",
        type=int,
        metavar="N",
        help="remake only the jobs with at most N sequences in a batch, and keep the others of "
        "the stored table",
    )
    parser.add_argument("--published", type=Path, metavar="DIR")
    parser.add_argument("--baseline-ideal", action="store_true", help="charge nothing")
    parser.add_argument(
        "--papers-documents",
        action="store_true",
        help="draw published lengths as the paper's experiments do; needs --published",
    )
    parser.add_argument("--processes", type=int, help="default: one for each core")
    args = parser.parse_args()
    if args.papers_documents and args.published is None:
        parser.error("--papers-documents draws published lengths: give --published DIR")
    if args.systems or args.most_sequences is not None:
        flag = "--systems" if args.systems else "--most-sequences"
        group = GROUPS.get(SAME.get(args.experiment, args.experiment))
        if group is None:
            parser.error(f"{flag} is for {', '.join(GROUPS)}, not for {args.experiment}")
        if not set(args.systems) <= set(group.systems):
            parser.error(f"--systems: {args.experiment} has only {', '.join(group.systems)}")
        jobs = [sizes for (model, _), sizes in group.jobs.items() if model in args.models]
        fewest = min((sequences for sizes in jobs for sequences, _ in sizes), default=0)
        if args.most_sequences is not None and args.most_sequences < fewest:
            parser.error(f"--most-sequences {args.most_sequences}: no job has fewer than {fewest}")
    options = Options(
        args.batches,
        args.finalists,
        "" if args.published is None else str(args.published),
        tuple(args.models),
        tuple(args.documents),
        args.baseline_ideal,
        args.papers_documents,
        tuple(args.systems),
        args.most_sequences,
    )
    if options.in_part and (
        missing := not_stored(SAME.get(args.experiment, args.experiment), options)
    ):
        parser.error(
            f"{flag}: the stored {args.experiment} has no {', '.join(missing)}: make all of it, "
            "or add these systems first with --systems"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    runner = Runner(args.output / "runs.jsonl", args.processes)
    names = list(EXPERIMENTS) if args.experiment == "all" else [args.experiment]
    given = _as_typed(parser, options)
    for name in (SAME.get(name, name) for name in names):
        command = " ".join(["python benchmarks/cluster/paper.py", name, *given, "--output DIR"])
        title = f"{name}_published" if options.published else name
        title += "_papers_documents" if options.papers_documents else ""
        title += "_ideal" if options.baseline_ideal else ""
        documents = PUBLISHED if options.published else DRAWN
        documents = PAPERS if options.papers_documents else documents
        report = EXPERIMENTS[name](runner, options)
        write(title, report, args.output, command, documents, options.in_part)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _as_typed(parser: Parser, options: Options) -> list[str]:
    """Flags that results depend on, where they differ from the default; no paths."""
    typed = []
    for field in fields(options):
        name = field.name.removeprefix("given_")
        value, default = getattr(options, field.name), parser.get_default(name)
        if name == "published":
            typed += ["--published DIR"] if value else []
        elif isinstance(value, bool):
            typed += [_flag(name)] if value else []
        elif isinstance(value, tuple):
            typed += [" ".join([_flag(name), *value])] if list(value) != default else []
        elif value != default:
            typed.append(f"{_flag(name)} {value}")
    return typed


if __name__ == "__main__":
    main()

"""The paper's experiments on simulated DGX H200 clusters, each beside what the paper published.

    python benchmarks/cluster.py table3 --output results/cluster
    python benchmarks/cluster.py all --batches 10 --output results/cluster

* **table3**, **fig9**: 3D parallelism (no pipeline); **table4**, **fig10**: 4D. For each row of
  the paper's Tables 3 and 4 and both length distributions: WLB-LLM in its ideal form, swept over
  DP, CP, micro-batches (and PP in 4D), against the paper's greedy scheduler and against tiles,
  swept over the same without CP. Plain Megatron and per-document CP stand beside them.
* **fig3**: per-document CP: share of the all-gather, and of gathered keys in memory.
* **fig4**: variable-length packing: memory it needs, and idle time that is left.
* **fig6**: DP against CP for WLB-LLM, 64 GPUs, 512K.
* **fig11**: signal and single-stream. **fig12**: the tolerance.
* **appendix**: the bound of Appendix A.

Every experiment writes `NAME.csv`, `NAME.md` and (but for the appendix) `NAME.png`. All iterations
that were simulated are kept in `runs.jsonl`: a run that was interrupted goes on where it stopped.
What differs from the paper: see `distca/simulate` for what is modelled, and `cluster_sweep.py` for
the documents. With `--published DIR` the lengths are published ones (see `plans.py`), and the
attention kernel's rate is that of `DIR/attention_forward_h100.csv`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster_ablations import appendix, figure_11, figure_12
from cluster_baselines import figure_3, figure_4, figure_6
from cluster_report import Options, Report
from cluster_sweep import Runner
from cluster_tables import end_to_end

MODEL_NAMES, DOCUMENTS = ["llama-8b", "llama-34b"], ["pretrain", "prolong"]

EXPERIMENTS: dict[str, Callable[[Runner, Options], Report]] = {
    "fig3": figure_3,
    "fig4": figure_4,
    "fig6": figure_6,
    "fig9": partial(end_to_end, "fig9"),
    "fig10": partial(end_to_end, "fig10"),
    "fig11": figure_11,
    "fig12": figure_12,
    "table3": partial(end_to_end, "table3"),
    "table4": partial(end_to_end, "table4"),
    "appendix": appendix,
}


def write(name: str, report: Report, folder: Path, command: str) -> None:
    """`NAME.csv`, `NAME.md`, `NAME.png`."""
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(report.rows[0]))
        writer.writeheader()
        writer.writerows(report.rows)
    lines = [f"# {report.title}", "", f"Simulated, not measured: `{command}`.", "", *report.text]
    if report.draw is not None:
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        report.draw(figure)
        figure.savefig(folder / f"{name}.png", dpi=80)
        lines += ["", f"![{report.title}]({name}.png)"]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--output", type=Path, metavar="DIR", required=True)
    parser.add_argument("--batches", type=int, default=30, help="of each case")
    parser.add_argument(
        "--sweep-batches", type=int, default=1, help="on which all configurations are tried"
    )
    parser.add_argument(
        "--finalists", type=int, default=2, help="configurations to tune the tolerance of"
    )
    parser.add_argument("--models", nargs="+", default=MODEL_NAMES, choices=MODEL_NAMES)
    parser.add_argument("--documents", nargs="+", default=DOCUMENTS, choices=DOCUMENTS)
    parser.add_argument("--published", type=Path, metavar="DIR")
    parser.add_argument("--processes", type=int, help="default: one for each core")
    args = parser.parse_args()
    if min(args.batches, args.sweep_batches, args.finalists) < 1:
        parser.error("--batches, --sweep-batches and --finalists must be at least 1")
    options = Options(
        args.batches,
        args.sweep_batches,
        args.finalists,
        "" if args.published is None else str(args.published),
        tuple(args.models),
        tuple(args.documents),
    )
    args.output.mkdir(parents=True, exist_ok=True)
    runner = Runner(args.output / "runs.jsonl", args.processes)
    names = [args.experiment]
    if args.experiment == "all":
        # Tables 3 and 4 are figures 9 and 10.
        names = [name for name in EXPERIMENTS if name not in ("table3", "table4")]
    given = [a for a in sys.argv[2:] if a not in ("--output", "--published")]
    given = [a for a in given if a not in (str(args.output), str(args.published))]
    for name in names:
        command = " ".join(["python benchmarks/cluster.py", name, *given])
        write(name, EXPERIMENTS[name](runner, options), args.output, command)


if __name__ == "__main__":
    main()

"""Tables 3 and 4, and Figures 9 and 10: tokens a second over WLB-LLM's, end to end."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import sources
from benchmarks.cluster.report import K, Options, Report, table
from benchmarks.cluster.sweep import Case, Runner
from distca.palette import colour_in_turn
from distca.simulate import BASELINES, DISTCA_SYSTEMS, MEGATRON, Choice
from distca.simulate.advice import Extent
from distca.simulate.speed_up import SpeedUp

TABLE_3 = {
    ("llama-8b", 128): [(8, 64), (16, 128), (32, 256)],
    ("llama-8b", 256): [(4, 64), (8, 128), (16, 256)],
    ("llama-8b", 512): [(2, 64), (4, 128), (8, 256)],
    ("llama-34b", 128): [(4, 64), (8, 128), (16, 256)],
    ("llama-34b", 256): [(2, 64), (4, 128), (8, 256)],
    ("llama-34b", 512): [(2, 64), (4, 128), (8, 256)],
}
"""Batch sizes and GPUs by model and longest document in K."""
TABLE_4 = {
    ("llama-8b", 128): [(32, 64), (64, 128), (128, 256)],
    ("llama-8b", 256): [(16, 64), (32, 128), (32, 256)],
    ("llama-8b", 512): [(8, 64), (8, 128), (16, 256)],
    ("llama-34b", 128): [(32, 128), (64, 256), (128, 512)],
    ("llama-34b", 256): [(16, 128), (32, 256), (32, 512)],
    ("llama-34b", 384): [(8, 128), (8, 256), (16, 512)],
}
BEYOND = {
    ("llama-8b", 128): [(16, 128)],
    ("llama-8b", 1024): [(1, 64), (4, 256)],
    ("llama-34b", 256): [(8, 256)],
    ("llama-70b", 128): [(32, 256)],
    ("llama-70b", 512): [(8, 256)],
    ("qwen3-30b-a3b", 128): [(16, 64)],
    ("qwen3-30b-a3b", 512): [(8, 128)],
    ("qwen3-235b-a22b", 128): [(32, 256)],
    ("gemma3-27b-like", 128): [(16, 128)],
    ("gpt-oss-120b-like", 128): [(16, 128)],
    ("llama4-scout-like", 128): [(16, 128)],
}
"""Two of the paper's jobs of Table 3 at any TP and PP, and jobs that the paper does not have: a
million tokens, larger models, experts, windows or chunks on some layers."""
EXPERT_PARALLEL = {
    "qwen3-30b-a3b": 8,
    "qwen3-235b-a22b": 32,
    "gpt-oss-120b-like": 32,
    "llama4-scout-like": 16,
}
"""GPUs that share each layer's experts, by model."""
PUBLISHED = {
    ("table3", "pretrain"): "1.07 to 1.20",
    ("table3", "prolong"): "1.05 to 1.12",
    ("table4", "llama-8b", "pretrain"): "1.15 to 1.30",
    ("table4", "llama-8b", "prolong"): "1.10 to 1.35",
    ("table4", "llama-34b", "pretrain"): "up to 1.15",
    ("table4", "llama-34b", "prolong"): "up to 1.25",
}
STORED = Path(__file__).parents[1] / "results" / "cluster"
REFERENCE = "wlb-llm"
PAPERS = "wlb-llm-paper"
OVER = {
    "per-document-cp": "per-document CP",
    "cp-p2p": "ring CP",
    "cp-a2a+p2p": "a2a+p2p CP",
    "hybrid-cp": "hybrid CP",
    REFERENCE: "WLB-LLM",
    PAPERS: "WLB-LLM, the paper's way",
}
"""Systems over which DistCA's gains are listed: what Megatron has, then WLB-LLM."""
TOLERANCES = (0.02, 0.05)
"""Tolerances to choose from for each case beside its own, as a user would: the paper's only
hyper-parameter."""
AS_THE_PAPER = (PAPERS, "greedy")
"""The paper's baseline and scheduler, which are run once more with MLPs recomputed."""
NO_LOSS = 0.99
"""Least of WLB-LLM's throughput that DistCA is to have in every job."""
ALL_SIZES = (1, 2, 4, 8)
WITHOUT_CHOICE = (*MEGATRON[1:], REFERENCE, "tiles")
"""Systems that run at any tensor and pipeline sizes."""


@dataclass(frozen=True)
class Group:
    """Jobs of a table of the paper, and what is tried for each.

    Attributes:
        title: title of the page.
        table: name of the table in `PUBLISHED`.
        jobs: batch sizes and GPUs by model and longest document in K.
        tensor: tensor-parallel sizes.
        stages: pipeline sizes.
        systems: systems to compare.
        as_the_paper: whether sizes are the paper's, so that the rest of its way is tried, too.
    """

    title: str
    table: str
    jobs: Mapping[tuple[str, int], Sequence[tuple[int, int]]]
    tensor: tuple[int, ...]
    stages: tuple[int, ...]
    systems: tuple[str, ...]
    as_the_paper: bool


_ALL = (*BASELINES, *DISTCA_SYSTEMS)
GROUPS = {
    "table3": Group(
        "3D parallelism (Table 3, Figure 9)", "table3", TABLE_3, (8,), (1,), _ALL, True
    ),
    "table4": Group(
        "4D parallelism (Table 4, Figure 10)", "table4", TABLE_4, (8,), (2, 4, 8), _ALL, True
    ),
    "beyond": Group(
        "Beyond the paper, at any TP and PP",
        *("", BEYOND, ALL_SIZES, ALL_SIZES, WITHOUT_CHOICE, False),
    ),
}
"""The tables at the paper's sizes, and jobs beyond the paper at any."""


def end_to_end(name: str, runner: Runner, options: Options) -> Report:
    """Compares systems end to end: Table 3 and Figure 9, or Table 4 and Figure 10.

    Args:
        name: a key of `GROUPS`.
        runner: runner of the simulations.
        options: flags of the command.
    """
    group = GROUPS[name]
    cases = [
        replace(
            options.case(model, documents, context, sequences, gpus),
            expert_parallel=EXPERT_PARALLEL.get(model, 1),
        )
        for documents in options.documents
        for (model, context), sizes in group.jobs.items()
        if model in options.models
        for sequences, gpus in sizes
    ]

    def best(system: str, case: Case) -> Choice:
        # The paper's scheduler runs as the paper ran it.
        extent = Extent(
            *(group.tensor, group.stages, options.finalists, TOLERANCES),
            in_the_papers_way=system in AS_THE_PAPER,
        )
        return runner.best(case, system, extent, options.batches_of(case))

    all_cases, most = cases, options.most_sequences
    cases = [case for case in cases if most is None or case.sequences <= most]
    anew = [system for system in group.systems if system in (options.systems or group.systems)]
    found = {system: {case: best(system, case) for case in cases} for system in anew}
    for system in AS_THE_PAPER if group.as_the_paper and not options.systems else ():
        found[f"{system}, MLPs again"] = {
            case: best(system, replace(case, recompute="mlp")) for case in cases
        }
    rows = [_end_to_end_row(case, group) for case in all_cases]
    text = []
    if options.in_part:
        stored = _stored_rows(name)
        rows = [
            stored[_job(row)] if options.systems or case not in cases else row
            for row, case in zip(rows, all_cases, strict=True)
        ]
        what = list(options.systems)
        if most is not None:
            what.append(f"{len(cases)} of {len(all_cases)} jobs, of at most {most} sequences")
        text = [
            f"Made anew: {', '.join(what)}. All other figures are of an earlier version of the "
            f"code: `{_stored_command(name)}`.",
            "",
            *_stored_commit(name),
        ]
    for row, case in zip(rows, all_cases, strict=True):
        if case in cases:
            _fill(row, case, found)
    text += [*_against_published(group, rows), "", *table([_readable(row, group) for row in rows])]
    return Report(group.title, rows, text, partial(_draw_end_to_end, group, rows))


def _job(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a table's jobs apart."""
    return tuple(str(row[name]) for name in ("model", "documents", "longest", "batch", "GPUs"))


def _stored_rows(name: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows of a stored table by job, with numbers where a figure is."""
    with (STORED / f"{name}.csv").open(newline="") as file:
        return {_job(row): {k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)}


def _stored_command(name: str) -> str:
    """The command that made most figures of a stored table."""
    commands = re.findall(r"`(python benchmarks/cluster/paper.py .*?)`", _stored_page(name))
    # A table with a part that was made again names the older command last.
    return str(commands[-1])


def _stored_commit(name: str) -> list[str]:
    """Lines that name the commit which made most figures of a stored table."""
    page = STORED / f"{name}.md"
    commit = sources.commit_of(page.read_text())
    if commit is None:
        # A page with a digest of its code was stored by the commit whose code it is.
        log = ["git", "log", "-1", "--format=%h, %as", "--", str(page)]
        last = subprocess.run(log, cwd=STORED, capture_output=True, text=True, check=True).stdout
        commit = f"Made by the code of commit {last.strip()}."
    return [commit.replace("Made", "All other figures made"), ""]


def _stored_page(name: str) -> str:
    return (STORED / f"{name}.md").read_text().split("\n| ")[0]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _end_to_end_row(case: Case, group: Group) -> dict[str, Any]:
    """What a row says of its job."""
    return {
        "TP": _sizes(group.tensor),
        "PP": _sizes(group.stages),
        "model": case.model,
        "documents": case.documents,
        "longest": f"{case.context // K}K",
        "batch": case.sequences,
        "GPUs": case.gpus,
    }


def _fill(row: dict[str, Any], case: Case, found: dict[str, dict[Case, Choice]]) -> None:
    """Adds the figures of systems to a row."""
    if REFERENCE in found:
        row[f"{REFERENCE} tokens/s"] = found[REFERENCE][case].tokens_per_second
    reference = row[f"{REFERENCE} tokens/s"]
    for system, of_cases in found.items():
        best = of_cases[case]
        row[f"{system} tokens/s"] = best.tokens_per_second
        row[f"{system} speed-up"] = best.tokens_per_second / reference
        row[f"{system} seconds"] = " ".join(f"{each:.6g}" for each in best.seconds_of_batches)
        row[f"{system} GB"] = best.memory_gb
        row[f"{system} idle"] = best.idle
        row[f"{system} exposed"] = best.exposed
        row[f"{system} configuration"] = _configuration(best)
        row[f"{system} tried"] = best.tried
        row[f"{system} simulated"] = best.simulated
        row[f"{system} out of memory"] = best.out_of_memory


def _configuration(best: Choice) -> str:
    """The best configuration, or why there is none."""
    if best.candidate is not None:
        return str(best.candidate)
    if not best.tried:
        return "none divides, or Megatron refuses it"
    if best.out_of_memory == best.tried:
        return "out of memory"
    return f"out of memory in the {best.simulated} simulated"


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _readable(row: dict[str, Any], group: Group) -> dict[str, Any]:
    short = {name: row[name] for name in ("model", "documents", "longest", "batch", "GPUs")}
    ours = [system for system in group.systems if system in DISTCA_SYSTEMS]
    for system in group.systems:
        if system == REFERENCE:
            continue
        gain = speed_up(row, system, REFERENCE)
        short[system] = "OOM" if _is_out_of_memory(row, system) else _cell(gain)
    for system in (REFERENCE, *ours):
        counts = [row[f"{system} {name}"] for name in ("simulated", "out of memory", "tried")]
        short[f"{system}: best"] = row[f"{system} configuration"]
        memory = row[f"{system} GB"]
        short[f"{system}: GB"] = "-" if np.isnan(memory) else f"{memory:.0f}"
        short[f"{system}: simulated, OOM, all"] = ", ".join(map(str, counts))
    return short


def _against_published(group: Group, rows: list[dict[str, Any]]) -> list[str]:
    """Ranges of gains beside the paper's, and of what systems wait for."""
    gains: list[dict[str, Any]] = []
    idle: list[dict[str, Any]] = []
    over = {system: title for system, title in OVER.items() if system in group.systems}
    for model, documents in dict.fromkeys((row["model"], row["documents"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["documents"]) == (model, documents)]
        where: dict[str, Any] = {"model": model, "documents": documents}
        gain = where | {
            f"over {title}": _range(mine, "tiles", other) for other, title in over.items()
        }
        if group.as_the_paper:
            theirs, ours = (f"{system}, MLPs again" for system in AS_THE_PAPER)
            gain["as the paper ran both"] = _range(mine, ours, theirs)
            paper = PUBLISHED.get((group.table, documents))
            gain["paper"] = paper or PUBLISHED[group.table, model, documents]  # type: ignore[index]
        gains.append(gain)
        most = [1 / (1 - row[f"{REFERENCE} idle"]) for row in mine]
        idle.append(
            where
            | {
                f"{system}: {what}": _mean([row[f"{system} {what}"] for row in mine])
                for what in ("idle", "exposed")
                for system in (REFERENCE, PAPERS, *DISTCA_SYSTEMS)
                if system in group.systems
            }
            | {"perfect balance": f"{np.nanmin(most):.2f} to {np.nanmax(most):.2f}"}
        )
    return [
        "Gains of DistCA with tiles"
        + (", and what the paper published" if group.as_the_paper else "")
        + f". TP of {_sizes(group.tensor)}, PP of {_sizes(group.stages)}. {RULE}",
        "",
        *table(gains),
        "",
        _least(rows),
        "",
        *table(idle),
        "",
        *EXPLANATION,
        *(PAPERS_WAY if group.as_the_paper else ()),
    ]


def _least(rows: list[dict[str, Any]]) -> str:
    """What DistCA gains over WLB-LLM at least, and in which jobs it loses."""
    able = [row for row in rows if not np.isnan(row["tiles speed-up"])]
    behind = sorted(
        (row for row in able if row["tiles speed-up"] < NO_LOSS),
        key=lambda row: row["tiles speed-up"],
    )
    least = min((row["tiles speed-up"] for row in able), default=float("nan"))
    text = f"The least over WLB-LLM is {least:.3f} in {len(able)} of {len(rows)} jobs"
    names = ("model", "documents", "longest", "batch", "GPUs")
    jobs = [
        f"{row['tiles speed-up']:.3f} ({' '.join(str(row[name]) for name in names)})"
        for row in behind
    ]
    text += f"; below {NO_LOSS}: {', '.join(jobs)}." if jobs else f"; none is below {NO_LOSS}."
    none = [row for row in rows if _is_out_of_memory(row, "tiles")]
    return (
        f"{text} In the others a system is out of memory."
        if none or len(able) < len(rows)
        else text
    )


def _mean(values: list[float]) -> float:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def speed_up(row: Mapping[str, Any], system: str, other: str) -> SpeedUp | None:
    """How much faster a system is than another in a job; None: one of both does not run.

    There is no range where their batches are not known, or not the same number.

    Args:
        row: row of a table, as it is made or as it is stored.
        system, other: names of its columns.
    """
    mean = float(row[f"{system} tokens/s"]) / float(row[f"{other} tokens/s"])
    if np.isnan(mean):
        return None
    ours, theirs = (
        [float(each) for each in str(row.get(f"{name} seconds", "")).split()]
        for name in (system, other)
    )
    if not ours or len(ours) != len(theirs):
        return SpeedUp(mean, np.nan, np.nan, max(len(ours), 1))
    return SpeedUp.of(ours, theirs)


def _cell(gain: SpeedUp | None) -> str:
    return "-" if gain is None else str(gain)


def _range(rows: list[dict[str, Any]], system: str, other: str) -> str:
    """Range of a system's gains over another, by how much one of them may be off, and the number of
    cases where one of both is out of memory."""
    gains = [speed_up(row, system, other) for row in rows]
    found = [each for each in gains if each is not None]
    if not found:
        return "-"
    means = [each.mean for each in found]
    text = f"{min(means):.2f} to {max(means):.2f}"
    off = [each.high - each.mean for each in found]
    text += "" if np.isnan(off).all() else f" ± {np.nanmax(off):.3f}"
    missing = len(rows) - len(found)
    return f"{text} (not {missing} of {len(rows)})" if missing else text


def _is_out_of_memory(row: dict[str, Any], system: str) -> bool:
    return bool(row[f"{system} configuration"].startswith("out of memory"))


RULE = (
    "Each system has the best configuration for each job that `distca simulate`'s search finds "
    "(`distca/simulate/advice.py`): of baselines all run the first batches whose lower bound of "
    "time is below the time of others, of DistCA, whose plans take longer, the few that promise "
    "most, and these with server pools; the fastest run batches of 96 sequences together, and "
    "the fastest of these all. How many ran, are known to be out of memory, and divide the job: "
    "see below. A job's "
    "figure is the ratio of speeds over all its batches; behind ± is the largest half of a job's "
    "range, in which the ratio over many such batches lies in 19 of 20 cases."
)
EXPLANATION = [
    "All systems have the same charges (`distca/simulate/charges.py`), except with "
    "`--baseline-ideal`: links and copies reach a share of their speed, exchanges slow down "
    "compute, matrix products end in half a wave, the reduction of gradients and exchanges share "
    "ports, and context parallelism copies and keeps what Transformer Engine does.",
    "",
    "*Idle* is the share of time in which compute is not busy. *Exposed* is the part of it in "
    "which ranks wait for exchanges, including late peers. *Perfect balance* is the gain over "
    "WLB-LLM of a system that is never idle and does the same work: at the same sizes no simulated "
    "gain can be much above it. This WLB-LLM packs with the times that it is then judged by, "
    "forward and backward, into bins that may be a 16th of a sequence and as large as memory "
    "allows. It runs them in the best order. A dash: one of both is out of memory in every "
    "configuration.",
    "",
    "A system is out of memory where one batch of all does not fit. DistCA's buffers are as large "
    "as the busiest server of any plan needs. Where no configuration fits so, a tolerance of 0.2 "
    "and bounds of buffers are tried (`--distca-max-buffer-bytes`).",
]
PAPERS_WAY = [
    "",
    "*The paper's way* (`wlb-llm-paper`) of running WLB-LLM: packed forward, by a fixed formula "
    "and without a bound of memory, into at most one bin a sequence, in no order; gathered keys "
    "are kept twice; without a pipeline the two largest context-parallel sizes, one micro-batch. "
    "*As the paper ran both*: the paper's scheduler, greedy, over that, where both recompute MLPs "
    "in the backward pass (`--recompute-modules mlp`), as the authors' public experiments do in "
    "both systems. What the paper says slows DistCA at 34B in 4D (memory fragments, late launches) "
    "is not simulated, and exchanges of a rank's two nano-batches share its links but do not wait "
    "for each other, as they would on one NCCL stream.",
]


def _draw_end_to_end(group: Group, rows: list[dict[str, Any]], figure: Any) -> None:
    panels = list(dict.fromkeys((row["model"], row["documents"]) for row in rows))
    figure.set_size_inches(6 * len(panels) if len(panels) < 3 else 12, 4 * -(-len(panels) // 2))
    axes = figure.subplots(
        -(-len(panels) // 2), min(len(panels), 2), squeeze=False, sharey=True
    ).ravel()
    colour_in_turn(*axes)
    shown = [s for s in ("per-document-cp", "hybrid-cp", REFERENCE, "tiles") if s in group.systems]
    for panel, (model, documents) in zip(axes, panels, strict=False):
        mine = [r for r in rows if (r["model"], r["documents"]) == (model, documents)]
        places = np.arange(len(mine))
        for number, system in enumerate(shown):
            values = [r[f"{system} speed-up"] for r in mine]
            panel.bar(places + 0.2 * (number - 1.5), values, width=0.2, label=system)
        panel.set_xticks(places, [f"{r['longest']}\n{r['GPUs']}" for r in mine], fontsize=8)
        panel.set(title=f"{model}, {documents}", ylabel="tokens/s over WLB-LLM's")
        panel.axhline(1.0, color="black", linewidth=0.6)
    # All panels share an axis, so that this limit scales to the highest bar.
    axes[0].set_ylim(0.6, None)
    axes[0].legend()

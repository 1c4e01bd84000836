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
from benchmarks.cluster.explanations import EXPLANATION, PAPERS_WAY, columns, rule
from benchmarks.cluster.report import K, Options, Report, table
from benchmarks.cluster.sweep import Case, Runner
from distca.palette import colour_in_turn
from distca.simulate import BASELINES, CLUSTERS, DISTCA_SYSTEMS, MEGATRON, Choice
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
TITLES = {"plain": "plain Megatron", "cp-a2a": "a2a CP", **OVER}
"""What pages call systems; DistCA's schedulers have their names."""
TOLERANCES = (0.02, 0.05)
"""Tolerances to choose from for each case beside its own, as a user would: the paper's only
hyper-parameter."""
AS_THE_PAPER = (PAPERS, "greedy")
"""The paper's baseline and scheduler, which are run once more with MLPs recomputed."""
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
            f"Simulated again: {', '.join(what)}.",
            _stored_commit(name),
            f"Their command was `{_stored_command(name)}`.",
            "",
        ]
    for row, case in zip(rows, all_cases, strict=True):
        if case in cases:
            _fill(row, case, found)
    batches = options.given_batches
    text += [*_against_published(group, rows, rule(batches)), "", *_every_job(group, rows)]
    return Report(group.title, rows, text, partial(_draw_end_to_end, group, rows))


def _job(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a table's jobs apart."""
    return tuple(str(row[name]) for name in ("model", "documents", "longest", "batch", "GPUs"))


def _stored_rows(name: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows of a stored table by job, with numbers where a figure is."""
    with (STORED / f"{name}.csv").open(newline="") as file:
        return {_job(row): {k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)}


def not_stored(name: str, options: Options) -> list[str]:
    """Returns the systems that keep a table from being made in part: the stored one, which may be
    older, has no figures of them.

    Args:
        name: a key of `GROUPS`.
        options: flags of the command.
    """
    kept = GROUPS[name].systems
    if options.most_sequences is None:
        kept = tuple(system for system in kept if system not in options.systems)
    first = next(iter(_stored_rows(name).values()))
    return [system for system in kept if f"{system} tokens/s" not in first]


def _stored_command(name: str) -> str:
    """The command that made most figures of a stored table."""
    commands = re.findall(r"`(python benchmarks/cluster/paper.py .*?)`", _stored_page(name))
    # A table with a part that was made again names the older command last.
    return str(commands[-1])


def _stored_commit(name: str) -> str:
    """The line that names the commit which made most figures of a stored table."""
    page = STORED / f"{name}.md"
    commit = sources.commit_of(page.read_text())
    if commit is None:
        # A page with a digest of its code was stored by the commit whose code it is.
        log = ["git", "log", "-1", "--format=%h, %as", "--", str(page)]
        last = subprocess.run(log, cwd=STORED, capture_output=True, text=True, check=True).stdout
        commit = f"Made by the code of commit {last.strip()}."
    return commit.replace("Made", "All other figures made")


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


def _every_job(group: Group, rows: list[dict[str, Any]]) -> list[str]:
    """The table of all jobs, and what its columns are."""
    limit = CLUSTERS["dgx-h200"].usable_bytes / 1e9
    return [
        columns(limit),
        "",
        *table([_readable(row, group) for row in rows]),
    ]


def _readable(row: dict[str, Any], group: Group) -> dict[str, Any]:
    short = {
        "model": row["model"],
        "documents": row["documents"],
        "longest document": row["longest"],
        "sequences": row["batch"],
        "GPUs": row["GPUs"],
    }
    ours = [system for system in group.systems if system in DISTCA_SYSTEMS]
    for system in group.systems:
        if system == REFERENCE:
            continue
        gain = speed_up(row, system, REFERENCE)
        short[_title(system)] = "OOM" if _is_out_of_memory(row, system) else _cell(gain)
    for system in (REFERENCE, *ours):
        title = _title(system)
        counts = [row[f"{system} {name}"] for name in ("simulated", "out of memory", "tried")]
        short[f"{title}: best"] = _in_words(row[f"{system} configuration"])
        memory = row[f"{system} GB"]
        short[f"{title}: GB"] = "-" if np.isnan(memory) else f"{memory:.0f}"
        short[f"{title}: simulated, OOM, all"] = ", ".join(map(str, counts))
    return short


def _title(system: str) -> str:
    return TITLES.get(system, system)


def _in_words(configuration: str) -> str:
    one = re.sub(r"\b1 micro-batch\(es\)", "1 micro-batch", configuration)
    return one.replace("micro-batch(es)", "micro-batches")


def _against_published(group: Group, rows: list[dict[str, Any]], searched: str) -> list[str]:
    """Ranges of gains beside the paper's, and of what systems wait for.

    Args:
        group: the table's jobs.
        rows: its rows.
        searched: what `rule` says.
    """
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
                f"{_title(system)}: {what}": _mean([row[f"{system} {what}"] for row in mine])
                for what in ("idle", "exposed")
                for system in (REFERENCE, PAPERS, *DISTCA_SYSTEMS)
                if system in group.systems
            }
            | {"perfect balance": f"{np.nanmin(most):.2f} to {np.nanmax(most):.2f}"}
        )
    return [
        "Gains of DistCA with `tiles`"
        + (", and what the paper published" if group.as_the_paper else "")
        + f". TP of {_sizes(group.tensor)}, PP of {_sizes(group.stages)}. {searched}",
        "",
        *table(gains),
        "",
        *_least(rows, over),
        "",
        *table(idle),
        "",
        *EXPLANATION,
        *(PAPERS_WAY if group.as_the_paper else ()),
    ]


def _least(rows: list[dict[str, Any]], over: Mapping[str, str]) -> list[str]:
    """What DistCA gains over WLB-LLM at least, and the jobs in which a peer is faster.

    Args:
        rows: rows of the table.
        over: titles of the peers, by name.
    """
    gains = [gain for row in rows if (gain := speed_up(row, "tiles", REFERENCE)) is not None]
    if not gains:
        return ["There is no job that both `tiles` and WLB-LLM can run."]
    which = f"all {len(rows)} jobs" if len(gains) == len(rows) else f"{len(gains)} jobs"
    least = min(gains, key=lambda gain: gain.mean)
    text = f"`tiles` is at least {least} times as fast as WLB-LLM in {which}."
    if len(gains) < len(rows):
        text += f" In the other {len(rows) - len(gains)} one of both does not run."
    slower = [
        f"* {gain} times as fast as {title}: {row['model']}, {row['documents']}, {row['longest']}, "
        f"batch of {row['batch']}, {row['GPUs']} GPUs"
        for system, title in over.items()
        for row in rows
        if (gain := speed_up(row, "tiles", system)) is not None and gain.mean < 1
    ]
    if not slower:
        return [f"{text} No other system is faster in any job."]
    return [f"{text} It is slower than a peer, on average, in these jobs:", "", *slower]


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
    cases that cannot be compared."""
    gains = [speed_up(row, system, other) for row in rows]
    found = [each for each in gains if each is not None]
    if not found:
        return "-"
    means = [each.mean for each in found]
    text = f"{min(means):.2f} to {max(means):.2f}"
    off = [each.high - each.mean for each in found]
    text += "" if np.isnan(off).all() else f" ± {np.nanmax(off):.3f}"
    missing = len(rows) - len(found)
    return f"{text} ({missing} of {len(rows)} not comparable)" if missing else text


def _is_out_of_memory(row: dict[str, Any], system: str) -> bool:
    return bool(row[f"{system} configuration"].startswith("out of memory"))


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

"""The report of `distca plan` as a page: one plan, or the comparison of all schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distca.commands import html_page
from distca.commands.html_page import Cell
from distca.commands.page_sections import (
    bytes_between,
    documents_by_length,
    documents_of,
    servers,
)
from distca.commands.tree_sections import has_trees, trees_of
from distca.plan import Plan
from distca.plan.span import Int64s
from distca.schedule import PlanSummary, ScheduleConfig, format_summary


def page_of(
    command: str,
    plan: Plan,
    config: ScheduleConfig,
    summary: PlanSummary,
    figures: Mapping[str, object],
) -> str:
    """Returns the page of one plan.

    Args:
        command: what was typed.
        plan: a valid plan.
        config: configuration by which it is judged.
        summary: its figures.
        figures: all figures, as `--json` prints them.
    """
    answer = (
        f"The busiest of {summary.servers:,} servers has {summary.load_max_over_mean:.3f} times "
        "the mean core attention; in plain data parallelism "
        f"{summary.load_max_over_mean_before:.3f} times."
    )
    parts = [
        html_page.section("Figures", html_page.shell(format_summary(summary))),
        html_page.section("Servers: load, bytes and memory", servers(plan, config)),
        *sections_of_plan(plan, config),
        html_page.section("Command", html_page.shell(command)),
    ]
    return html_page.page("distca plan", answer, figures, parts)


def sections_of_plan(plan: Plan, config: ScheduleConfig) -> list[str]:
    """Returns the sections of a plan's documents or trees, and of its bytes if there are any."""
    if has_trees(plan):
        found = [html_page.section("Trees, and who computes them", *trees_of(plan))]
    else:
        found = [
            html_page.section("Documents, and who computes them", *documents_of(plan)),
            html_page.section("Documents by length", documents_by_length(plan.lengths)),
        ]
    if plan.world_size > 1:
        found.append(html_page.section("Bytes between servers", bytes_between(plan, config)))
    return found


def comparison_of(
    command: str,
    lengths: Int64s,
    rows: Mapping[str, Mapping[str, Any]],
    columns: tuple[tuple[str, str, float, int], ...],
) -> str:
    """Returns the page of `--compare`.

    Args:
        command: what was typed.
        lengths: tokens of each document.
        rows: figures of each scheduler, as `--json` prints them.
        columns: title, name, unit and digits of each figure in the table.
    """
    made = {name: row for name, row in rows.items() if "error" not in row}
    best = min(made, key=lambda name: (made[name]["load_max_over_mean"], made[name]["bytes_total"]))
    answer = (
        f"{best} balances best: its busiest server has {made[best]['load_max_over_mean']:.3f} "
        "times the mean core attention."
    )
    most = {key: max(float(row[key]) for row in made.values()) or 1.0 for _, key, _, _ in columns}
    listed = []
    for name, row in rows.items():
        if "error" in row:
            cells = [*[Cell("")] * len(columns), Cell(str(row["error"]), is_text=True)]
        else:
            cells = [
                Cell(f"{row[key] / unit:,.{digits}f}", float(row[key]) / most[key])
                for _, key, unit, digits in columns
            ] + [Cell("", is_text=True)]
        listed.append((name, cells))
    heads = ["scheduler", *(title for title, *_ in columns), "no plan, because"]
    caption = (
        "max/mean: core attention of the busiest server over the mean. GB of all servers, and of "
        "the busiest; tokens: most of a rank over the mean. One layer, forward pass. plain: plain "
        "data parallelism, which cuts documents where a rank's tokens end."
    )
    parts = [
        html_page.section("Schedulers", html_page.table(caption, heads, listed, best)),
        html_page.section("Documents by length", documents_by_length(lengths)),
        html_page.section("Command", html_page.shell(command)),
    ]
    return html_page.page("distca plan --compare", answer, rows, parts)

"""The report of `distca simulate` as a page: the table, what time is spent on, and a timeline."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np

from distca.commands import html_page
from distca.commands.html_page import Cell, Span
from distca.commands.page_sections import documents_by_length, map_of_bytes
from distca.commands.simulate_report import PARTS, assumptions, job_line, why_not
from distca.commands.verdict import TITLES, Verdict, is_plain, speed_up
from distca.plan.span import Int64s
from distca.simulate import Breakdown, Choice, Workload
from distca.simulate.outcome import Outcome

_MOST_RANKS = 32
"""Ranks of the timeline; more could not be read."""
_BETWEEN = (
    "MB that a GPU of the server of a row sends to that of a column, in the whole iteration. "
    "All-to-alls inside of a server are not shown."
)
_BEGINS = ("waiting", "core attention", "forward", "backward", "gradients")
"""What the names of spans begin with, of those that have a colour of their own."""


def page_of(
    command: str,
    choices: Sequence[Choice],
    workload: Workload,
    batches: Sequence[Sequence[Int64s]],
    parts: Mapping[str, Breakdown],
    figures: object,
    iteration: Outcome | None,
) -> str:
    """Returns the page.

    Args:
        command: what was typed.
        choices: systems, each in its best configuration.
        workload: model, cluster and sizes.
        batches: lengths of the documents of each sequence of each batch.
        parts: what an iteration's time is spent on, of each system that is shown.
        figures: all figures, as `--json` prints them.
        iteration: DistCA's iteration of the first batch, recorded; None: it has no configuration.
    """
    verdict = Verdict.of(choices)
    shown = [
        html_page.paragraph(job_line(workload, len(batches))),
        html_page.section("Systems", _systems(choices, workload, verdict)),
    ]
    if parts:
        shown.append(html_page.section("Where the time of an iteration goes", *_parts(parts)))
    if iteration is not None:
        shown.append(html_page.section("DistCA's iteration", *_timeline(iteration)))
        shown.append(html_page.section("Memory and bytes of DistCA's servers", _servers(iteration)))
        between = iteration.bytes_between
        if between is not None and between.any():
            shown.append(
                html_page.section("Bytes between servers", map_of_bytes(between, _BETWEEN))
            )
    shown.append(
        html_page.section(
            "Documents of the first batch", documents_by_length(np.concatenate(batches[0]))
        )
    )
    flags = verdict.how_to_train(workload)
    if flags:
        lines = "\n".join(flags)
        shown.append(html_page.section("How to train", html_page.shell(lines)))
    shown.append(html_page.section("Command", html_page.shell(command)))
    notes = [html_page.paragraph(each) for each in assumptions(workload, len(batches), verdict)]
    shown.append(html_page.section("Assumptions", *notes))
    return html_page.page("distca simulate", verdict.first_line(workload), figures, shown)


def _systems(choices: Sequence[Choice], workload: Workload, verdict: Verdict) -> str:
    usable = workload.cluster.usable_bytes / 1e9
    fastest = max((c.tokens_per_second for c in choices if c.candidate is not None), default=1.0)
    rows = []
    best: str | None = None
    for choice in choices:
        title = TITLES[choice.system]
        if choice.candidate is None:
            why = Cell(why_not(choice, workload), is_text=True)
            rows.append((title, [Cell("")] * 6 + [why]))
            continue
        if choice.tokens_per_second == fastest:
            best = title
        over = "" if verdict.distca in (None, choice) else str(speed_up(verdict.distca, choice))
        plain = ": no groups, so plain Megatron" if is_plain(choice) else ""
        rows.append(
            (
                title,
                [
                    Cell(f"{choice.tokens_per_second:,.0f}", choice.tokens_per_second / fastest),
                    Cell(f"{choice.seconds:.3f}"),
                    Cell(f"{choice.memory_gb:.1f}", choice.memory_gb / usable),
                    Cell(f"{choice.idle:.1%}"),
                    Cell(f"{choice.exposed:.1%}"),
                    Cell(over),
                    Cell(f"{choice.candidate}{plain}", is_text=True),
                ],
            )
        )
    heads = ["system", "tokens/s", "seconds", "GB a GPU", "idle", "waits", "DistCA over it"]
    caption = (
        f"Each system in its best configuration. Training may fill {usable:g} GB of a GPU: that is "
        "a whole bar."
    )
    return html_page.table(caption, [*heads, "configuration"], rows, best)


def _parts(parts: Mapping[str, Breakdown]) -> tuple[str, str]:
    names = [TITLES[system] for system in parts]
    seconds = [[each.as_shown()[part] for part in PARTS] for each in parts.values()]
    rows = []
    for at, title in enumerate(PARTS.values()):
        cells = []
        for each, breakdown in zip(seconds, parts.values(), strict=True):
            cells += [Cell(f"{each[at]:.3f}"), Cell(f"{each[at] / breakdown.seconds:.1%}")]
        rows.append((title, cells))
    heads = ["part"]
    for name in names:
        heads += [f"{name}, seconds", "share"]
    drawn = html_page.stacked_bars(list(PARTS.values()), list(zip(names, seconds, strict=True)))
    table = html_page.table("Seconds of the first batch's iteration", heads, rows)
    for at, title in enumerate(PARTS.values()):
        row = f'<th scope="row">{html.escape(title)}</th>'
        table = table.replace(row, f'<th scope="row">{html_page.legend_cell(title, at)}</th>')
    return drawn, table


def _timeline(iteration: Outcome) -> tuple[str, ...]:
    ranks = min(len(iteration.computed), _MOST_RANKS)
    rows = [name for rank in range(ranks) for name in (f"server {rank}", "exchanges")]
    # Longer spans are drawn first, so that what runs inside of them is seen.
    spans = [
        Span(
            2 * each.rank + (each.lane == "exchange" and not each.name.startswith("wait")),
            each.start,
            each.end,
            each.name,
            _kind(each.name),
        )
        for each in sorted(iteration.spans, key=lambda each: each.start - each.end)
        if each.rank < ranks
    ]
    left_out = len(iteration.computed) - ranks
    said = f"The first {ranks} servers of {ranks + left_out}. " * (left_out > 0)
    return (
        html_page.paragraph(f"{said}Point at a bar to see what it is and when it runs."),
        html_page.timeline("timeline", rows, spans, iteration.seconds),
    )


def _servers(iteration: Outcome) -> str:
    """A table of each server's peak memory and of what one of its GPUs sends."""
    shown = min(len(iteration.computed), _MOST_RANKS)
    memory, usable = iteration.memory_bytes / 1e9, iteration.usable_bytes / 1e9
    sent = {name: each / 1e9 for name, each in iteration.bytes_sent.items() if each.any()}
    most = max((float(each.max()) for each in sent.values()), default=1.0)
    rows = [
        (
            f"server {server}",
            [
                Cell(f"{memory[server]:.1f}", float(memory[server]) / usable),
                *(
                    Cell(f"{each[server]:.2f}", float(each[server]) / most)
                    for each in sent.values()
                ),
            ],
        )
        for server in range(shown)
    ]
    heads = ["server", "GB a GPU", *(f"GB sent, {name.replace('_', ' ')}" for name in sent)]
    caption = f"Peak memory of a GPU, of {usable:g} GB that training may fill, and what it sends."
    return html_page.table(caption, heads, rows)


def _kind(name: str) -> str:
    if name.startswith("wait"):
        return "waiting"
    return next((each for each in _BEGINS if name.startswith(each)), "exchange")

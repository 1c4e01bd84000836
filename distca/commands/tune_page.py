"""The reports of `distca tune` as pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distca.commands import html_page
from distca.commands.html_page import Cell
from distca.schedule.serving.cdsp import Prefill
from distca.schedule.serving.partitions import Shares, even_shares


@dataclass(frozen=True)
class FoundPartition:
    """A searched partition beside the even one.

    Attributes:
        tokens: length of the prompt.
        shares: share of each rank.
        seconds: seconds with these.
        even: seconds with equal shares.
        kind: which seconds these are.
    """

    tokens: int
    shares: Shares
    seconds: float
    even: float
    kind: str


def partitions(command: str, found: Sequence[FoundPartition], saved: Mapping[str, object]) -> str:
    """Returns the page of `distca tune partitions`; `saved` is the output file's content."""
    longest = found[-1]
    answer = (
        f"A prompt of {longest.tokens:,} tokens takes {longest.seconds:.4g} s {longest.kind} with "
        f"the partition that was found, {longest.even:.4g} s with even parts."
    )
    ranks = len(longest.shares)
    most = max(max(each.seconds, each.even) for each in found) or 1.0
    rows = [
        (
            f"{each.tokens:,}",
            [
                Cell(f"{each.seconds:.4g}", each.seconds / most),
                Cell(f"{each.even:.4g}", each.even / most),
                *(Cell(f"{share:.3f}", share) for share in each.shares),
            ],
        )
        for each in found
    ]
    heads = ["tokens", "seconds", "seconds, even parts"]
    heads += [f"share of rank {rank}" for rank in range(ranks)]
    bars = [(f"{each.tokens:,} tokens", each.shares) for each in found]
    names = [f"rank {rank}" for rank in range(ranks)]
    key = " &nbsp; ".join(html_page.legend_cell(name, at) for at, name in enumerate(names))
    bars.insert(0, ("even", even_shares(ranks)))
    drawn = html_page.stacked_bars(names, bars, "of the prompt")
    drawn = f'<p aria-hidden="true">{key}</p>{drawn}'
    table = html_page.table(f"Seconds {longest.kind}", heads, rows)
    return _page("partitions", command, answer, saved, ("Shares of a prompt", [drawn, table]))


def groups(
    command: str,
    measured: Sequence[Prefill],
    fitted: Sequence[float],
    advice: str,
    saved: Mapping[str, object],
) -> str:
    """Returns the page of `distca tune groups`.

    Args:
        command: what was typed.
        measured: prefills that were measured.
        fitted: seconds of each by the equation.
        advice: which prompts are worth sharing out.
        saved: the output file's content.
    """
    most = max(max(each.seconds, fit) for each, fit in zip(measured, fitted, strict=True)) or 1.0
    rows = [
        (
            f"{each.tokens:,} on {each.degree}",
            [Cell(f"{each.seconds:.4g}", each.seconds / most), Cell(f"{fit:.4g}", fit / most)],
        )
        for each, fit in zip(measured, fitted, strict=True)
    ]
    heads = ["tokens on ranks", "seconds, measured", "seconds, fitted"]
    table = html_page.table("Prefills of one prompt", heads, rows)
    return _page("groups", command, f"{advice}.", saved, ("Prefills", [table]))


def figures(
    form: str, command: str, text: Sequence[str], rows: Mapping[str, float], saved: object
) -> str:
    """Returns the page of a form whose figures are a few numbers.

    Args:
        form: word after `distca tune`.
        command: what was typed.
        text: lines that the command prints; the first is the answer.
        rows: figures by name.
        saved: all figures.
    """
    table = html_page.table(
        "Figures", ["", "value"], [(name, [Cell(f"{each:.4g}")]) for name, each in rows.items()]
    )
    said = [html_page.paragraph(line.strip()) for line in text[1:]]
    return _page(form, command, text[0], saved, ("Figures", [*said, table]))


def _page(
    form: str, command: str, answer: str, saved: object, shown: tuple[str, Sequence[str]]
) -> str:
    title, parts = shown
    sections = [html_page.section(title, *parts)]
    sections.append(html_page.section("Command", html_page.shell(command)))
    answer = answer[0].upper() + answer[1:]
    return html_page.page(f"distca tune {form}", answer, saved, sections)

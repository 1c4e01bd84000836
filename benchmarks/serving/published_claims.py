"""Comparisons that the papers make, and whether simulated times agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.serving.published_times import (
    FAST,
    NUMBERS,
    ORDERS,
    SLOW,
    TURN_TOKENS,
    Number,
    Run,
    meta,
    runahead,
    speed_up,
    tetris,
)

Seconds = Callable[[Run], float]
"""Tells the simulated seconds of a run."""
_ALIKE = 0.05
"""Difference up to which times count as equal, and pairs are not compared."""


@dataclass(frozen=True)
class Claim:
    """A comparison of a paper.

    Attributes:
        place: where the paper makes it.
        what: what it says.
        holds: tells whether simulated seconds agree.
        ours: tells our figures, for tables.
    """

    place: str
    what: str
    holds: Callable[[Seconds], bool]
    ours: Callable[[Seconds], str]


def _ratio(place: str, what: str, top: Run, below: Run, least: float, most: float) -> Claim:
    """A claim that a ratio of seconds lies between two bounds, both left out."""
    return Claim(
        place,
        what,
        lambda seconds: least < seconds(top) / seconds(below) < most,
        lambda seconds: f"{seconds(top) / seconds(below):.3f} times",
    )


def _slower(place: str, what: str, slower: Run, faster: Run) -> Claim:
    return _ratio(place, what, slower, faster, 1.0, float("inf"))


def _gain(seconds: Seconds, *of: object) -> float:
    gather, chain = speed_up(*of)  # type: ignore[arg-type]
    return seconds(gather) / seconds(chain)


def _gains_more(place: str, what: str, more: tuple[object, ...], less: tuple[object, ...]) -> Claim:
    """A claim that chains gain more over all-gathers in one setting than in another."""
    return Claim(
        place,
        what,
        lambda seconds: _gain(seconds, *more) > _gain(seconds, *less),
        lambda seconds: f"{_gain(seconds, *more):.3f} and {_gain(seconds, *less):.3f} times",
    )


def _fastest_degree(tokens: int) -> Claim:
    times = {n.run.ranks: n.value for n in NUMBERS if n.run == tetris(tokens, n.run.ranks)}
    best = min(times, key=times.__getitem__)

    def ours(seconds: Seconds) -> int:
        return min(times, key=lambda degree: seconds(tetris(tokens, degree)))

    return Claim(
        "Tetris, Table 1",
        f"{tokens:,} tokens are fastest with SP {best}",
        lambda seconds: ours(seconds) == best,
        lambda seconds: f"SP {ours(seconds)}",
    )


def _turn(new: int, least: float, most: float, what: str) -> Claim:
    q, kv = (meta(kind, new, TURN_TOKENS - new, 4) for kind in ("pass-q", "pass-kv"))
    return _ratio("Meta, Table 4", f"{new:,} new tokens: {what}", q, kv, least, most)


def claims() -> Iterator[Claim]:
    """All comparisons."""
    for order in ORDERS:
        paper = order.faster.paper
        what = f"{order.slower.said} takes longer than {order.faster.said}"
        yield _slower(f"{paper}, {order.place}", what, order.slower, order.faster)
    yield _turn(3200, 0.0, 1.0, "pass-q is faster")
    yield _turn(6400, 1 - _ALIKE, 1 + _ALIKE, "both take as long, within 5%")
    yield _turn(12_800, 1.0, float("inf"), "pass-kv is faster")
    for nodes in (2, 8):
        yield _slower(
            "Meta, Figure 7",
            f"tensor parallelism of {nodes} nodes takes longer than context parallelism",
            meta("pass-kv", TURN_TOKENS, 0, 1, 8 * nodes),
            meta("pass-kv", TURN_TOKENS, 0, nodes),
        )
    for nodes in (2, 4):
        yield _slower(
            "Meta, Table 7",
            f"a decoded token takes longer on {nodes} nodes than on {nodes // 2}",
            meta("decode", 1, TURN_TOKENS, nodes),
            meta("decode", 1, TURN_TOKENS, nodes // 2),
        )
    # The paper reached about 3 GB/s a rank there; links reach 86% of their speed here.
    yield _ratio(
        "Meta, Figure 6b",
        "128K tokens on 4 nodes take as long at 3 GB/s a GPU as at 50, within 5%",
        meta("pass-kv", TURN_TOKENS, 0, 4, gb_per_s=3 / 0.86),
        meta("pass-kv", TURN_TOKENS, 0, 4),
        1 - _ALIKE,
        1 + _ALIKE,
    )
    yield from (_fastest_degree(4096 << doubled) for doubled in range(7))
    for tokens in (4096, 8192):
        yield _slower(
            "Tetris, Section 2.4",
            f"{tokens:,} tokens: SP 16 takes longer than SP 4",
            tetris(tokens, 16),
            tetris(tokens, 4),
        )
    for heads in ("MQA", "GQA8"):
        yield _gains_more(
            "KV-Runahead, Appendix A",
            f"16K tokens on 8 GPUs: chains gain more with {heads} than with all heads",
            (f"Llama 7B {heads}", 16, 8),
            ("Llama 7B", 16, 8),
        )
    yield _gains_more(
        "KV-Runahead, Section 5",
        "8K tokens on 4 GPUs: chains gain more at 10 GB/s than at 300",
        ("Llama 7B", 8, 4, SLOW),
        ("Llama 7B", 8, 4, FAST),
    )
    yield _slower(
        "KV-Runahead, Appendix B",
        "2K tokens at 10 GB/s: 4 GPUs take longer than 2",
        runahead("Llama 7B", "chain", 2, 4, SLOW),
        runahead("Llama 7B", "chain", 2, 2, SLOW),
    )


def pairs(numbers: Sequence[Number] = NUMBERS) -> list[tuple[int, int]]:
    """Pairs of configurations for the same prompt whose published times differ by more than 5%,
    the faster one first, by their places in `numbers`."""
    found = []
    for one, other in combinations(range(len(numbers)), 2):
        times = numbers[one].value, numbers[other].value
        compared = numbers[one].over is None and numbers[one].prompt == numbers[other].prompt
        if compared and max(times) > (1 + _ALIKE) * min(times):
            found.append((one, other) if times[0] < times[1] else (other, one))
    return found

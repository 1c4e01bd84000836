"""Requests of the benchmarks that ask vLLM: lengths of prompts and answers, and arrivals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST, SHORT = 16, 512
"""Tokens of the prompts that are not long: from, to."""

LONG = 2048
"""Tokens from which prompts are long."""


@dataclass(frozen=True)
class Load:
    """Kind of a load.

    Attributes:
        name: its title.
        long: part of the requests whose prompts are long.
    """

    name: str
    long: float


LOADS = (Load("Short chats", 0.0), Load("Long prompts", 1.0), Load("Mixed", 0.25))


@dataclass(frozen=True)
class Arrival:
    """A request: seconds until it arrives, tokens of its prompt and of its answer."""

    seconds: float
    prompt: int
    answer: int


def draw_arrivals(
    count: int,
    long: float,
    longest: int,
    rate: float,
    chance: random.Random,
    answers: tuple[int, int],
    lengths: Sequence[int] = (),
) -> list[Arrival]:
    """Draws requests that arrive as a Poisson process.

    Args:
        count: number of requests.
        long: part of them whose prompts are long: as many of each octave from `LONG` tokens on.
        longest: most tokens of a prompt.
        rate: requests a second.
        chance: source of the draw.
        answers: fewest and most tokens of an answer.
        lengths: lengths from which those of long prompts are drawn instead.
    """
    known = [min(each, longest) for each in lengths if each >= LONG]
    seconds, found = 0.0, []
    for _ in range(count):
        is_long = chance.random() < long
        if is_long and known:
            prompt = chance.choice(known)
        else:
            least, most = (LONG, longest) if is_long else (SHORTEST, SHORT)
            prompt = round(least * (most / least) ** chance.random())
        found.append(Arrival(seconds, prompt, chance.randint(*answers)))
        seconds += chance.expovariate(rate)
    return found

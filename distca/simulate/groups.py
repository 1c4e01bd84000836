"""Prompts and the lengths of their rollouts, drawn from a distribution or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.json_files import parse_json, read_text

_MOST_SPREAD = 3.0
_MOST_TOKENS, _MOST_ROLLOUTS = 1 << 27, 1 << 20
"""Tokens of a rollout and rollouts of all batches at most: pairs stay within 64 bits, and lists
within memory."""
_TOO_LONG = f"rollouts have more than {_MOST_TOKENS:,} tokens: give less"
_EXAMPLE = '{"prompt": 4096, "responses": [512, 730]}'


@dataclass(frozen=True)
class Group:
    """Rollouts of one prompt.

    Attributes:
        prompt: tokens of the prompt.
        responses: tokens of each response; none: the prompt is a rollout by itself.
    """

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the tree, which has each once."""
        return self.prompt + sum(self.responses)

    @property
    def rollouts(self) -> list[int]:
        """Tokens of each rollout."""
        return [self.prompt + each for each in self.responses or (0,)]


def check_rollouts(rollouts: int) -> None:
    """Refuses more rollouts, of all global batches together, than can be simulated.

    Raises:
        ValueError: there are too many.
    """
    if rollouts > _MOST_ROLLOUTS:
        raise ValueError(f"{rollouts:,} rollouts in all batches: give at most {_MOST_ROLLOUTS:,}")


def draw_groups(
    prompt: int, responses: int, response: int, groups: int, spread: float = 0.0, seed: int = 0
) -> list[Group]:
    """Draws groups whose lengths are log-normal.

    Args:
        prompt: tokens of a prompt, on average.
        responses: responses to each prompt.
        response: tokens of a response, on average.
        groups: number of groups.
        spread: standard deviation of the logarithm of lengths; 0: all are equal.
        seed: another seed draws other lengths.

    Raises:
        ValueError: a number is out of range, or a rollout is too long.
    """
    numbers = {"prompt": prompt, "responses": responses, "response": response, "groups": groups}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} {number}: give at least 1")
    check_rollouts(groups * responses)
    if prompt + response > _MOST_TOKENS:
        raise ValueError(_TOO_LONG)
    if not 0 <= spread <= _MOST_SPREAD:
        raise ValueError(f"spread {spread}: give 0 to {_MOST_SPREAD:g}")
    random = np.random.default_rng(seed)

    def lengths(mean: int, count: int) -> list[int]:
        factors = np.exp(random.normal(0.0, spread, count))
        # So that batches have equally many tokens, within rounding.
        factors /= factors.mean()
        return np.maximum(np.round(mean * factors), 1).astype(int).tolist()  # type: ignore[no-any-return]

    prompts, answers = lengths(prompt, groups), lengths(response, groups * responses)
    if max(prompts) + max(answers) > _MOST_TOKENS:
        raise ValueError(_TOO_LONG)
    return [
        Group(each, tuple(answers[n * responses : (n + 1) * responses]))
        for n, each in enumerate(prompts)
    ]


def read_groups(path: Path) -> list[Group]:
    """Reads groups: a JSON object in each line, or one JSON list of objects.

    An object has the tokens of a prompt and of each response to it:
    `{"prompt": 4096, "responses": [512, 730]}`. Blank lines are skipped.

    Raises:
        ValueError: the file is missing, empty, cannot be read or is no such file, or a length is
            out of range.
    """
    text = read_text(path, f"give a file whose lines are such as {_EXAMPLE}")
    found = _listed(text, path) if text.lstrip().startswith("[") else _lines(text, path)
    groups = [_group(each, place) for place, each in found]
    if not groups:
        raise ValueError(f"{path} has no prompts: give lines such as {_EXAMPLE}")
    return groups


def draw_from(known: Sequence[Group], groups: int, batches: int, seed: int) -> list[list[Group]]:
    """Draws global batches from known groups, in as many epochs as it takes.

    Args:
        known: the groups that there are.
        groups: number of groups in a batch; if it is that of all, each batch has each once.
        batches: number of batches.
        seed: seed of the order in each epoch.

    Raises:
        ValueError: the batches have too many rollouts.
    """
    check_rollouts(groups * batches)
    generator = np.random.default_rng(seed)
    drawn: list[Group] = []
    while len(drawn) < groups * batches:
        drawn += [known[n] for n in generator.permutation(len(known))]
    found = [drawn[n * groups : (n + 1) * groups] for n in range(batches)]
    check_rollouts(sum(len(group.rollouts) for batch in found for group in batch))
    return found


def _listed(text: str, path: Path) -> list[tuple[str, object]]:
    """Returns the places and values of one JSON list."""
    found = parse_json(text, str(path), f"give objects such as {_EXAMPLE}")
    return [(f"{path}, object {n}", each) for n, each in enumerate(found)]


def _lines(text: str, path: Path) -> list[tuple[str, object]]:
    """Returns the places and values of JSON lines."""
    found: list[tuple[str, object]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        wanted = f"give each object on one line, such as {_EXAMPLE}"
        found.append((place, parse_json(line, place, wanted)))
    return found


def _group(value: object, place: str) -> Group:
    """Checks an object of the file, and returns its group."""
    if not isinstance(value, dict) or set(value) != {"prompt", "responses"}:
        raise ValueError(f"{place}: give a prompt and responses and nothing else: {_EXAMPLE}")
    prompt, responses = value["prompt"], value["responses"]
    if not isinstance(responses, list):
        raise ValueError(f"{place}: responses are no list: give {_EXAMPLE}")
    for what, length in (("prompt", prompt), *(("response", each) for each in responses)):
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(
                f"{place}: a {what} has {length!r} tokens: give a whole number of at least 1"
            )
    if prompt + max(responses, default=0) > _MOST_TOKENS:
        raise ValueError(f"{place}: {_TOO_LONG}")
    return Group(prompt, tuple(responses))

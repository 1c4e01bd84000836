"""The choice of a token by its logits, wherever an answer is made.

torch is imported where it computes: an engine passes these values on without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


UNUSABLE = ("NaN", "infinite", "all minus infinity")
"""What logits are that no token can be chosen by."""


class UnusableLogitsError(ValueError):
    """Raised if no token can be chosen by logits.

    Args:
        what: what they are, of `UNUSABLE`.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"no token can be chosen, since the logits are {what}")
        self.what = what


def check_highest(highest: float) -> None:
    """Checks logits by the highest of them, which torch says is NaN if any of them is.

    Single logits of minus infinity are legitimate: models and penalties mask tokens by them.

    Raises:
        UnusableLogitsError: no token can be chosen by them.
    """
    if not math.isfinite(highest):
        kind = 0 if math.isnan(highest) else 1 if highest > 0 else 2
        raise UnusableLogitsError(UNUSABLE[kind])


def take_likeliest(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """Returns the highest logit of each of some sequences, and its token: the first, of several.

    Args:
        logits: logits of each, `[sequences, vocabulary]`.
    """
    import torch

    # Both travel from a device together.
    both = torch.stack([each.double() for each in logits.max(1)])
    highest, tokens = both.tolist()
    return highest, [int(token) for token in tokens]


class NextLogits(Mapping[int, "torch.Tensor"]):
    """Logits of the token that follows each of some sequences, by the sequences' numbers.

    Args:
        sequences: their numbers.
        rows: logits, float32 `[sequences, vocabulary]`.
    """

    def __init__(self, sequences: Iterable[int], rows: torch.Tensor | None) -> None:
        self._row = {sequence: row for row, sequence in enumerate(sequences)}
        self._rows = rows

    def __getitem__(self, sequence: int) -> torch.Tensor:
        row = self._row[sequence]
        assert self._rows is not None, "there are no sequences"
        return self._rows[row]

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._row

    def __iter__(self) -> Iterator[int]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def together(self, sequences: Collection[int]) -> tuple[list[int], torch.Tensor]:
        """Returns the logits of some sequences, at least one, `[sequences, vocabulary]`, and the
        order in which they are; those of all without a copy."""
        import torch

        assert self._rows is not None, "there are no sequences"
        order = [each for each in self._row if each in sequences]
        if len(order) == len(self):
            return order, self._rows
        # Not by an index, which would be copied to a device.
        return order, torch.stack([self[each] for each in order])


NO_LOGITS = NextLogits((), None)
"""Logits of no sequence."""


def _check_numbers(values: object, whole: Sequence[str], finite: Sequence[str]) -> None:
    """Refuses fields that are no whole numbers, or no finite ones."""
    for name in (*whole, *finite):
        value = getattr(values, name)
        kinds = int if name in whole else (int, float)
        if not isinstance(value, kinds) or not math.isfinite(value):
            kind = "a whole number" if name in whole else "a finite number"
            raise ValueError(f"{name} is {value!r}: give {kind}")


@dataclass(frozen=True)
class SamplingParams:
    """The choice of tokens.

    Attributes:
        max_tokens: most tokens of an answer.
        temperature: 0 takes the likeliest token.
        seed: seed of the choice: the same tokens whatever the ranks are.
        stops: tokens that end an answer; None: the model's own. With an empty set none does.
        top_k: only that many of the likeliest tokens are drawn from; 0: all.
        top_p: only the likeliest tokens that have this probability together are drawn from.
        min_p: only tokens at least this likely, relative to the likeliest, are drawn from.

    Raises:
        ValueError: a number is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    stops: frozenset[int] | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, ("max_tokens", "seed", "top_k"), ("temperature", "top_p", "min_p"))
        if self.stops is not None and not isinstance(self.stops, (set, frozenset)):
            raise ValueError(f"stops is {self.stops!r}: give a set of tokens")
        for name, allowed, range_ in (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 1, or 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
        ):
            if not allowed:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number {range_}")

    def choose(self, logits: torch.Tensor, sequence: int, position: int) -> int:
        """Chooses a token by its logits `[vocabulary]`.

        Raises:
            UnusableLogitsError: the logits are not finite; masked ones may be minus infinity.
        """
        import torch

        if self.temperature == 0:
            (highest,), (token,) = take_likeliest(logits[None])
            check_highest(highest)
            return token
        logits = logits.double().cpu()
        highest = float(logits.max())
        check_highest(highest)
        # Of this token alone, so that neither ranks nor other sequences matter.
        generator = torch.Generator().manual_seed(hash((self.seed, sequence, position)))
        # The highest is 0, so that no temperature is too low.
        probabilities = torch.softmax((logits - highest) / self.temperature, 0)
        return int(torch.multinomial(self._kept(probabilities), 1, generator=generator))

    def _kept(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Probabilities, 0 for tokens that are not drawn from."""
        import torch

        if self.min_p:
            floor = self.min_p * probabilities.max()
            probabilities = torch.where(probabilities < floor, 0.0, probabilities)
        if not self.top_k and self.top_p == 1:
            return probabilities
        order = probabilities.argsort(descending=True, stable=True)
        if self.top_k:
            order = order[: self.top_k]
        falling = probabilities[order]
        if self.top_p < 1:
            falling = falling / falling.sum()
            # The token that reaches the sum is drawn from, too.
            order = order[falling.cumsum(0) - falling < self.top_p]
        kept = torch.zeros_like(probabilities)
        kept[order] = probabilities[order]
        return kept


@dataclass(frozen=True)
class Penalties:
    """Changes of logits before a token is chosen.

    Attributes:
        presence: subtracted from tokens that the answer has.
        frequency: subtracted from them for each time that it has them.
        repetition: divides logits above 0, and multiplies those below, of tokens that the prompt
            or the answer has.
        bias: added to the logits of tokens.
        fewest: tokens that an answer has before `stops` are allowed.
        stops: tokens that end an answer.

    Raises:
        ValueError: a number is out of range.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    fewest: int = 0
    stops: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        _check_numbers(self, ("fewest",), ("presence", "frequency", "repetition"))
        if self.repetition <= 0:
            raise ValueError(f"repetition is {self.repetition}: give a number above 0")
        if self.fewest < 0:
            raise ValueError(f"fewest is {self.fewest}: give a number at least 0")
        for token, value in self.bias:
            if not math.isfinite(value):
                raise ValueError(f"the bias of token {token} is {value}: give a finite number")

    @property
    def tokens(self) -> frozenset[int]:
        """Tokens that it names."""
        return self.stops | {token for token, _ in self.bias}

    def apply(
        self, logits: torch.Tensor, prompt: Sequence[int], answer: Sequence[int]
    ) -> torch.Tensor:
        """Returns changed logits `[vocabulary]`; the same tensor where nothing changes."""
        if self == NO_PENALTIES:
            return logits
        import torch

        logits = logits.clone()
        if self.repetition != 1:
            seen = torch.tensor(sorted({*prompt, *answer}), device=logits.device)
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / self.repetition, old * self.repetition)
        if answer and (self.presence or self.frequency):
            counts = Counter(answer)
            at = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            logits[at] -= self.presence + self.frequency * times
        for token, value in self.bias:
            logits[token] += value
        if len(answer) < self.fewest:
            logits[list(self.stops)] = -torch.inf
        return logits


NO_PENALTIES = Penalties()
"""Logits as they are."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of a chosen token and of the likeliest ones, before any change of logits.

    Attributes:
        token: log-probability of the token that was chosen.
        top: the likeliest tokens with theirs, the likeliest first.
    """

    token: float
    top: tuple[tuple[int, float], ...]

    @staticmethod
    def of(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
        """Takes them from the logits `[vocabulary]` of the `count` likeliest tokens.

        Raises:
            UnusableLogitsError: the logits are not finite; masked ones may be minus infinity.
        """
        import torch

        logprobs = torch.log_softmax(logits.double(), 0)
        of_token = float(logprobs[token])
        if math.isnan(of_token):
            check_highest(float(logits.max()))
        values, tokens = logprobs.topk(min(count, len(logprobs)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(of_token, top)

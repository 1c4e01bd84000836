"""Partitions of a prompt over a chain of ranks: even, searched, and looked up (KV-Runahead).

In a chain each rank computes the layers of one contiguous part of the prompt, and hands the keys
and values of its own part and of all before it to the next. Later parts see more keys, so they must
have fewer tokens for all ranks to end together (KV-Runahead, Section 4.2). A partition is given by
its *shares*, each rank's part of the prompt's tokens. Shares of 0 at the end shorten the chain,
to a single rank where no chain pays (Appendix B).

The search takes any function that tells the seconds of partitions, whether it simulates a chain
(`distca.simulate.serving.prefill_chain`) or runs one. What it finds for some lengths is saved as a
table; shares of lengths between are interpolated.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from distca.json_files import read_text
from distca.plan import Placement
from distca.plan.span import Floats, Int64s
from distca.whole_file import write_text

FORMAT = 1
_MOST_CANDIDATES = 5**5
_WAVES = 4
_POWERS = np.linspace(1, 0.4, 31)
_FEW = 6
"""Number of powers after which the next is tried, where few partitions are."""

Shares = tuple[float, ...]
"""Each rank's part of a prompt's tokens; they add up to 1."""

Parts = tuple[int, ...]
"""Tokens of each rank's part of a prompt."""

SearchedBy = Literal["simulated", "cpu", "wall"]
"""A search minimizes simulated seconds, the most CPU seconds of a rank, or seconds to the first
token."""

Seconds = Callable[[Int64s], Floats]
"""Tells the seconds to the first token of partitions, int64 `[partitions, ranks]`."""


def check_shares(shares: Sequence[float], shortened: bool = False) -> Shares:
    """Checks shares that somebody gave.

    Args:
        shares: each rank's part.
        shortened: whether the last ones may be 0.

    Raises:
        ValueError: a share is not positive, or they don't add up to 1.
    """
    chain = chain_length(shares) if shortened else len(shares)
    if not chain or not all(math.isfinite(share) and share > 0 for share in shares[:chain]):
        raise ValueError(f"partition {list(shares)}: give each rank a share above 0")
    if abs(sum(shares) - 1) > 1e-3:
        raise ValueError(
            f"partition {list(shares)}: shares add up to {sum(shares):.4g}: give parts of 1"
        )
    return tuple(share / sum(shares) for share in shares)


def chain_length(shares: Sequence[float]) -> int:
    """Counts the ranks of a chain up to the last that has a share."""
    return max((number for number, share in enumerate(shares, start=1) if share), default=0)


def even_shares(ranks: int) -> Shares:
    """Returns equal shares (KVR-E)."""
    return (1 / ranks,) * ranks


def cut_prompt(tokens: int, shares: Sequence[float], multiple: int = 1) -> Int64s:
    """Cuts a prompt by shares, rounded to multiples; every rank has tokens while there are any.

    Args:
        tokens: tokens of the prompt.
        shares: each rank's part; 0 at the end shortens the chain.
        multiple: tokens whose multiples the cuts fall on, where each rank then still has some.

    Returns:
        Tokens of each rank's part, int64 `[ranks]`. A prompt that is shorter than the chain
        shortens it: the last ranks have none.
    """
    ranks = chain_length(shares)
    if tokens <= ranks:
        return (np.arange(len(shares)) < tokens).astype(np.int64)
    unit = multiple if tokens >= 2 * ranks * multiple else 1
    cuts = np.round(np.cumsum(shares)[: ranks - 1] * tokens / unit).astype(np.int64) * unit
    # Room for a token on each rank before a cut, and behind it.
    for rank in range(1, ranks):
        least = int(cuts[rank - 2]) + 1 if rank > 1 else 1
        cuts[rank - 1] = min(max(int(cuts[rank - 1]), least), tokens - (ranks - rank))
    parts = np.diff(cuts, prepend=0, append=tokens)
    return np.pad(parts, (0, len(shares) - ranks))


def shares_behind(shares: Shares, start: int, end: int) -> Shares:
    """Returns the shares of the tokens from `start` on, those before being cached.

    A partition says where a prompt's work is: each part has as much. What is behind `start` is
    again cut into parts of equal work. Far behind, they are nearly even.

    Args:
        shares: partition of all tokens before `end`.
        start: first new token.
        end: end of the new tokens.
    """
    ranks = chain_length(shares)
    if not start or ranks == 1:
        return shares
    work, at = np.arange(ranks + 1), np.cumsum([0.0, *shares[:ranks]])
    begin = np.interp(start / end, at, work)
    parts = np.diff(np.interp(np.linspace(begin, ranks, ranks + 1), work, at))
    return tuple(map(float, np.pad(parts / parts.sum(), (0, len(shares) - ranks))))


def shard_in_chain(
    starts: Int64s,
    ends: Int64s,
    ranks: int,
    shares_of: Callable[[int, int], Sequence[float]],
    multiple: int = 1,
) -> Placement:
    """Shards new tokens of sequences in contiguous parts over a chain of ranks.

    The chain leads from the last rank down to rank 0, as rings of keys do
    (`distca.schedule.serving.rings`): so with the plan of `pass-kv` each rank hands keys to the one
    below, and those of earlier turns come round, wherever they lie.

    Args:
        starts: first new position of each sequence, int64 `[sequences]`.
        ends: end of the new positions of each sequence, likewise; no new tokens are possible.
        ranks: ranks of the chain.
        shares_of: tells each part of the tokens from a start to an end, the first first.
        multiple: as for `cut_prompt`.
    """
    parts = np.zeros((len(starts), ranks), dtype=np.int64)
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if end > start:
            parts[number] = cut_prompt(end - start, shares_of(start, end), multiple)
    until = starts[:, None] + np.cumsum(parts, axis=1)
    document, part = np.nonzero(parts)
    return Placement(
        document,
        (until - parts)[document, part],
        until[document, part],
        ranks - 1 - part,
        ranks,
    )


def search_partition(
    tokens: int, ranks: int, seconds: Seconds, finest: int = 1, few: bool = False
) -> Int64s:
    """Searches the partition with the earliest first token (KVR-S).

    It begins with the best of cuts at powers of the ranks' numbers, equal parts among them. Around
    the best cuts so far all cuts up to two strides away are tried; when none is better, the
    stride is halved (Section 4.2, the hierarchical grid search; for two ranks this is a search by
    halves). From seven ranks on that is one stride, and from nine on, where a grid would have too
    many points, the cuts move along four waves, and alone.

    Args:
        tokens: tokens of the prompt, at least one a rank.
        ranks: ranks of the chain.
        seconds: tells the seconds of partitions; the same ones for the same partition.
        finest: last stride, in tokens.
        few: whether few partitions are tried, as where each is run: a part gives to another.

    Returns:
        Tokens of each rank's part, int64 `[ranks]`; all on the first, where no chain is faster.

    Raises:
        ValueError: there are fewer tokens than ranks.
    """
    if tokens < ranks:
        raise ValueError(f"{tokens} tokens can't be shared by {ranks} ranks: shorten the chain")
    if ranks == 1:
        return np.array([tokens], dtype=np.int64)
    ends = np.linspace(0, 1, ranks + 1)
    powers = _POWERS[:: _FEW if few else 1]
    starts = np.stack([cut_prompt(tokens, np.diff(ends**power)) for power in powers])
    times = seconds(starts)
    best, reached = starts[int(times.argmin())], float(times.min())
    moves = _shifts(ranks - 1) if few else _moves(ranks - 1)
    stride = max(tokens // ranks // 8, finest)
    while True:
        cuts = np.cumsum(best)[:-1] + np.rint(moves * stride).astype(np.int64)
        candidates = np.diff(cuts, axis=1, prepend=0, append=np.full((len(cuts), 1), tokens))
        candidates = candidates[(candidates > 0).all(axis=1)]
        times = seconds(candidates)
        first = int(times.argmin()) if len(times) else 0
        if len(times) and times[first] < reached:
            best, reached = candidates[first], float(times[first])
        elif stride > finest:
            stride = max(stride // 2, finest)
        else:
            alone = np.eye(ranks, dtype=np.int64)[:1] * tokens
            return best if reached < seconds(alone)[0] else alone[0]


def _moves(cuts: int) -> Floats:
    """Lists how far cuts move, in strides, float64 `[candidates, cuts]`."""
    for steps in ((-2, -1, 0, 1, 2), (-1, 0, 1)):
        if len(steps) ** cuts <= _MOST_CANDIDATES:
            return np.array(list(itertools.product(steps, repeat=cuts)), dtype=np.float64)
    # Waves over all cuts, and cuts that move alone.
    cut, wave = np.arange(1, cuts + 1), np.arange(1, _WAVES + 1)[:, None]
    waves = np.sin(np.pi * wave * cut / (cuts + 1))
    together = np.array(list(itertools.product((-2, -1, 0, 1, 2), repeat=_WAVES))) @ waves
    alone = [step * np.eye(cuts) for step in (-2, -1, 1, 2)]
    return np.concatenate([together, *alone])


def _shifts(cuts: int) -> Floats:
    """Moves of all cuts between two parts, by which one gives a stride to the other."""
    cut = np.arange(cuts)
    pairs = itertools.combinations(range(cuts + 1), 2)
    between = np.array([(first <= cut) & (cut < second) for first, second in pairs], dtype=float)
    return np.concatenate([-between, between])


@dataclass(frozen=True)
class PartitionTable:
    """Searched partitions of some lengths, from which those of others are interpolated (KVR-P).

    Attributes:
        model: model that they were searched for.
        hardware: hardware that they were searched for.
        ranks: ranks of the chain.
        shares: each rank's part, by tokens of the prompt.
        by: what the search went by.
        trials: seconds of the partitions that were run, by tokens of the prompt. With them an
            interrupted search goes on, before it has found any shares.

    Raises:
        ValueError: there is no length, or the shares of one are no partition among the ranks, or a
            trial's seconds are not finite.
    """

    model: str
    hardware: str
    ranks: int
    shares: Mapping[int, Shares]
    by: SearchedBy = "simulated"
    trials: Mapping[int, Mapping[Parts, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.shares and not self.trials:
            raise ValueError("a table of partitions needs those of one length at least")
        for tokens, shares in self.shares.items():
            check_shares(shares, shortened=True)
            if len(shares) != self.ranks:
                raise ValueError(
                    f"the partition of {tokens} tokens is among {len(shares)} ranks, the table's "
                    f"are {self.ranks}"
                )
        for tokens, tried in self.trials.items():
            if not all(0 <= seconds < np.inf for seconds in tried.values()):
                raise ValueError(f"a trial of {tokens} tokens took no number of seconds")

    def covers(self, tokens: int) -> bool:
        """Returns whether a length lies between those of the table."""
        return min(self.shares) <= tokens <= max(self.shares)

    def at(self, tokens: int) -> Shares:
        """Interpolates the shares of a length; those of the nearest one beyond the table, and
        between chains of different numbers of ranks."""
        lengths = sorted(self.shares)
        above = bisect.bisect(lengths, tokens)
        around = lengths[max(above - 1, 0) : above + 1]
        if len({chain_length(self.shares[each]) for each in around}) > 1:
            return self.shares[min(around, key=lambda each: abs(each - tokens))]
        table = np.array([self.shares[each] for each in around])
        return tuple(float(np.interp(tokens, around, column)) for column in table.T)

    def check(self, model: str, hardware: str, ranks: int) -> None:
        """Checks that the table is for a model, its hardware and its ranks.

        Raises:
            ValueError: it is for others.
        """
        for what, ours, theirs in (
            ("model", self.model, model),
            ("hardware", self.hardware, hardware),
            ("ranks", self.ranks, ranks),
        ):
            if ours != theirs:
                raise ValueError(
                    f"the table of partitions is for {what} {ours}, not {theirs}: make one by "
                    "`distca tune partitions`"
                )

    def save(self, path: Path) -> None:
        """Writes the table to a file, replaced if it exists."""
        columns = asdict(self) | {"format": FORMAT}
        columns["shares"] = {str(each): list(self.shares[each]) for each in sorted(self.shares)}
        columns["trials"] = {
            str(each): [[list(parts), seconds] for parts, seconds in tried.items()]
            for each, tried in self.trials.items()
        }
        write_text(path, json.dumps(columns, indent=1) + "\n")


def load_partitions(path: Path) -> PartitionTable:
    """Reads a table that `PartitionTable.save` wrote.

    Raises:
        ValueError: the file is no such table.
    """
    text = read_text(path, "make a table of partitions by `distca tune partitions`")
    try:
        saved = json.loads(text)
        if saved["format"] != FORMAT:
            raise ValueError(f"format {saved['format']}, not {FORMAT}")
        shares = {
            int(each): tuple(map(float, of_length)) for each, of_length in saved["shares"].items()
        }
        trials = {
            int(each): {tuple(map(int, parts)): float(seconds) for parts, seconds in tried}
            for each, tried in saved.get("trials", {}).items()
        }
        made_for = str(saved["model"]), str(saved["hardware"]), int(saved["ranks"])
        return PartitionTable(*made_for, shares, saved.get("by", "simulated"), trials)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a table of partitions ({type(error).__name__}: {error}): make one by "
            "`distca tune partitions`"
        ) from error


@dataclass(frozen=True)
class Chain:
    """A `Sharding` of prefills over a chain of ranks.

    Attributes:
        ranks: ranks of the chain.
        partition: shares of all prompts, or a table of those of some lengths.

    Raises:
        ValueError: the partition is among another number of ranks, or the table has none yet.
    """

    ranks: int
    partition: Shares | PartitionTable

    def __post_init__(self) -> None:
        given = self.partition
        if isinstance(given, PartitionTable) and not given.shares:
            raise ValueError(
                "the table of partitions has none yet: its search was interrupted, so let "
                "`distca tune partitions` go on"
            )
        among = given.ranks if isinstance(given, PartitionTable) else len(given)
        if among != self.ranks:
            raise ValueError(
                f"the partition is among {among} ranks, not {self.ranks}: give one share for each"
            )

    def shares(self, start: int, end: int) -> Shares:
        """Returns each rank's part of the new tokens from `start` to `end`, the first of the chain
        first.

        Those of a later turn or chunk follow from the partition of all tokens before `end`.
        """
        given = self.partition
        whole = given.at(end) if isinstance(given, PartitionTable) else given
        return shares_behind(whole, start, end)

    def owners(self, parts: int, start: int, end: int) -> list[int]:
        """Ranks of equal parts of the new tokens from `start` to `end`, from the first down."""
        counts = cut_prompt(parts, self.shares(start, end))
        return [*map(int, np.repeat(np.arange(self.ranks)[::-1], counts))]

    def __call__(self, starts: Int64s, ends: Int64s) -> Placement:
        """Shards new tokens of sequences; see `shard_in_chain`."""
        return shard_in_chain(starts, ends, self.ranks, self.shares)

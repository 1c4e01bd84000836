"""Who holds the keys and values of which tokens: a few runs of each sequence, however long it is.

A run is consecutive positions: a piece of a prefill, which one rank holds, or decoded tokens, which
ranks hold in stripes. Of stripes a formula says who holds how many, so nothing here grows with a
sequence's length, and a step of many sequences takes a fixed number of operations on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.plan import Placement
from distca.plan.span import Int64s
from distca.schedule.serving.steps import in_turn, nobody_holds, shard_in_stripes

_STRIPED = -1
"""Stands for the rank of a run in stripes."""

_NEVER = np.iinfo(np.int64).max
"""Stands for the start of a run that there is not."""


class Holdings:
    """Who holds the keys and values of sequences; alike wherever the same steps are noted.

    Args:
        world_size: ranks.
        stripe: consecutive positions of a sequence that one rank holds of decoded tokens.

    Raises:
        ValueError: the stripe is not positive.
    """

    def __init__(self, world_size: int, stripe: int) -> None:
        if stripe < 1:
            raise ValueError(f"stripe {stripe}: give the positions that one rank owns, at least 1")
        self.world_size, self.stripe = world_size, stripe
        # A line of each sequence: starts and ranks of its runs, the rows that each rank has before
        # a run, the number of runs, and the sequence's length and number.
        self._starts = np.full((4, 4), _NEVER, dtype=np.int64)
        self._ranks = np.zeros((4, 4), dtype=np.int64)
        self._before = np.zeros((4, 4, world_size), dtype=np.int64)
        self._runs, self._lengths, self._numbers = np.zeros((3, 4), dtype=np.int64)
        self._line: dict[int, int] = {}
        self._free_lines = list(range(4))[::-1]

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._line

    def length(self, sequence: int) -> int:
        """Returns the tokens of a sequence whose keys and values are held."""
        line = self._line.get(sequence)
        return 0 if line is None else int(self._lengths[line])

    def lines(self, sequences: Sequence[int]) -> Int64s:
        """Returns the line of each sequence, int64 `[sequences]`; a new sequence is given one."""
        for sequence in sequences:
            if sequence not in self._line:
                if not self._free_lines:
                    self._grow(2 * len(self._runs), self._starts.shape[1])
                line = self._line[sequence] = self._free_lines.pop()
                self._starts[line] = _NEVER
                self._runs[line], self._lengths[line], self._numbers[line] = 0, 0, sequence
        found = map(self._line.__getitem__, sequences)
        return np.fromiter(found, dtype=np.int64, count=len(sequences))

    def lengths(self, lines: Int64s) -> Int64s:
        """Returns the tokens of the sequence of each line, `[lines]`."""
        return self._lengths[lines]

    def owners(self, lines: Int64s) -> Int64s:
        """Returns the rank that owns the next decoded token of each line's sequence, `[lines]`."""
        stripe = self._lengths[lines] // self.stripe
        return (stripe + self._numbers[lines]) % self.world_size  # type: ignore[no-any-return]

    def rows(self, lines: Int64s, ends: Int64s) -> Int64s:
        """Returns the rows of each line's positions before its end on each rank, int64
        `[lines, ranks]`."""
        run = np.maximum((self._starts[lines] < ends[:, None]).sum(axis=1) - 1, 0)
        start, rank = self._starts[lines, run], self._ranks[lines, run]
        numbers, start = self._numbers[lines], np.minimum(start, ends)
        of_run = self.in_stripes(numbers, start, ends)
        one = np.flatnonzero(rank != _STRIPED)
        of_run[one] = 0
        of_run[one, rank[one]] = (ends - start)[one]
        return self._before[lines, run] + of_run  # type: ignore[no-any-return]

    def in_stripes(self, numbers: Int64s, starts: Int64s, ends: Int64s) -> Int64s:
        """Returns the rows of each rank in spans of sequences, if all were in stripes:
        `[spans, ranks]`."""
        last = self._striped_before(numbers, ends)
        return last - self._striped_before(numbers, starts)

    def _striped_before(self, numbers: Int64s, ends: Int64s) -> Int64s:
        cycles, rest = np.divmod(ends, self.stripe * self.world_size)
        turn = (np.arange(self.world_size) - numbers[:, None]) % self.world_size
        within = np.clip(rest[:, None] - turn * self.stripe, 0, self.stripe)
        return cycles[:, None] * self.stripe + within  # type: ignore[no-any-return]

    def note_decoded(self, lines: Int64s, count: int = 1) -> None:
        """Notes that the next tokens of each line's sequence, `count` each, are held in stripes."""
        last = self._ranks[lines, np.maximum(self._runs[lines] - 1, 0)]
        for line in lines[(self._runs[lines] == 0) | (last != _STRIPED)].tolist():
            self._add_run(line, _STRIPED)
        self._lengths[lines] += count

    def note(self, sequences: Sequence[int], new: Placement) -> None:
        """Notes that ranks hold new tokens.

        Args:
            sequences: sequence of each document of `new`.
            new: holders of positions that follow those that are held.
        """
        lines = self.lines(sequences)
        order = np.lexsort((new.start, new.document))
        columns = (new.document, new.start, new.end, new.rank)
        for document, start, end, rank in zip(*(c[order].tolist() for c in columns), strict=True):
            line = int(lines[document])
            assert start == self._lengths[line], "positions are left out or repeated"
            if not self._runs[line] or self._ranks[line, self._runs[line] - 1] != rank:
                self._add_run(line, rank)
            self._lengths[line] = end

    def forget_from(self, sequence: int, position: int) -> None:
        """Forgets who holds the positions of a sequence from one on."""
        line = self._line[sequence]
        runs = int((self._starts[line] < position).sum())
        self._starts[line, runs:] = _NEVER
        self._runs[line], self._lengths[line] = runs, position

    def placement(self, sequences: Sequence[int], alike: Int64s | None = None) -> Placement:
        """Returns who holds what of sequences, numbered in their order.

        Args:
            sequences: sequences by number.
            alike: end of the positions of each, int64 `[sequences]`, that are the same to whoever
                asks: of their stripes it has the rows of each rank, rank by rank. None: it has all
                stripes.
        """
        tables = [nobody_holds(self.world_size)]
        for number, sequence in enumerate(sequences):
            line = self._line.get(sequence)
            if line is None:
                continue
            runs = int(self._runs[line])
            starts, ranks = self._starts[line, :runs], self._ranks[line, :runs]
            ends = np.append(starts[1:], self._lengths[line])
            document = np.full_like(starts, number)
            one, striped = ranks != _STRIPED, ranks == _STRIPED
            tables.append(
                Placement(document[one], starts[one], ends[one], ranks[one], self.world_size)
            )
            starts, ends = starts[striped], ends[striped]
            numbers, document = np.full_like(starts, sequence), np.full_like(starts, number)
            if alike is not None:
                begins, starts = starts, np.clip(alike[number], starts, ends)
                rows = self.in_stripes(numbers, begins, starts)
                tables.append(in_turn(document, begins, rows))
            found = shard_in_stripes(starts, ends, numbers, self.stripe, self.world_size)
            columns = np.full_like(found.document, number), found.start, found.end, found.rank
            tables.append(Placement(*columns, self.world_size))
        found = Placement.concatenate(tables)
        if len(found.rank):
            found = found.joined()
        return found.select(np.lexsort((found.start, found.document)))

    def drop(self, sequence: int) -> None:
        """Forgets a sequence, if there is such a one."""
        line = self._line.pop(sequence, None)
        if line is not None:
            self._free_lines.append(line)

    def _add_run(self, line: int, rank: int) -> None:
        """Begins a run behind all others of a line."""
        run = int(self._runs[line])
        if run == self._starts.shape[1]:
            self._grow(len(self._runs), 2 * run)
        here = np.array([line])
        self._before[line, run] = self.rows(here, self._lengths[here])[0] if run else 0
        self._starts[line, run], self._ranks[line, run] = self._lengths[line], rank
        self._runs[line] += 1

    def _grow(self, lines: int, runs: int) -> None:
        """Makes room for more sequences, or for more runs."""
        more = lines - len(self._runs), runs - self._starts.shape[1]
        self._free_lines += range(len(self._runs), lines)[::-1]
        self._starts = np.pad(self._starts, ((0, more[0]), (0, more[1])), constant_values=_NEVER)
        self._ranks = np.pad(self._ranks, ((0, more[0]), (0, more[1])))
        self._before = np.pad(self._before, ((0, more[0]), (0, more[1]), (0, 0)))
        self._runs, self._lengths, self._numbers = (
            np.pad(each, (0, more[0])) for each in (self._runs, self._lengths, self._numbers)
        )

"""Ranks that a chunk is given: the least queued ones, on as few nodes as hold them (`GetGroup`).

`Groups` is of one moment: it knows the seconds for which each rank is still taken, and remembers
the groups that it was asked for, since the search for chunks asks for the same ones again and
again. This is valid: the same seconds pass for all ranks, so the order of ranks stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

Ranks = frozenset[int]


class Groups:
    """Choice of ranks on nodes at one moment.

    Args:
        queued: seconds until each rank has done what it was given.
        ranks_per_node: rank `r` is on node `r // ranks_per_node`.
    """

    def __init__(self, queued: Sequence[float], ranks_per_node: int) -> None:
        self._queued = queued
        self._ranks_per_node = ranks_per_node
        order = sorted(range(len(queued)), key=queued.__getitem__)
        self._nodes: list[list[int]] = [[] for _ in range(-(-len(queued) // ranks_per_node))]
        for rank in order:
            self._nodes[rank // ranks_per_node].append(rank)
        self._found: dict[tuple[Ranks, Ranks, int], Ranks] = {}
        self._latest: dict[Ranks, float] = {}
        self.everyone: Ranks = frozenset(order)

    def latest(self, group: Ranks) -> float:
        """Returns the seconds until all ranks of a group are free."""
        latest = self._latest.get(group)
        if latest is None:
            latest = self._latest[group] = max(map(self._queued.__getitem__, group))
        return latest

    def extend(self, pool: Ranks, group: Ranks, degree: int) -> Ranks:
        """Returns `degree` ranks of a pool, those of `group` among them.

        Further ranks of the group's own nodes come first, the least queued ones before others; then
        those of other nodes.
        """
        key = (pool, group, degree)
        ranks = self._found.get(key)
        if ranks is None:
            ranks = self._found[key] = self._extend(pool, group, degree)
        return ranks

    def _extend(self, pool: Ranks, group: Ranks, degree: int) -> Ranks:
        chosen = set(group)
        used = {rank // self._ranks_per_node for rank in group}
        free = [
            [rank for rank in node if rank in pool and rank not in group] for node in self._nodes
        ]
        near = [rank for node in used for rank in free[node]]
        near.sort(key=self._queued.__getitem__)
        chosen.update(near[: degree - len(chosen)])
        others = [ranks for node, ranks in enumerate(free) if ranks and node not in used]
        while len(chosen) < degree:
            missing = degree - len(chosen)
            enough = [ranks for ranks in others if len(ranks) >= missing]
            if enough:
                node = min(enough, key=lambda ranks: self._queued[ranks[missing - 1]])
                chosen.update(node[:missing])
            else:
                # Nothing holds all: a node is filled, one of the largest that is free the soonest.
                node = min(others, key=lambda ranks: (-len(ranks), self._queued[ranks[-1]]))
                chosen.update(node)
                others.remove(node)
        return frozenset(chosen)

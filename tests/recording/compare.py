"""Two recordings, and how they differ in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ABSENT = "nothing"


class Difference(NamedTuple):
    """A value that differs.

    Attributes:
        path: path of the value in a mix's recording: a rank, then names and numbers.
        was: in the first recording.
        now: in the second.
    """

    path: tuple[str | int, ...]
    was: Any
    now: Any

    @property
    def kind(self) -> str:
        """What it is a difference of, whatever the rank and the step."""
        names = (part for part in self.path if isinstance(part, str) and part != "steps")
        return next(names, "steps")

    def __str__(self) -> str:
        rank, *path = self.path
        where = [f"rank {rank}"]
        if path[0] == "steps":
            where.append(f"step {path[1]}")
            path = path[2:]
        if path:
            where.append(" ".join(map(str, path)))
        return f"{', '.join(where)}: was `{self.was}`, is `{self.now}`"


def differences(was: Any, now: Any, path: tuple[str | int, ...] = ()) -> Iterator[Difference]:
    """All of them, in the order of ranks and steps; of two lists the first alone, since what
    follows an inserted event differs, too."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from differences(was.get(key, ABSENT), now.get(key, ABSENT), (*path, key))
    elif isinstance(was, list) and isinstance(now, list):
        for number in range(max(len(was), len(now))):
            each = [values[number] if number < len(values) else ABSENT for values in (was, now)]
            found = list(differences(*each, (*path, number)))
            yield from found
            if found and path[-1:] != ("steps",) and path:
                return
    elif was != now:
        yield Difference(path, was, now)


def compare(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Two recordings, as `commands.make` writes them.

    Returns:
        Warnings of versions that differ, and a line for each kind of difference of each mix.
    """
    warnings = [
        f"warning: {name} was {old}, is {now['versions'].get(name)}: bits may depend on it"
        for name, old in was["versions"].items()
        if now["versions"].get(name) != old
    ]
    lines = []
    mixes = was["mixes"] | now["mixes"]
    for mix in mixes:
        missing = [
            which for which, each in (("first", was), ("second", now)) if mix not in each["mixes"]
        ]
        if missing:
            lines.append(f"{mix}: not in the {missing[0]} recording")
            continue
        kinds: dict[str, list[Difference]] = {}
        for difference in differences(was["mixes"][mix], now["mixes"][mix]):
            kinds.setdefault(difference.kind, []).append(difference)
        for kind, found in kinds.items():
            ranks = len({difference.path[0] for difference in found})
            lines.append(f"{mix}: {kind} on {ranks} of {len(was['mixes'][mix])} ranks: {found[0]}")
    return warnings, lines

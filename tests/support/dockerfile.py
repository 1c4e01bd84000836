"""A reader of container files, and the rules of hadolint that a few lines can check."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """An instruction.

    Attributes:
        name: such as RUN.
        text: what follows, in one line.
    """

    name: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a RUN."""
        return [each.strip() for each in re.split(r"&&|\|\||;|[{}]", self.text) if each.strip()]


def read_steps(text: str) -> list[Step]:
    """Returns the instructions of a container file."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [Step(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def _bad_commands(steps: Sequence[Step], begins: str, wants: str) -> bool:
    """Whether a command that begins so lacks something."""
    commands = [each for step in steps if step.name == "RUN" for each in step.commands]
    return any(
        re.match(begins, each) is not None and re.search(wants, each) is None for each in commands
    )


def _updates_apart(steps: Sequence[Step]) -> bool:
    return any(
        step.name == "RUN" and ("apt-get update" in step.text) != ("apt-get install" in step.text)
        for step in steps
    )


def _keeps_lists(steps: Sequence[Step]) -> bool:
    return any(
        "apt-get install" in step.text and "rm -rf /var/lib/apt/lists/*" not in step.commands
        for step in steps
    )


def _unpinned(steps: Sequence[Step]) -> bool:
    """Whether pip installs a package that neither a constraint nor the command gives a version."""
    for step in steps:
        for command in step.commands if step.name == "RUN" else ():
            if not command.startswith("pip install"):
                continue
            words = shlex.split(command)[2:]
            constrained = {"-c", "--constraint"} & {*words}
            local = words[-2:] == ["-e", "."] and "--no-deps" in words
            if not constrained and not local:
                return True
    return False


def _piped_without_pipefail(steps: Sequence[Step]) -> bool:
    piped = re.compile(r"(?<!\|)\|(?!\|)")
    return any(
        step.name == "RUN" and piped.search(step.text) and "pipefail" not in step.text
        for step in steps
    )


def _no_json(text: str) -> bool:
    try:
        return not isinstance(json.loads(text), list)
    except ValueError:
        return True


RULES: dict[str, Callable[[Sequence[Step]], bool]] = {
    "DL3000 WORKDIR is absolute": lambda steps: any(
        step.name == "WORKDIR" and not step.text.startswith("/") for step in steps
    ),
    "DL3003 WORKDIR instead of cd": lambda steps: _bad_commands(steps, r"cd\b", r"^$"),
    "DL3004 no sudo": lambda steps: _bad_commands(steps, r"sudo\b", r"^$"),
    "DL3006 the base has a tag": lambda steps: any(
        step.name == "FROM" and ":" not in step.text for step in steps
    ),
    "DL3007 the tag is not latest": lambda steps: any(
        step.name == "FROM" and step.text.split()[0].endswith(":latest") for step in steps
    ),
    "DL3009 lists of apt are deleted": _keeps_lists,
    "DL3013 pip's versions are pinned": _unpinned,
    "DL3014 apt-get install -y": lambda steps: _bad_commands(steps, r"apt-get install", r" -y\b"),
    "DL3015 --no-install-recommends": lambda steps: _bad_commands(
        steps, r"apt-get install", r"--no-install-recommends"
    ),
    "DL3020 COPY instead of ADD": lambda steps: any(step.name == "ADD" for step in steps),
    "DL3025 CMD is JSON": lambda steps: any(
        step.name in ("CMD", "ENTRYPOINT") and _no_json(step.text) for step in steps
    ),
    "DL3027 apt-get instead of apt": lambda steps: _bad_commands(steps, r"apt\s", r"^$"),
    "DL3042 pip keeps no cache": lambda steps: _bad_commands(
        steps, r"pip install", r"--no-cache-dir"
    ),
    "DL3045 COPY to a relative place needs WORKDIR": lambda steps: any(
        step.name == "COPY"
        and not step.text.split()[-1].startswith("/")
        and not any(each.name == "WORKDIR" for each in steps[:at])
        for at, step in enumerate(steps)
    ),
    "DL3009 apt-get update and install are one step": _updates_apart,
    "DL4006 pipes need pipefail": _piped_without_pipefail,
    "docker ENV is NAME=VALUE": lambda steps: any(
        step.name == "ENV" and not all("=" in word for word in shlex.split(step.text))
        for step in steps
    ),
}
"""What each rule finds wrong in instructions, by its number in hadolint."""


def broken_rules(text: str) -> list[str]:
    """Returns the rules that a container file breaks."""
    steps = read_steps(text)
    return [name for name, is_broken in RULES.items() if is_broken(steps)]

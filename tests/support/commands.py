"""Subcommands of `distca`, run in this process."""

from __future__ import annotations

import re

import pytest

from distca.commands.main import main

_PROGRESS = re.compile(r"^distca [a-z ]+: \d+:\d\d, .*\n", re.MULTILINE)
"""Lines of progress, which appear where work takes some seconds, as on a busy machine."""


class Command:
    """A subcommand.

    Args:
        name: name of the subcommand.
        capsys: pytest's.

    Attributes:
        errors: what the last run wrote to standard error.
    """

    def __init__(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._name, self._capsys = name, capsys
        self.errors = ""

    def run(self, *arguments: str) -> str:
        """What it prints."""
        assert main([self._name, *arguments]) == 0
        captured = self._capsys.readouterr()
        self.errors = captured.err
        return captured.out

    def refused(self, *arguments: str) -> str:
        """The error that it prints, and nothing else but progress."""
        with pytest.raises(SystemExit) as stopped:
            main([self._name, *arguments])
        assert stopped.value.code == 2
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return _PROGRESS.sub("", captured.err)

    def failed(self, *arguments: str) -> str:
        """The error that it prints after its work has begun, and nothing else but
        progress."""
        assert main([self._name, *arguments]) == 2
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return _PROGRESS.sub("", captured.err)

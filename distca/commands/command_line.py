"""Common parts of all commands: flags, their help and errors, and checks of files to write."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distca.wording import install

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help as it is written, and adds a flag's default unless its help states one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        says_it = "Default:" in (action.help or "") or action.required
        if action.nargs == 0 or default in (None, argparse.SUPPRESS, []) or says_it:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{action.help} Default: {shown}.".replace("%", "%%")


class Parser(argparse.ArgumentParser):
    """Parser of a command's flags, whose errors are one line instead of the usage of all flags.

    Args:
        name: name of the command.
        description: purpose of the command.
        epilog: examples.
        forms: words after the command's name that would have been other parsers'.
        others: flags that other commands have, and what is meant by them here.
    """

    def __init__(
        self,
        name: str,
        description: str,
        epilog: str,
        forms: Sequence[str] = (),
        others: Mapping[str, str] | None = None,
    ) -> None:
        self._forms, self._others = forms, others or {}
        super().__init__(
            prog=f"distca {name}",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses the flags; of one that it does not know, it says which is nearest.

        Before anything else is refused: a mistyped flag would be missed under its own name.
        """
        known = self._option_string_actions
        if self._forms and argv and not argv[0].startswith("-"):
            self.error(unknown("form", argv[0], self._forms))
        for word in argv:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag not in known:
                near = difflib.get_close_matches(flag, known, 1)
                near = [self._others[flag]] if flag in self._others else near
                self.error(f"no flag {flag}" + (f": is {near[0]} meant?" if near else ""))
        return self.parse_args(argv)

    def given(self, argv: Sequence[str]) -> dict[str, str]:
        """Returns the flags that the arguments have, by the names of their values."""
        known = self._option_string_actions
        flags = (word.split("=")[0] for word in argv)
        return {known[flag].dest: flag for flag in flags if flag in known}

    def error(self, message: str) -> NoReturn:
        """Ends the command with a line on standard error."""
        if short := re.search(r"invalid int value: '(\d+)[kK]'", message):
            # "128k" may mean 128,000, too.
            message += f": write the number out, such as {int(short[1]) * 1024}"
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def file_name(text: str) -> Path:
    """Returns the file that a flag names. An empty name would be the current folder.

    Raises:
        argparse.ArgumentTypeError: the name is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: give the name of a file")
    return Path(text)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Says that there is nothing of a name, which name is nearest, and all names.

    Args:
        kind: kind of what is named, such as "model".
        name: name that is not known.
        known: all names.
    """
    names = list(known)
    written = name.lower().rpartition("/")[2]
    near = difflib.get_close_matches(written, names, len(names) or 1)
    size = _billions(written)
    if begun := [each for each in near if each.startswith(written)]:
        # qwen3-30b is the beginning of qwen3-30b-a3b.
        near = begun
    elif near and size is not None:
        # Of llama-8b and llama-70b the first is nearer to llama-7b.
        sizes = [each for each in near if _family(each) == _family(written)]
        near = (
            sorted(sizes, key=lambda each: abs(math.log((_billions(each) or 1e9) / size))) or near
        )
    meant = f" (is {near[0]} meant?)" if near else ""
    return f"no {kind} {name!r}{meant}: choose from {', '.join(names)}"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)b")


def _billions(name: str) -> float | None:
    """Returns the billions of parameters that a model's name has, such as 8.0 of llama-8b."""
    found = _SIZE.search(name)
    return float(found[1]) or None if found else None


def _family(name: str) -> str:
    """Returns a model's name without its size."""
    return _SIZE.sub("", name)


def check_output(flag: str, path: Path | None) -> None:
    """Refuses a file that could not be written, before any work is done for it.

    Args:
        flag: flag that names the file.
        path: file to write; None: the flag is not given.

    Raises:
        ValueError: the path is a folder, or the file or its folder cannot be written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} {path}: {folder} cannot be written to")
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"{flag} {path} exists and cannot be written to")


def check_outputs(args: argparse.Namespace, *flags: str) -> None:
    """Refuses files that could not all be written, before any work is done for them.

    Args:
        args: values of the flags.
        flags: flags that name the files; `--plot` is a picture.

    Raises:
        ValueError: a file cannot be written, two are the same, or a picture has another suffix.
        ImportError: a picture is wanted, but matplotlib is not installed.
    """
    seen: dict[Path, str] = {}
    for flag in flags:
        path = getattr(args, flag.removeprefix("--").replace("-", "_"))
        check = check_picture if flag == "--plot" else check_output
        check(flag, path)
        if path is None or (path.exists() and not path.is_file()):
            # Devices, such as /dev/null, may be written to twice.
            continue
        other = seen.setdefault(path.resolve(), flag)
        if other != flag:
            raise ValueError(f"{other} and {flag} name the same file, {path}: give two names")


def write_on(text: str) -> None:
    """Writes to standard output at once, for commands with work that nobody need read about.

    If the reader has gone, this and all that follows is lost without an error.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_picture(flag: str, path: Path | None) -> None:
    """Refuses a picture that could not be drawn or written, before any work is done for it.

    Args:
        flag: flag that names the file.
        path: file to write, whose suffix says how; None: the flag is not given.

    Raises:
        ValueError: the file cannot be written, or the suffix is no format of matplotlib.
        ImportError: matplotlib is not installed.
    """
    check_output(flag, path)
    if path is None:
        return
    written = make_figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in written:
        raise ValueError(f"{flag} {path}: the suffix must be one of {', '.join(written)}")


def make_figure(figsize: tuple[float, float] | None = None) -> Figure:
    """Makes a figure of matplotlib, whose parts leave each other room.

    Args:
        figsize: width and height in inches; None: matplotlib's.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib: {install('plot')}") from error
    return Figure(figsize, layout="constrained")

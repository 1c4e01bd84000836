"""Commands and blocks of the documentation's pages, and the parsers of those commands."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
    # Their comments are what --help prints.
    *sorted((ROOT / "launch").rglob("*.sh")),
]
_PROGRAMS = (
    r"(?:distca|python|torchrun|bash|sbatch|pip|pytest|source|export|compute-sanitizer"
    r"|launch/[\w./]+)"
)
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*{_PROGRAMS}(?= |$)")
# Only a name in a sentence: nothing follows the program.
_NAME = re.compile(
    r"(?:distca \w+|launch/[\w./]+|python(?: -m [\w.]+)?|torchrun|pip|sbatch|pytest)"
)
_PLACEHOLDER = re.compile(r"\[?\b[A-Z]+\b\]?")


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: the page's path in the repository.
        text: what is typed, in one line.
        whole: typed as it stands; else a part of it, named in a sentence or with dots.
        shown: lines of the page that follow it as what it prints.
    """

    page: str
    text: str
    whole: bool
    shown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """What a page has beside its text: commands, and indented blocks without any."""

    commands: tuple[Command, ...]
    blocks: tuple[str, ...]


@cache
def read_page(path: Path) -> Page:
    """Reads a page, or the comments of a script."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    if path.suffix == ".sh":
        comments = [line for line in text.splitlines() if re.match(r"#(?!!|SBATCH)", line)]
        text = "\n".join(line[2:] for line in comments) + "\n"
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    commands: list[Command] = []
    blocks: list[str] = []
    indented = re.compile(r"(?:(?<=\n\n)|\A)(?: {4}.*\n(?:\n(?= {4}))?)+")
    for block in indented.findall(text):
        found = _commands_of_block(name, block)
        commands += found
        if not found:
            blocks.append(block)
    for span in re.findall(r"`([^`]+)`", indented.sub("\n", text)):
        typed = " ".join(span.split())
        if _COMMAND.match(typed) and not _NAME.fullmatch(typed):
            commands.append(Command(name, typed, whole=False))
    return Page(tuple(commands), tuple(blocks))


def _commands_of_block(page: str, block: str) -> list[Command]:
    found: list[Command] = []
    # A command goes on after a backslash; what is shown keeps its own.
    lines = iter(block.splitlines())
    for line in lines:
        typed = line.strip()
        if _COMMAND.match(typed):
            while typed.endswith("\\"):
                typed = typed[:-1] + next(lines).strip()
            typed = " ".join(re.sub(r" +#.*| \| tee .*", "", typed).split())
            found.append(Command(page, typed, whole="..." not in typed))
        elif typed and found:
            last = found.pop()
            shown = (*last.shown, line.removeprefix(" " * 4))
            found.append(Command(page, last.text, last.whole, shown))
    return found


def all_commands() -> dict[str, list[Command]]:
    """All commands by what is typed."""
    found: dict[str, list[Command]] = {}
    for page in PAGES:
        for command in read_page(page).commands:
            found.setdefault(command.text, []).append(command)
    return found


def arguments_of(command: str) -> list[str]:
    """Its words, without variables that are set for it, and without what only runs another."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]) or words[0] in ("bash", "compute-sanitizer"):
        words = words[1:]
    return words


class _ParsedError(Exception):
    """Leaves a command when its flags are parsed."""


def parse_alone(run: Callable[[], object], words: Sequence[str] = (), whole: bool = True) -> None:
    """Runs a command until its flags are parsed.

    Args:
        run: the command.
        words: its arguments, if it takes them from `sys.argv`.
        whole: nothing that the command requires is missing.

    Raises:
        SystemExit: a flag or a value is refused.
    """
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_leave(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        if not whole:
            _need_nothing(self)
        parse_args(self, args, namespace)
        raise _ParsedError

    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_and_leave),
        patch.object(sys, "argv", ["command", *words]),
    ):
        try:
            run()
        except _ParsedError:
            return
        except SystemExit as stopped:
            # --help ends it, too.
            if stopped.code == 0:
                return
            raise
    raise AssertionError("the command has parsed nothing")


def check_flags(command: Command) -> None:
    """Holds a command's flags against the parser that reads them; runs nothing.

    Raises:
        SystemExit: the parser refuses them.
        AssertionError: there is no such program, extra, file or flag.
    """
    words = arguments_of(_PLACEHOLDER.sub(_value, command.text))
    words = [word for word in words if word != "..."]
    program, flags = words[0], words[1:]
    if program == "sbatch":
        # Its own options come before the script.
        scripts = [place for place, word in enumerate(words) if word.endswith(".sh")]
        if scripts:
            check_launch_script(words[scripts[0]], words[scripts[0] + 1 :])
    elif program.startswith("launch/"):
        check_launch_script(program, flags)
    elif program == "torchrun":
        _check_torchrun(flags, command.whole)
    elif program == "pip":
        _check_pip(flags)
    elif program == "pytest":
        check_pytest(flags)
    elif program == "distca":
        run = importlib.import_module("distca.commands.main").main
        parse_alone(lambda: run(flags), whole=command.whole)
    elif program == "python" and flags[:2] == ["-m", "megatron_patches.launch"]:
        _check_torchrun(flags[2:], command.whole)
    elif program == "python":
        check_python(flags, command.whole)
    else:
        assert program in ("source", "export"), f"no check for {program}"


def _value(placeholder: re.Match[str]) -> str:
    """What stands in for a value: numbers for single letters."""
    return "1" if len(placeholder[0]) == 1 else placeholder[0].strip("[]")


def check_python(words: Sequence[str], whole: bool) -> None:
    """Holds the flags of a file or a module against its parser."""
    main, flags = main_of(words)
    if words[0] == "benchmarks/training/throughput.py":
        # What it does not know is for pretrain_gpt.py's parser.
        throughput = importlib.import_module("benchmarks.training.throughput")
        _, flags = throughput.build_parser().parse_known_args(flags)
        parse_training_flags(flags)
    else:
        # What stands as FILE, or as DIR of published lists, is not there.
        with patch("benchmarks.arguments.is_there", lambda file: True):
            parse_alone(main, flags, whole)


def main_of(words: Sequence[str]) -> tuple[Callable[..., object], list[str]]:
    """The function that `python WORDS` calls, and its arguments."""
    if words[0] == "-m":
        name, flags = words[1], words[2:]
    else:
        path = Path(words[0])
        assert (ROOT / path).exists(), f"no {path}"
        name, flags = ".".join(path.with_suffix("").parts), words[1:]
    # Tests are on Python's path.
    name = name.removeprefix("tests.")
    name = {"recording": "recording.commands"}.get(name, name)
    return importlib.import_module(name).main, list(flags)


def check_launch_script(script: str, flags: Sequence[str]) -> None:
    """Holds what a script passes on against the parser of what it starts."""
    if script == "launch/test.sh":
        _check_test_script(list(flags))
        return
    if script == "launch/setup.sh":
        assert not flags
        return
    if script == "launch/demo.sh":
        parse_training_flags(flags)
        return
    printed = dry_run(script, flags)
    found = 0
    for line in printed.splitlines():
        words = shlex.split(line)
        for file in {"pretrain_gpt.py", "benchmarks/training/throughput.py"} & set(words):
            found += 1
            passed_on = words[words.index(file) + 1 :]
            if file == "pretrain_gpt.py":
                parse_training_flags(passed_on)
            else:
                check_python([file, *passed_on], whole=True)
    assert found, printed


def dry_run(script: str, flags: Sequence[str]) -> str:
    """What a launch script prints with --dry-run."""
    command = ["bash", script, *(() if "--dry-run" in flags else ("--dry-run",)), *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def parse_training_flags(flags: Sequence[str]) -> None:
    """Holds flags against pretrain_gpt.py's parser; others that it needs may be missing."""
    from megatron_patches.parts import build_parser

    parser = build_parser()
    _need_nothing(parser)
    parser.parse_args(flags)


def _need_nothing(parser: argparse.ArgumentParser) -> None:
    for each in (*parser._actions, *parser._mutually_exclusive_groups):
        each.required = False


def _check_torchrun(words: list[str], whole: bool) -> None:
    from torch.distributed.run import get_args_parser

    if len(words) == 1 and words[0].startswith("--"):
        assert words[0] in get_args_parser()._option_string_actions, words[0]
        return
    if "distca" in words:
        module = words.index("distca")
        get_args_parser().parse_args([*words[: module - 1], "distca"])
        run = importlib.import_module("distca.commands.main").main
        parse_alone(lambda: run(words[module + 1 :]), whole=whole)
        return
    if "megatron_patches.pretrain" in words:
        module = words.index("megatron_patches.pretrain")
        words = [*words[: module - 1], "pretrain_gpt.py", *words[module + 1 :]]
    if "distca" in words:
        # As a module: what follows it is a command.
        module = words.index("distca")
        get_args_parser().parse_args(words[: module + 1])
        run = importlib.import_module("distca.commands.main").main
        parse_alone(lambda: run(words[module + 1 :]), whole=whole)
        return
    # Of torchrun's options all take a value here. Dots may stand in the place of the script.
    place = next((n for n in range(0, len(words), 2) if words[n].endswith(".py")), 2)
    given = words[place].endswith(".py")
    script = words[place] if given else "pretrain_gpt.py"
    get_args_parser().parse_args([*words[:place], script])
    flags = words[place + given :]
    if script == "pretrain_gpt.py":
        parse_training_flags(flags)
    else:
        check_python([script, *flags], whole)


def _check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in words:
        for group in re.findall(r"^(?:\.|distca)\[(.*)\]$", word):
            assert set(group.split(",")) <= set(extras), f"no extra of pyproject.toml: {group}"


def check_pytest(words: Sequence[str]) -> None:
    """Holds arguments against the options of pytest, of xdist and of conftest.py."""
    from _pytest.config import get_config

    config = get_config([], ())
    for plugin in ("xdist.plugin", "conftest"):
        config.pluginmanager.import_plugin(plugin)
    _, unknown = config._parser.parse_known_and_unknown_args(list(words))
    assert not unknown, f"pytest knows no {' '.join(unknown)}"
    for word in words:
        assert not word.startswith("tests/") or (ROOT / word).exists(), f"no {word}"


def _check_test_script(words: list[str]) -> None:
    if words[:1] == ["--recording"]:
        run = importlib.import_module("recording.commands").main
        parse_alone(lambda: run(["since", *words[1:]]))
    elif "--mutants" in words:
        run = importlib.import_module("mutation.__main__").main
        parse_alone(lambda: run(words))
    elif words[:1] in (["--megatron"], ["--python"]):
        check_pytest(words[2:])
    elif words[:1] in (["--vllm"], ["--trainers"]):
        check_pytest(words[1:])
    else:
        check_pytest(words)


def examples_of_help() -> Iterator[Command]:
    """The commands that end the help of each subcommand of `distca`."""
    from distca.commands.main import COMMANDS

    for name in COMMANDS:
        epilog = importlib.import_module(f"distca.commands.{name}").build_parser().epilog
        block = re.sub(r"^  (?=\S)", "    ", epilog, flags=re.MULTILINE)
        yield from _commands_of_block(f"distca {name} --help", block)

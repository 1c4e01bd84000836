"""Words that readers stumbled over are in no page, message, docstring or comment."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("distca", "megatron_patches", "benchmarks", "data", "examples")
PAGES = [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *(ROOT / "benchmarks" / "results").rglob("*.md"),
]
OLD = re.compile(
    # A name of an argument is not a word of a sentence.
    r"(?<!`)\b(told|alike)\b(?![:`])|\b(so many|goes? by|heeds?|of whom|bears?)\b"
    r"|None: (there (is|are) none|none (is|are|does|do))\b"
    # "each of which" is English.
    r"|(?<!each)(?<!all)(?<!none)(?<!many)(?<!fastest) of which\b"
    r"|; (so|nor) (is|are|do|does|has|have)\b|, and (so|nor) (is|are|do|does|has|have)\b",
    re.IGNORECASE,
)


def texts_of(path: Path) -> list[tuple[int, str]]:
    """The strings and comments of Python code, or all lines of another file, with their lines."""
    if path.suffix != ".py":
        return list(enumerate(path.read_text().splitlines(), 1))
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    with path.open("rb") as file:
        return [
            (token.start[0], token.string)
            for token in tokenize.tokenize(file.readline)
            if token.type in kinds
        ]


def old_words(path: Path) -> list[str]:
    """Where a file has old words."""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return [
        f"{name}:{line}: {found.group(0)}"
        for line, text in texts_of(path)
        for found in OLD.finditer(" ".join(text.split()))
    ]


def test_old_words_are_found(tmp_path: Path) -> None:
    """In docstrings, comments and parts of f-strings; names of the code are free."""
    code = tmp_path / "code.py"
    code.write_text(
        '"""Rows\n    of which some stay, each of which has keys."""\n'
        "alike = 1  # All are\n"
        'f"{alike} goes by" # so many\n'
    )
    words = [found.partition(": ")[2] for found in old_words(code)]
    assert words == [" of which", "goes by", "so many"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_has_no_old_words(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [found for path in files for found in old_words(path)] == []


def test_pages_have_no_old_words() -> None:
    assert [found for path in PAGES for found in old_words(path)] == []

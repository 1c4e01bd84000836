"""Documents as texts, from files of any kind: files that are not UTF-8 text are named."""

from __future__ import annotations

import codecs
import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_HEAD_BYTES = 1 << 13
"""First bytes of a file, by which binary files and other encodings are known, as in git."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_OTHER_ENCODINGS = (
    # UTF-32 first, since its mark begins like that of UTF-16.
    ("UTF-32", (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    ("UTF-16", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)


def find_files(inputs: Iterable[str]) -> list[Path]:
    """Lists files of paths, folders and patterns (`notes/**/*.md`) in order, without hidden ones.

    Raises:
        ValueError: a path does not exist, or a pattern or folder has no file.
    """
    files = []
    for given in inputs:
        path = Path(given)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"--input {given} cannot be read twice, such as a pipe: give a file")
        if path.exists():
            paths = [Path(given)]
        else:
            paths = sorted(Path(found) for found in glob.glob(given, recursive=True))
        found = [file for path in paths for file in _files_below(path)]
        if not found:
            raise ValueError(f"--input {given} does not exist or holds no file")
        files += found
    return files


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    )


def read_documents(
    files: Iterable[Path],
    json_key: str,
    left_out: Callable[[str], object],
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[str]:
    """Reads documents: each line of a `.jsonl` file, and the whole text of any other file.

    Args:
        files: files to read, in UTF-8, with or without a mark at the beginning.
        json_key: key of the text in a line.
        left_out: called with the place and fault of each document, or file, that is not UTF-8 text;
            it may raise.
        advance: called with the number of bytes that each document took.

    Raises:
        ValueError: a line is not a JSON object with a text under this key.
    """
    for path in files:
        with path.open("rb") as file:
            fault = _fault_of_head(file.read(_HEAD_BYTES))
        if fault is not None:
            left_out(f"{path}: {fault}")
            advance(path.stat().st_size)
        elif path.suffix == ".jsonl":
            yield from _read_json_lines(path, json_key, left_out, advance)
        else:
            content = path.read_bytes()
            text = _decoded(content, f"{path}", 1, left_out)
            if text is not None:
                yield text
            advance(len(content))


def _fault_of_head(head: bytes) -> str | None:
    """Returns why a file that begins so is not UTF-8 text; None: it may be."""
    for name, marks in _OTHER_ENCODINGS:
        if head.startswith(marks):
            return f"{name}, not UTF-8"
    return "binary, not text" if b"\0" in head else None


def _read_json_lines(
    path: Path,
    json_key: str,
    left_out: Callable[[str], object],
    advance: Callable[[int], object],
) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            decoded = _decoded(line, f"{path}", number, left_out)
            if decoded is not None and decoded.strip():
                place = f"{path}, line {number}"
                try:
                    text = json.loads(decoded)[json_key]
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ValueError(
                        f"{place}: no JSON object with the key {json_key!r}"
                    ) from error
                if not isinstance(text, str):
                    raise ValueError(f"{place}: {json_key!r} is not a text")
                # JSON may escape one half of a pair that makes a character.
                if _SURROGATE.search(text):
                    left_out(f"{place}: a lone surrogate, which is half a character")
                else:
                    yield text
            advance(len(line))


def _decoded(
    content: bytes, path: str, first_line: int, left_out: Callable[[str], object]
) -> str | None:
    """Decodes bytes that begin in a line of a file; None: they are no UTF-8, and left out."""
    try:
        return content.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + error.object.count(b"\n", 0, error.start)
        left_out(f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8")
        return None

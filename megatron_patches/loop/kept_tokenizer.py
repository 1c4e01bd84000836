"""The tokenizer of a run, kept beside its checkpoints: `distca convert` needs no other folder.

Where it is in the folder of a model of Hugging Face, so is that model's configuration, which says
what flags of a run cannot, such as the name of the model's family. It is kept, too.
"""

from __future__ import annotations

from pathlib import Path

KEPT = "tokenizer"
"""Folder of the tokenizer, in that of the checkpoints."""

_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_OF_MODEL = ("config.json", "generation_config.json")


def tokenizer_files(model: str | Path) -> dict[str, Path]:
    """Returns the files of a tokenizer by the names under which libraries look for them.

    Args:
        model: a tokenizer.json, or its folder.
    """
    given = Path(model)
    folder = given if given.is_dir() else given.parent
    files = {"tokenizer.json": folder / "tokenizer.json" if given.is_dir() else given}
    files |= {name: folder / name for name in _BESIDE}
    return {name: file for name, file in files.items() if file.is_file()}


def kept_tokenizer(checkpoints: Path) -> Path | None:
    """Returns the folder of the tokenizer that is kept beside checkpoints, if there is one."""
    folder = checkpoints / KEPT
    return folder if (folder / "tokenizer.json").is_file() else None


def keep_tokenizer(kind: str, model: str | None, checkpoints: Path) -> None:
    """Copies the run's tokenizer beside its checkpoints. On one rank alone.

    What is there stays where the run's own is gone, or is the same.

    Args:
        kind: value of `--tokenizer-type`.
        model: value of `--tokenizer-model`.
        checkpoints: folder of `--save`.
    """
    if kind not in ("HuggingFaceTokenizer", "SFTTokenizer") or model is None:
        return
    folder = checkpoints / KEPT
    files = tokenizer_files(model)
    if "tokenizer.json" in files:
        beside = {name: files["tokenizer.json"].with_name(name) for name in _OF_MODEL}
        files |= {name: file for name, file in beside.items() if file.is_file()}
    for name, file in files.items():
        content, copy = file.read_bytes(), folder / name
        if copy.is_file() and copy.read_bytes() == content:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f".{name}"
        written.write_bytes(content)
        # Whole, whenever the run is killed.
        written.replace(copy)

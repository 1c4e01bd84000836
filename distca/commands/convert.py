"""`distca convert`: a model of Hugging Face as a checkpoint that training loads, and back.

distca convert Llama-3.1-8B --to llama-megatron
distca convert --checkpoint checkpoints --to Llama-3.1-8B-long
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from distca.commands.command_line import Parser
from distca.wording import install

_MOST_DIGITS = 12
"""Most digits of a token id."""


def build_parser() -> Parser:
    """Makes the parser of the command."""
    parser = Parser(
        "convert",
        "Convert a model of Hugging Face to a checkpoint of Megatron's that training loads, and "
        "print the flags that describe it; or convert a run's latest checkpoint back.",
        """examples:
  distca convert Llama-3.1-8B --to llama-megatron
  distca convert Qwen3-30B-A3B --to qwen-megatron --check 'The quick brown fox'
  distca convert --checkpoint checkpoints --to Llama-3.1-8B-long
""",
    )
    parser.add_argument(
        "model",
        type=_folder,
        nargs="?",
        metavar="MODEL",
        help="Folder of a Hugging Face model: config.json, weights and tokenizer.json.",
    )
    parser.add_argument(
        "--checkpoint",
        type=_folder,
        metavar="FOLDER",
        help="Folder of Megatron checkpoints (the run's --save). The latest one is converted to "
        "Hugging Face.",
    )
    parser.add_argument(
        "--to",
        type=_folder,
        required=True,
        metavar="FOLDER",
        help="Output folder. With MODEL it becomes a Megatron checkpoint for --load; with "
        "--checkpoint, a Hugging Face model.",
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="Write weights in float32. Without this flag, they are written in bfloat16 with "
        "MODEL, and in the run's data type with --checkpoint.",
    )
    parser.add_argument(
        "--check",
        metavar="TEXT|IDS",
        help="Compare the logits of both models in float32, for a text or for token ids "
        "separated by commas, and print the largest difference. The command fails if the "
        "difference is larger than rounding explains.",
    )
    parser.add_argument(
        "--hf-model",
        type=_folder,
        metavar="FOLDER",
        help="With --checkpoint: folder of the original model, for its config.json. Default: the "
        "one stored with the checkpoints.",
    )
    parser.add_argument(
        "--tokenizer-model",
        type=_path,
        metavar="PATH",
        help="With --checkpoint: a tokenizer.json or its folder. Default: the one stored with the "
        "checkpoints.",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="With --checkpoint: write into a folder that is not empty, and replace weights and "
        "files of the same names.",
    )
    return parser


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path: give one")
    return text


def _folder(text: str) -> Path:
    return Path(_path(text))


def token_ids(sample: str) -> list[int] | None:
    """Returns the token ids that `--check` gives; None: it gives text.

    Args:
        sample: text, or token ids with commas between them.

    Raises:
        ValueError: it is empty, or an id is negative or longer than any vocabulary's.
    """
    if not sample:
        raise ValueError("--check '' has no token: give text, or ids with commas between them")
    words = [word.strip() for word in sample.split(",")]
    if not all(re.fullmatch(r"-?\d+", word) for word in words):
        return None
    for word in words:
        if word.startswith("-") or len(word) > _MOST_DIGITS:
            shown = word if len(word) <= _MOST_DIGITS else f"{word[:_MOST_DIGITS]}..."
            raise ValueError(
                f"--check has the token id {shown}, which no model has: give text, or ids from 0 "
                "on with commas between them"
            )
    return [int(word) for word in words]


def check_arguments(given: Namespace) -> None:
    """Checks the arguments against each other.

    Raises:
        ValueError: they don't go together, or `--check` gives no tokens.
    """
    if given.check is not None:
        token_ids(given.check)
    if (given.model is None) == (given.checkpoint is None):
        raise ValueError("give either the folder of a model of Hugging Face, or --checkpoint")
    if given.checkpoint is not None:
        return
    for flag in ("--hf-model", "--tokenizer-model", "--force"):
        if getattr(given, flag[2:].replace("-", "_")):
            raise ValueError(f"{flag} is for --checkpoint: remove it")


def main(argv: list[str]) -> int:
    """Runs the command in a process of its own, on CPUs; returns its exit status.

    Megatron's state is the process's, and weights of large models fit the CPU's memory.
    """
    check_arguments(build_parser().parse(argv))
    if importlib.util.find_spec("megatron") is None:
        raise ImportError(f"converting needs `{install('convert')}`")
    command = [sys.executable, "-m", "megatron_patches.convert", *argv]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    # In a group of its own it gets no signals from the terminal, and ends with this process.
    return subprocess.run(command, env=hidden, check=False, process_group=0).returncode

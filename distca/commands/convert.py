"""`distca convert`: a model of Hugging Face as a checkpoint that training loads, and back.

distca convert Llama-3.1-8B --to llama-megatron
distca convert --checkpoint checkpoints --to Llama-3.1-8B-long
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from distca.commands.command_line import Parser
from distca.wording import install


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
        type=Path,
        nargs="?",
        metavar="MODEL",
        help="Folder of a Hugging Face model: config.json, weights and tokenizer.json.",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="Folder of Megatron checkpoints (the run's --save). The latest one is converted to "
        "Hugging Face.",
    )
    parser.add_argument(
        "--to",
        type=Path,
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
        type=Path,
        metavar="FOLDER",
        help="With --checkpoint: folder of the original model, for its config.json. Default: the "
        "one stored with the checkpoints.",
    )
    parser.add_argument(
        "--tokenizer-model",
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


def check_arguments(given: Namespace) -> None:
    """Checks the arguments against each other.

    Raises:
        ValueError: they don't go together.
    """
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

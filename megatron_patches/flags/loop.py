"""The flag that chooses the training loop."""

from __future__ import annotations

from argparse import ArgumentParser

LOOPS = ("lean", "megatron")


def add_loop_argument(parser: ArgumentParser) -> None:
    """Adds the flag that chooses the loop."""
    parser.add_argument(
        "--training-loop",
        choices=LOOPS,
        default="lean",
        help="lean: this repository's loop on megatron-core alone. megatron: Megatron-LM's own "
        "loop, which megatron-core's wheels hold from 0.17 on. Default: lean.",
    )

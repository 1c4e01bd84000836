"""Flags of a run that is never started."""

from __future__ import annotations

from argparse import Namespace

from megatron_patches.flags.distca import add_distca_arguments
from megatron_patches.flags.megatron import parse_args
from megatron_patches.flags.validation import validate_distca_arguments

GOOD = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 256
    --micro-batch-size 1 --lr 1e-3 --data-path somewhere --attention-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 999
""".split()


def parse(*flags: str, world_size: int = 4, length: str = "--train-iters 10") -> Namespace:
    args = parse_args(add_distca_arguments, [*GOOD, *length.split(), *flags], world_size)
    validate_distca_arguments(args)
    return args

"""Flags of a run that is never started."""

from __future__ import annotations

from argparse import Namespace

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.validation import validate
from megatron_patches.parts import parse_args
from support.models import pad_vocabulary

GOOD = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 256
    --micro-batch-size 1 --lr 1e-3 --data-path somewhere --attention-dropout 0 --split 90,5,5
    --tokenizer-type NullTokenizer --vocab-size 999 --max-position-embeddings 4096
    --position-embedding-type rope
""".split()


def check(args: Namespace) -> None:
    """Checks arguments that a test has changed."""
    validate(DistcaConfig.from_args(args), args)


def parse(*flags: str, world_size: int = 4, length: str = "--train-iters 10") -> Namespace:
    """Parses flags beside good ones, and sets the vocabulary as a run's tokenizer does."""
    args = parse_args([*GOOD, *length.split(), *flags], world_size=world_size)
    pad_vocabulary(args)
    return args

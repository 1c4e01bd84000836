"""How much `distca plan` and `distca simulate` plan for inference: tokens, sequences and ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from distca.commands.command_line import Parser
from distca.commands.described import flag_of
from distca.commands.fewest_ranks import AUTO
from distca.documents.lengths import read_lengths
from distca.plan.span import Int64s

MOST_TOKENS = 2**31
"""Most tokens of all sequences together, whose pairs of queries and keys are 64-bit numbers."""
MOST_SEQUENCES = 2**16
MOST_RANKS = 1024
"""Most ranks: the parts of a plan grow with the square of their number."""
_MOST = {
    "tensor_parallel_size": 2**16,
    "cp_kv_cache_interleave_size": MOST_TOKENS,
    "dtype_bytes": 8,
}


def add_sequences_flags(parser: Parser, kind: str) -> None:
    """Adds the flags of sequences.

    Args:
        parser: parser of the command.
        kind: prefill or decode.
    """
    group = parser.add_argument_group("sequences")
    if kind == "prefill":
        given = group.add_mutually_exclusive_group(required=True)
        given.add_argument(
            "--new-tokens",
            type=int,
            nargs="+",
            metavar="T",
            help="Number of new tokens of each sequence. All sequences are computed together.",
        )
        given.add_argument(
            "--lengths",
            type=Path,
            metavar="FILE",
            help="Numbers of new tokens from a file: a JSON list of integers, or a Megatron index "
            "(.idx).",
        )
    else:
        group.add_argument(
            "--sequences",
            type=int,
            default=1,
            metavar="N",
            help="Number of sequences that are decoded.",
        )
    group.add_argument(
        "--cached-tokens",
        type=int,
        nargs="+",
        default=[0],
        metavar="P",
        help="Number of earlier tokens whose keys and values are cached: one number for all "
        "sequences, or one for each.",
    )


def read_lengths_file(args: argparse.Namespace) -> None:
    """Reads the file of `--lengths`, if it is given, into what `--new-tokens` has.

    Raises:
        ValueError: it cannot be read.
    """
    if getattr(args, "lengths", None) is not None:
        args.new_tokens = read_lengths(args.lengths).tolist()


def check_numbers(args: argparse.Namespace, kind: str) -> tuple[Int64s, Int64s]:
    """Checks how much there is of everything.

    Args:
        args: flags of `add_sequences_flags`, and sizes of the ranks.
        kind: prefill or decode.

    Returns:
        New tokens, and cached tokens, of each sequence, int64 `[sequences]`.

    Raises:
        ValueError: a number is too small or too large, or numbers do not fit each other.
    """
    ranks = args.context_parallel_size
    _check("--context-parallel-size", 1 if ranks == AUTO else ranks, 1, MOST_RANKS)
    for name, most in _MOST.items():
        _check(flag_of(name), getattr(args, name), 1, most)
    if kind == "decode":
        _check("--sequences", args.sequences, 1, MOST_SEQUENCES)
        given, source = [1] * args.sequences, "--sequences"
    else:
        given = args.new_tokens
        source = "--new-tokens" if args.lengths is None else f"--lengths {args.lengths}:"
    if len(given) > MOST_SEQUENCES:
        raise ValueError(f"{source} {len(given):,} sequences: give at most {MOST_SEQUENCES:,}")
    _check(source, min(given), 1, MOST_TOKENS)
    _check(source, max(given), 1, MOST_TOKENS)
    if min(args.cached_tokens) < 0 or (args.window_left or 0) < 0:
        raise ValueError("--cached-tokens and --window-left must not be negative")
    _check("--cached-tokens", max(args.cached_tokens), 0, MOST_TOKENS)
    _check("--window-left", args.window_left or 0, 0, MOST_TOKENS)
    if len(args.cached_tokens) not in (1, len(given)):
        raise ValueError(
            f"--cached-tokens has {len(args.cached_tokens)} numbers for {len(given)} sequences: "
            "give one for all, or one for each"
        )
    new, cached = (np.array(each, dtype=np.int64) for each in (given, args.cached_tokens))
    starts = np.broadcast_to(cached, new.shape).copy()
    if (total := int((starts + new).sum())) > MOST_TOKENS:
        raise ValueError(
            f"all sequences together have {total:,} new and cached tokens: give at most "
            f"{MOST_TOKENS:,}"
        )
    return new, starts


def _check(flag: str, value: int, least: int, most: int) -> None:
    if value < least:
        raise ValueError(f"{flag} {value} must be at least {least}")
    if value > most:
        raise ValueError(f"{flag} {value}: give at most {most:,}")

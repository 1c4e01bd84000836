"""The place in the data at which a resumed run goes on, in tokens and in the checkpoint's order.

Megatron counts samples, of as many tokens as `--seq-length` says; and documents are cut into
pieces, by default of a window. A checkpoint's arguments note where in the stream its sample 0 was
and how long its pieces are, so that the run may go on at another sequence length or number of ranks
and still read every token of the stream once.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_patches.flags.batch_sizes import samples_for_evaluation

logger = logging.getLogger(__name__)

NOTED = (
    "seq_length",
    "data_parallel_size",
    "distca_max_document_length",
    "train_stream_start",
    "valid_stream_start",
    "consumed_train_samples",
    "consumed_valid_samples",
    "distca_chain",
)
"""Arguments in a checkpoint that `go_on_from` reads."""


def longest_piece(args: Namespace) -> int:
    """Returns the most tokens of a piece of a document, or of a pack of whole ones."""
    return int(args.distca_max_document_length or _attended(args))


def keeps_whole(args: Namespace) -> bool:
    """Whether documents stay whole."""
    # Checkpoints of versions without them note none.
    return bool(getattr(args, "sft", False) or getattr(args, "distca_whole_documents", False))


def check_packs(args: Namespace, first: int) -> None:
    """Checks that no window cuts a document that must stay whole.

    Args:
        args: Megatron-LM's arguments.
        first: token of the stream at which the next window starts.

    Raises:
        ValueError: one would.
    """
    pack, attended = longest_piece(args), _attended(args)
    if getattr(args, "distca", False):
        # The last chain of a global batch may have fewer micro-batches.
        samples = args.data_parallel_size * args.micro_batch_size
        sizes = {args.global_batch_size, samples_for_evaluation(args)}
        shortest = math.gcd(args.distca_chain, *(size // samples for size in sizes))
        attended = attended // args.distca_chain * shortest
    if attended % pack == 0 and first % pack == 0:
        return
    raise ValueError(
        f"documents stay whole in packs of {pack} tokens, which windows of {attended} tokens"
        + (f" from token {first} of the data on" if first else "")
        + " would cut: give --distca-max-document-length "
        + ("a divisor of both" if first else f"{attended}, or a divisor of it")
    )


def _attended(args: Namespace) -> int:
    """Returns the most tokens that attend to each other: of a window, or of a rank's part of it."""
    if keeps_whole(args) and not getattr(args, "distca", False):
        return int(args.seq_length)
    # Checkpoints of versions without chains note none.
    chain = getattr(args, "distca_chain", 1)
    return int(chain * args.data_parallel_size * args.seq_length)


def go_on_from(saved: Mapping[str, Any], args: Namespace) -> None:
    """Makes the data go on where a checkpoint's ended.

    Sets `train_stream_start` and `valid_stream_start`, the positions of sample 0 in the streams,
    and `distca_max_document_length` where it is not given.

    Args:
        saved: arguments of the checkpoint.
        args: arguments of the run.
    """
    if not saved.get("consumed_train_samples"):
        # Weights alone, as of a conversion.
        return
    # Of all ranks, the first one tells.
    tell = logger.log if args.rank == 0 else lambda *_: None
    if not _is_of_our_data(saved):
        tell(
            logging.WARNING,
            "the checkpoint notes no place in our order of the data, since plain Megatron-LM has "
            "another: some documents may come again, and others be left out",
        )
        return
    was, now = saved["seq_length"], args.seq_length
    for split in ("train", "valid"):
        start, consumed = saved[f"{split}_stream_start"], saved[f"consumed_{split}_samples"]
        setattr(args, f"{split}_stream_start", start + consumed * (was - now))
    if was != now:
        tell(
            logging.INFO,
            "--seq-length was %d, now %d: training goes on at token %d of the stream, where the "
            "checkpoint's ended",
            *(was, now, args.train_stream_start + saved["consumed_train_samples"] * now),
        )
    pieces = longest_piece(Namespace(**saved))
    if args.distca_max_document_length is None:
        args.distca_max_document_length = pieces
    elif args.distca_max_document_length != pieces:
        tell(
            logging.WARNING,
            "documents were cut into pieces of at most %d tokens, now %d, so the rest of the data "
            "comes in another order: --distca-max-document-length %d, or none, keeps it",
            *(pieces, args.distca_max_document_length, pieces),
        )


def _is_of_our_data(saved: Mapping[str, Any]) -> bool:
    # Under Megatron-LM's loop the arguments also exist where --distca was off and the data its own.
    return "train_stream_start" in saved and saved.get("dataloader_type", "external") == "external"

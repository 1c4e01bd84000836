"""The place in the data at which a resumed run goes on, to the token.

Megatron counts samples of `--seq-length` tokens. Documents are cut into pieces, by default of a
window. A checkpoint's arguments note the position of sample 0 in the stream and the length of
pieces. So a run goes on at another sequence length or number of ranks, and reads every token once.
"""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_patches.flags.batch_sizes import BatchSizes
from megatron_patches.flags.config import DistcaConfig

logger = logging.getLogger(__name__)

PLACE = (
    "train_stream_start",
    "valid_stream_start",
    "consumed_train_samples",
    "consumed_valid_samples",
    "iteration",
)
"""Arguments that say where a resumed run goes on."""


def max_document_tokens(config: DistcaConfig, args: Namespace) -> int:
    """Returns the most tokens of a piece of a document, or of a pack of whole ones."""
    return config.documents.max_length or _attended(config, args)


def documents_cross_windows(config: DistcaConfig, args: Namespace) -> bool:
    """Returns whether documents may be longer than the window of a micro-batch.

    Server pools share out the documents of a global batch, whatever their windows are.
    """
    longest, window = config.documents.max_length, args.data_parallel_size * args.seq_length
    return config.pool_size is not None and longest is not None and longest > window


def warn_of_cuts(config: DistcaConfig, args: Namespace) -> None:
    """Warns if documents may be longer than what they are cut at: a window, or those of a chain."""
    longest, attended = max_document_tokens(config, args), _attended(config, args)
    if longest > attended and not documents_cross_windows(config, args):
        logger.warning(
            "documents of up to %d tokens are cut where windows of %d tokens end: give "
            "--distca-pool-size, whose windows they may cross, or a larger --seq-length",
            *(longest, attended),
        )


def check_packs(config: DistcaConfig, args: Namespace, first: int) -> None:
    """Checks that no window cuts a document that must stay whole.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.
        first: token of the stream at which the next window starts.

    Raises:
        ValueError: one would.
    """
    pack, attended = max_document_tokens(config, args), _attended(config, args)
    if documents_cross_windows(config, args):
        sizes = {args.global_batch_size, BatchSizes.from_args(args).evaluated}
        attended = math.gcd(*sizes) * args.seq_length
    elif config.enabled:
        # The last chain of a global batch may have fewer micro-batches.
        samples = args.data_parallel_size * args.micro_batch_size
        sizes = {args.global_batch_size, BatchSizes.from_args(args).evaluated}
        shortest = math.gcd(config.chain, *(size // samples for size in sizes))
        attended = attended // config.chain * shortest
    if attended % pack == 0 and first % pack == 0:
        return
    crosses = documents_cross_windows(config, args)
    windows = "global batches of multiples" if crosses else "windows"
    raise ValueError(
        f"documents stay whole in packs of {pack} tokens, which {windows} of {attended} tokens"
        + (f" from token {first} of the data on" if first else "")
        + " would cut: give --distca-max-document-length "
        + ("a divisor of both" if first else f"{attended}, or a divisor of it")
        + (", or a larger --global-batch-size" if crosses else "")
    )


def _attended(config: DistcaConfig, args: Namespace) -> int:
    """Returns the most tokens that attend to each other: of a window, or of a rank's part of it."""
    if config.documents.whole and not config.enabled:
        return int(args.seq_length)
    return int(config.chain * args.data_parallel_size * args.seq_length)


def _max_document_tokens_of(saved: Mapping[str, Any]) -> int:
    """Returns `max_document_tokens` of a checkpoint's run; older versions note fewer flags."""
    if saved["distca_max_document_length"]:
        return int(saved["distca_max_document_length"])
    whole = saved.get("sft") or saved.get("distca_whole_documents")
    if whole and not saved.get("distca"):
        return int(saved["seq_length"])
    return int(saved.get("distca_chain", 1) * saved["data_parallel_size"] * saved["seq_length"])


def with_max_document_tokens(config: DistcaConfig, args: Namespace, pieces: int) -> DistcaConfig:
    """Returns the configuration with another bound of documents, which checkpoints will note.

    Args:
        config: our flags.
        args: Megatron-LM's arguments, which a checkpoint holds.
        pieces: most tokens of a piece of a document, or of a pack of whole ones.
    """
    # Megatron-LM saves its arguments alone.
    args.distca_max_document_length = pieces
    return replace(config, documents=replace(config.documents, max_length=pieces))


def go_on_from(saved: Mapping[str, Any], config: DistcaConfig, args: Namespace) -> DistcaConfig:
    """Makes the data go on where a checkpoint's ended.

    Sets `train_stream_start` and `valid_stream_start`, the positions of sample 0 in the streams.

    Args:
        saved: arguments of the checkpoint.
        config: our flags.
        args: arguments of the run.

    Returns:
        The configuration, with the checkpoint's bound of documents where none is given.
    """
    if not saved.get("consumed_train_samples"):
        # Weights alone, as of a conversion.
        return config
    # The first rank logs for all.
    log = logger.log if args.rank == 0 else lambda *_: None
    if not _is_of_our_data(saved):
        log(
            logging.WARNING,
            "the checkpoint of plain Megatron-LM has no position in our order of the data: some "
            "documents may repeat, and others may be skipped",
        )
        return config
    was, now = saved["seq_length"], args.seq_length
    for split in ("train", "valid"):
        start, consumed = saved[f"{split}_stream_start"], saved[f"consumed_{split}_samples"]
        setattr(args, f"{split}_stream_start", start + consumed * (was - now))
    if was != now:
        log(
            logging.INFO,
            "--seq-length was %d, now %d: training continues at token %d of the stream, where the "
            "checkpoint ended",
            *(was, now, args.train_stream_start + saved["consumed_train_samples"] * now),
        )
    if bool(saved.get("distca_share_prefixes")) != config.documents.share_prefixes:
        log(
            logging.WARNING,
            "the checkpoint's run was with%s --distca-share-prefixes, so the rest of the data "
            "comes in another order: some conversations may repeat, and others may be skipped",
            "out" if config.documents.share_prefixes else "",
        )
    pieces, given = _max_document_tokens_of(saved), config.documents.max_length
    if given is None:
        return with_max_document_tokens(config, args, pieces)
    if given != pieces:
        log(
            logging.WARNING,
            "documents were cut into pieces of at most %d tokens, now %d, so the rest of the data "
            "comes in another order: --distca-max-document-length %d, or none, keeps it",
            *(pieces, given, pieces),
        )
    return config


def _is_of_our_data(saved: Mapping[str, Any]) -> bool:
    # Under Megatron-LM's loop the arguments also exist where --distca was off and the data its own.
    return "train_stream_start" in saved and saved.get("dataloader_type", "external") == "external"

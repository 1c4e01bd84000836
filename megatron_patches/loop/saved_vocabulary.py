"""Compares a checkpoint's vocabulary with the run's, which pads it for its own parallel size."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megatron_patches.checkpoint_data import read_index

_EMBEDDING = "embedding.word_embeddings.weight"


def check_vocabulary(saved: Namespace, args: Namespace, path: Path) -> None:
    """Refuses a checkpoint whose embedding has another number of rows.

    Megatron-LM would load it and cut rows off, or leave them random. The loss is a softmax over all
    rows, those of the padding included, so it would change.

    Args:
        saved: flags of the run that made it; those of a converter may be none.
        args: flags of this run, and the tokenizer's `vocab_size`.
        path: folder of the checkpoint.

    Raises:
        ValueError: the vocabulary, or its padding, was another.
    """
    if getattr(saved, "tokenizer_type", None) == args.tokenizer_type == "NullTokenizer":
        before, now = saved.vocab_size, args.vocab_size
        # Versions of Megatron-LM differ in whether it counts the end token.
        if before is not None and abs(before - now) > 1:
            raise ValueError(
                f"{path} was trained with a vocabulary of {before} tokens, but this run's has "
                f"{now}: give the --vocab-size that it was trained with"
            )
    padded = getattr(saved, "padded_vocab_size", None) or _rows(path)
    if padded is None or padded == args.padded_vocab_size:
        return
    parallel = args.tensor_model_parallel_size
    raise ValueError(
        f"{path} was trained with a vocabulary padded to {padded} rows, but this run pads it to "
        f"{args.padded_vocab_size}, with which the loss is another: give "
        + (
            f"--make-vocab-size-divisible-by {padded // parallel}"
            if padded % parallel == 0
            else f"a --tensor-model-parallel-size that divides {padded}"
        )
    )


def _rows(checkpoint: Path) -> int | None:
    """Returns the rows of a checkpoint's embedding; None: it has no embedding of that name."""
    size = getattr(read_index(checkpoint).state_dict_metadata.get(_EMBEDDING), "size", None)
    return None if size is None else int(size[0])

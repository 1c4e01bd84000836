"""The documents of a run, of whatever kind the flags name: token files, or a user's own list."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from distca.documents.document_list import ListedDocuments, TokenSource
from megatron_patches.batches.blends import Split, check_blends
from megatron_patches.batches.own_documents import own_documents
from megatron_patches.batches.resuming import keeps_whole, longest_piece
from megatron_patches.batches.stream import Corpus, check_sources


def open_source(args: Namespace, name: str, which: Split) -> TokenSource:
    """Opens a dataset that the flags name.

    Args:
        args: Megatron-LM's arguments.
        name: one of a blend's `prefixes`.
        which: split that is to be read.

    Raises:
        ValueError: it is not there, not as it must be, or of another vocabulary.
    """
    if getattr(args, "distca_documents", None):
        documents = own_documents(args, name, which)
        return ListedDocuments(f"--distca-documents {name}", documents, args.vocab_size)
    return Corpus(name, args.vocab_size)


def check_documents(args: Namespace, splits: Sequence[Split]) -> None:
    """Tries the documents of a run without keeping them.

    Args:
        args: Megatron-LM's arguments, and the tokenizer's `vocab_size`.
        splits: splits that the run would read.

    Raises:
        ValueError: the flags name none, or some that cannot be used.
    """
    check_sources(
        check_blends(args, splits),
        lambda name, which: open_source(args, name, which),
        longest_piece(args) if keeps_whole(args) else None,
    )

"""The documents that the flags name: token files, conversations, or a user's own list."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from functools import cache

from distca.documents.chat import ChatTokenizer
from distca.documents.conversations import Conversations, read_conversations
from distca.documents.document_list import ListedDocuments, TokenSource
from distca.wording import counted
from megatron_patches.batches.blends import Blend, Split, check_blends, sets_of
from megatron_patches.batches.custom_dataset import custom_dataset
from megatron_patches.batches.resuming import check_packs, max_document_tokens
from megatron_patches.batches.shared_conversations import SharedConversations
from megatron_patches.batches.stream import Corpus, TokenStream, check_sources
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.versions import SFT_ENDS_CONVERSATIONS

logger = logging.getLogger(__name__)


def open_source(config: DistcaConfig, args: Namespace, name: str, which: Split) -> TokenSource:
    """Opens a dataset that the flags name.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.
        name: one of a blend's `prefixes`.
        which: split that is to be read.

    Raises:
        ValueError: it is not there, not as it must be, or of another vocabulary.
    """
    documents = config.documents
    if documents.function is not None:
        own = custom_dataset(args, name, which)
        return ListedDocuments(f"--distca-documents {name}", own, args.vocab_size)
    if documents.conversations:
        which_file = name, args.tokenizer_model, args.sft_tokenizer_prompt_format
        if documents.share_prefixes:
            return _shared_conversations(*which_file, max_document_tokens(config, args))
        return _conversations(*which_file)
    return Corpus(name, args.vocab_size)


def open_stream(
    config: DistcaConfig,
    args: Namespace,
    blend: Blend,
    which: Split,
    num_tokens: int | None,
    start: int = 0,
    first: int = 0,
) -> TokenStream:
    """Opens the token stream of a split.

    Args:
        config: our flags.
        args: Megatron-LM's arguments.
        blend: datasets of the split.
        which: split to open.
        num_tokens, start: as for `TokenStream.open`.
        first: token of the stream that is read first.

    Raises:
        ValueError: see `TokenStream.open`; or windows would cut documents that must stay whole.
    """
    if config.documents.whole:
        check_packs(config, args, first)
    return TokenStream.open(
        blend,
        which,
        seed=args.seed,
        num_tokens=num_tokens,
        start=start,
        max_document_length=max_document_tokens(config, args),
        whole=config.documents.whole,
        open_source=lambda name: open_source(config, args, name, which),
    )


# All splits of a run, and the checks before it, read a file once.
@cache
def _conversations(path: str, tokenizer_model: str, prompt_format: str) -> Conversations:
    return read_conversations(path, chat_tokenizer(tokenizer_model, prompt_format))


@cache
def _shared_conversations(
    path: str, tokenizer_model: str, prompt_format: str, most: int
) -> SharedConversations:
    found = SharedConversations(_conversations(path, tokenizer_model, prompt_format), most)
    logger.info(
        "--distca-share-prefixes: the conversations of %s are %s, with %.2f times fewer tokens",
        *(path, counted(len(found.lengths), "tree"), found.saved),
    )
    return found


@cache
def chat_tokenizer(tokenizer_model: str, prompt_format: str) -> ChatTokenizer:
    """Loads the tokenizer of `--tokenizer-type SFTTokenizer`, once.

    Args:
        tokenizer_model: its folder.
        prompt_format: format of Megatron-LM's that conversations have.

    Raises:
        ValueError: see `ChatTokenizer`.
    """
    return ChatTokenizer(tokenizer_model, prompt_format, SFT_ENDS_CONVERSATIONS)


def check_documents(config: DistcaConfig, args: Namespace, splits: Sequence[Split]) -> None:
    """Tries the documents of a run without keeping them.

    Args:
        config: our flags.
        args: Megatron-LM's arguments, and the tokenizer's `vocab_size`.
        splits: splits that the run would read.

    Raises:
        ValueError: the flags name none, or some that cannot be used.
    """
    blends = check_blends(config.documents, args, splits)
    if config.documents.whole:
        check_packs(config, args, 0)
    if "valid" in blends:
        sets_of(args, blends["valid"])
    check_sources(
        blends,
        lambda name, which: open_source(config, args, name, which),
        max_document_tokens(config, args) if config.documents.whole else None,
    )

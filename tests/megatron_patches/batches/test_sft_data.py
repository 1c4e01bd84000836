"""Conversations as `--sft` reads them, against Megatron-LM's own, where the wheel has that."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distca.documents.chat import PROMPT_FORMATS
from megatron_patches.batches.dataset_factory import open_source
from megatron_patches.flags.config import DistcaConfig, DocumentsConfig
from support.arguments import parse
from support.chats import save_tokenizer, some_conversations, write_lines

LENGTH = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def sft_arguments(folder: str, prompt_format: str) -> Namespace:
    return Namespace(
        sft=True, tokenizer_model=folder, sft_tokenizer_prompt_format=prompt_format, vocab_size=300
    )


@pytest.mark.parametrize("prompt_format", [each for each in PROMPT_FORMATS if each != "default"])
def test_tokens_and_masks_are_megatron_lm_s(folder, tmp_path, prompt_format: str) -> None:
    """Its samples are lines, of conversations one after the other and padding."""
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core's wheel has no megatron.training: 0.17 is the first one")
    from megatron.core.tokenizers.text.libraries import SFTTokenizer
    from megatron.training.datasets.sft_dataset import SFTDataset

    if not hasattr(SFTTokenizer, "_extract_token_ids"):
        pytest.skip("this Megatron-LM's SFTTokenizer cannot read what transformers 5 returns")
    lines = some_conversations(20)
    source = open_source(
        DistcaConfig(documents=DocumentsConfig(conversations=True)),
        sft_arguments(folder, prompt_format),
        write_lines(tmp_path / "t.jsonl", lines),
        "train",
    )
    theirs = SFTTokenizer(folder, prompt_format)
    dataset: Any = SFTDataset.__new__(SFTDataset)
    tokenizer = SimpleNamespace(
        tokenize_conversation=theirs.tokenize_conversation, eod=theirs.eod, pad=theirs.pad_id
    )
    dataset.config = SimpleNamespace(
        tokenizer=tokenizer,
        sequence_length=LENGTH,
        context_parallel_size=1,
        reset_position_ids=False,
        create_attention_mask=False,
        reset_attention_mask=False,
    )
    dataset.dataset, dataset.indices = lines, np.arange(len(lines))
    document = 0
    for number, line in enumerate(lines):
        sample = dataset[number]
        at = 0
        for _ in range(sum(message["role"] == "system" for message in line)):
            length = int(source.lengths[document])
            assert sample["tokens"][at : at + length].tolist() == (
                source.read(document, 0, length).tolist()
            )
            weights = source.loss_weights(document, 1, length)
            assert weights is not None
            # At its last token Megatron-LM predicts what comes after the conversation.
            mask = sample["loss_mask"][at : at + length - 1]
            assert mask.tolist() == weights.tolist()
            at, document = at + length, document + 1
        assert (sample["tokens"][at:] == theirs.pad_id).all()
    assert document == len(source.lengths)


def test_flags_of_fine_tuning(folder) -> None:
    with pytest.raises(ValueError, match="--sft needs --tokenizer-type SFTTokenizer"):
        parse("--sft")
    flags = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", folder]
    assert parse(*flags).sft_tokenizer_prompt_format == "nemotron-h-aligned"
    with pytest.raises(ValueError, match="remove one"):
        parse(*flags, "--distca-documents", "a:b")

"""Models of Hugging Face that `distca convert` has converted."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

from support.ranks import forget_megatron


def add_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes a tokenizer with a given number of words."""
    import tokenizers

    words = {"</s>": 0} | {f"w{i}": i for i in range(1, vocabulary)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "</s>")).save(
        str(folder / "tokenizer.json")
    )


def convert(*arguments: object) -> None:
    """Runs the command in this process, and undoes Megatron's state."""
    from megatron_patches.convert.__main__ import main

    try:
        assert main([str(each) for each in arguments]) == 0
    finally:
        forget_megatron()


def converted_logits(folder: Path, work: Path, tokens: list[int]) -> torch.Tensor:
    """Converts a model of Hugging Face, and runs the model that its checkpoint loads into.

    Returns:
        The logits without those of padding, float32 `[tokens, vocabulary]`.
    """
    from distca.checkpoints.weights import Checkpoint
    from distca.documents.tokenizer import build_tokenizer
    from megatron_patches.convert.model import build_model, flags_of, model_logits, parse_model
    from megatron_patches.families.flags import run_flags, vocabulary_flags
    from megatron_patches.parts import load_weights

    convert(folder, "--to", work / "checkpoint", "--float32")
    config = Checkpoint.read(str(folder)).config
    flags = flags_of(config) + run_flags(folder, config)
    words = build_tokenizer("HuggingFaceTokenizer", str(folder)).vocab_size
    args = parse_model(flags + vocabulary_flags(words, config.vocab_size), bf16=False)
    model = build_model(args)
    load_weights(model, args, work / "checkpoint")
    found = model_logits(model, tokens)[:, : config.vocab_size]
    forget_megatron()
    return found


def refused(*arguments: object) -> str:
    """Runs a command that must fail, and returns the line that says why."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), pytest.raises(SystemExit) as ended:
        convert(*arguments)
    assert ended.value.code == 2
    return told.getvalue().splitlines()[-1]

"""Llamas of Hugging Face that the training command has imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from support.ranks import forget_megatron


def add_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes a tokenizer of so many words."""
    import tokenizers

    words = {"</s>": 0} | {f"w{i}": i for i in range(1, vocabulary)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "</s>")).save(
        str(folder / "tokenizer.json")
    )


def imported_logits(llama: Path, work: Path, tokens: list[int]) -> torch.Tensor:
    """Imports a Llama, and runs the model that its checkpoint loads into.

    Returns:
        The logits without those of padding, float32 `[tokens, vocabulary]`.
    """
    from megatron_patches import llama as converter
    from megatron_patches.batches.micro_batch import document_params
    from megatron_patches.parts import load_weights

    checkpoint = ["--checkpoint", str(work / "checkpoint")]
    assert converter.main(["import", "--llama", str(llama), *checkpoint, "--float32"]) == 0
    forget_megatron()
    config = converter.read_checkpoint(llama).config
    model, args = converter.build_llama(llama, config, bf16=False)
    load_weights(model, args, work / "checkpoint")
    model.eval()
    positions = torch.arange(len(tokens))[None]
    params = document_params(np.array([len(tokens)]), as_one_sequence=True)
    with torch.no_grad():
        out = model(torch.tensor([tokens]), positions, None, packed_seq_params=params)
    forget_megatron()
    return out.reshape(len(tokens), -1)[:, : config.vocab_size]

"""Logits of Megatron's model and of transformers' on a sample of text."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distca.checkpoints.stored_weights import abbreviated
from distca.checkpoints.weights import Checkpoint
from distca.commands.convert import token_ids
from distca.documents.tokenizer import build_tokenizer
from megatron_patches.convert.model import model_logits
from megatron_patches.convert.weights import by_their_names, pad_vocabulary
from megatron_patches.families.bridges import bridge_of
from megatron_patches.parts import load_weights

TOLERANCE = 1e-4
"""Greatest difference of logits that rounding in float32 explains, as a part of their spread."""


@dataclass(frozen=True)
class Compared:
    """Logits of two models that should be one.

    Attributes:
        tokens: number of tokens of the sample.
        difference: greatest difference of two logits.
        spread: standard deviation of transformers' logits.
        cause: what else differs, where the logits do; else empty.
    """

    tokens: int
    difference: float
    spread: float
    cause: str = ""

    @property
    def equal(self) -> bool:
        """Whether rounding in float32 explains the difference."""
        return self.difference <= TOLERANCE * self.spread


def sample_tokens(sample: str, tokenizer_model: str | None, vocabulary: int) -> list[int]:
    """Returns the tokens of a sample.

    Args:
        sample: text, or token ids with commas between them.
        tokenizer_model: a tokenizer.json or its folder; None: only ids can be given.
        vocabulary: number of tokens that the model has.

    Raises:
        ValueError: there is no token, or one that the model lacks, or no tokenizer for a text.
    """
    tokens = token_ids(sample)
    if tokens is None:
        if tokenizer_model is None:
            raise ValueError(
                f"--check {sample[:40]!r} is text, and the model has no tokenizer.json: give ids "
                f"below {vocabulary} with commas between them"
            )
        tokens = build_tokenizer("HuggingFaceTokenizer", tokenizer_model).tokenize(sample)
    if not tokens or max(tokens) >= vocabulary:
        raise ValueError(
            f"--check {sample[:40]!r} gives {max(tokens, default='no')} as a token: give text, or "
            f"ids below {vocabulary} with commas between them"
        )
    return tokens


def compare_on_sample(
    sample: str, folder: Path, checkpoint: Path, model: Any, args: Namespace
) -> Compared:
    """Compares the models that a checkpoint and a folder of Hugging Face load into, in float32.

    Args:
        sample: text, or token ids with commas between them.
        folder: folder of the model of Hugging Face.
        checkpoint: folder of Megatron's checkpoints.
        model: Megatron's model, whose weights are overwritten.
        args: its arguments.

    Raises:
        ValueError: the sample is empty, or one of the two cannot be loaded.
    """
    source = Checkpoint.read(str(folder))
    vocabulary = source.config.vocab_size
    tokens = sample_tokens(sample, str(folder), vocabulary)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float("nan"))
        load_weights(model, args, checkpoint)
        found = model_logits(model.float(), tokens)[:, :vocabulary].float().cpu()
        wanted = _logits(source, args, tokens)
    compared = Compared(len(tokens), _difference(found, wanted), float(wanted.std()))
    if compared.equal:
        return compared
    if names := _different_weights(model, source, args):
        return replace(compared, cause=f"different weights: {abbreviated(names)}")
    # Weights are equal, so that one of the two computes otherwise.
    ours = model_logits(model, tokens)[:, :vocabulary].float().cpu()
    with torch.no_grad():
        theirs = _logits(source, args, tokens)
    again = _difference(ours, found), _difference(theirs, wanted)
    return replace(
        compared,
        cause="all weights are equal; computed once more, Megatron's logits differ by "
        f"{again[0]:.1e} from its first ones, transformers' by {again[1]:.1e}",
    )


def _logits(source: Checkpoint, args: Namespace, tokens: list[int]) -> torch.Tensor:
    """Returns transformers' logits, `[tokens, vocabulary]`."""
    # As wide as the checkpoint's weights, and then computed in float32, too.
    reference = source.load(args.params_dtype).float().eval()
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    # NaN is no difference at all to max().
    return float((found - wanted).abs().nan_to_num(torch.inf).max())


def _different_weights(model: Any, source: Checkpoint, args: Namespace) -> list[str]:
    """Returns names of the weights that the two have not in common to the bit."""
    bridge = bridge_of(source.config, args.params_dtype)
    pad_vocabulary(bridge, args)
    with source.opened(args.params_dtype) as tensors:
        return [
            name
            for name, weight in by_their_names(model, bridge)
            if not torch.equal(weight, tensors[name][:].to(weight))
        ]

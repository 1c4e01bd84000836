"""From Hugging Face to a checkpoint that training loads."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distca.checkpoints.weights import Checkpoint
from distca.documents.tokenizer import build_tokenizer
from megatron_patches.convert.folder import check_fillable, filled_whole
from megatron_patches.convert.model import build_model, flags_of, parse_model
from megatron_patches.convert.sample import sample_tokens
from megatron_patches.convert.weights import copy_in, pad_vocabulary
from megatron_patches.families.bridges import bridge_of
from megatron_patches.families.flags import run_flags, vocabulary_flags
from megatron_patches.loop.checkpoint_folder import TRACKER, latest_iteration
from megatron_patches.parts import save_weights

logger = logging.getLogger(__name__)


def to_megatron(
    folder: Path,
    checkpoint: Path,
    bf16: bool,
    told: Callable[[str], None] = lambda doing: None,
    sample: str | None = None,
) -> tuple[list[str], Any, Namespace]:
    """Writes a checkpoint of iteration 0 with the weights of a model of Hugging Face.

    Must run in a fresh process, in which it starts a process group of one.

    Args:
        folder: folder of weights, `config.json` and `tokenizer.json`.
        checkpoint: folder for `--load`, which has no checkpoint yet.
        bf16: keep weights in bfloat16, else in float32.
        told: function that is called with what is being done.
        sample: sample that the model must have the tokens of; None: no sample.

    Returns:
        The flags that describe the model, for `pretrain_gpt.py`; Megatron's model; its arguments.

    Raises:
        ValueError: the model cannot be converted, or the folder does not have exactly the weights
            of its configuration, or the tokenizer is of another model; or there is a checkpoint
            already, or none can be written; or the model lacks a token of the sample.
    """
    check_fillable(checkpoint)
    if latest_iteration(checkpoint) is not None:
        raise ValueError(f"--to {checkpoint} has a checkpoint already: give another folder")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give that of a model of transformers")
    source = Checkpoint.read(str(folder))
    if getattr(source.multimodal or source.config, "quantization_config", None):
        raise ValueError(
            f"{folder} has quantized weights, which are not converted: give a model in bfloat16"
        )
    flags = flags_of(source.config)
    if left_out := source.check():
        logger.warning("%s: %s left out, which training does not run", folder, ", ".join(left_out))
    tokens = build_tokenizer("HuggingFaceTokenizer", str(folder)).vocab_size
    flags += vocabulary_flags(tokens, source.config.vocab_size)
    if sample is not None:
        sample_tokens(sample, str(folder), source.config.vocab_size)
    args = parse_model(flags + run_flags(folder, source.config), bf16)
    model = build_model(args)
    bridge = bridge_of(source.config, args.params_dtype)
    pad_vocabulary(bridge, args)
    told("reading the weights")
    with source.opened(args.params_dtype) as tensors:
        copy_in(tensors, model, bridge)
    told("writing the checkpoint")
    with filled_whole(checkpoint, TRACKER) as written:
        try:
            save_weights(model, args, written)
        except ValueError as error:
            said = str(error).replace(str(written), str(checkpoint))
            raise ValueError(f"{said}; --to {checkpoint} stays as it was") from error
    return flags, model, args

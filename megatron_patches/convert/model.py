"""Megatron's model that flags describe, whole and on one process."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patches import parts
from megatron_patches.batches.micro_batch import document_params
from megatron_patches.families.flags import model_flags


def flags_of(config: Any) -> list[str]:
    """Returns the flags of a model's architecture; see `model_flags`."""
    return model_flags(config, parts.build_parser())


def parse_model(flags: list[str], bf16: bool) -> Namespace:
    """Parses and checks the flags of a model.

    Args:
        flags: flags of `pretrain_gpt.py` for the model and its tokenizer.
        bf16: make weights in bfloat16, else in float32.

    Raises:
        ValueError: they describe no model that training runs.
    """
    flags = flags + ["--bf16"] * bf16
    # Flags that a run requires, and that the weights don't depend on.
    flags += "--seq-length 128 --micro-batch-size 1 --train-iters 1 --lr 1 --data-path -".split()
    flags += ["--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"]
    flags += ["--attention-dropout", "0", "--hidden-dropout", "0", "--split", "100,0,0"]
    return parts.parse_args(flags)


def build_model(args: Namespace) -> Any:
    """Makes a model with random weights.

    Must run in a fresh process, in which it starts a process group of one.

    Args:
        args: arguments that `parse_model` returned; gets the vocabulary's padded size.
    """
    if not dist.is_initialized():
        dist.init_process_group(
            args.distributed_backend,
            rank=0,
            world_size=1,
            store=dist.HashStore(),  # type: ignore[attr-defined]
        )
    parts.initialize(args)
    return parts.build_model(args)


@torch.no_grad()
def model_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Returns a model's logits of one document, `[tokens, padded vocabulary]`.

    Args:
        model: model that `build_model` returned.
        tokens: the document.
    """
    model.eval()
    positions = torch.arange(len(tokens))[None]
    params = document_params(np.array([len(tokens)]), as_one_sequence=True)
    out = model(torch.tensor([tokens]), positions, None, packed_seq_params=params)
    logits: torch.Tensor = out.reshape(len(tokens), -1)
    return logits

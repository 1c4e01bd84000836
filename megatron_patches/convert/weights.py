"""Weights of Megatron's model by transformers' names, in and out, by mbridge's tables."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from distca.checkpoints.stored_weights import StoredTensor


def pad_vocabulary(bridge: Any, args: Namespace) -> None:
    """Lets a bridge pad embeddings as a model's are, and cut what is padded.

    Args:
        bridge: bridge of the model.
        args: arguments of the model, with the vocabulary's padded size.
    """
    bridge.vocab_size = bridge.hf_config.vocab_size
    bridge.padded_vocab_size = args.padded_vocab_size
    bridge.make_vocab_size_divisible_by = args.make_vocab_size_divisible_by


@torch.no_grad()
def copy_in(tensors: Mapping[str, StoredTensor], model: Any, bridge: Any) -> None:
    """Copies a checkpoint's tensors into a model, one after the other.

    Args:
        tensors: tensors by transformers' names, which are those of the model.
        model: whole model, on one process. Its vocabulary may be padded: padding becomes zero.
        bridge: bridge of the model, after `pad_vocabulary`.
    """
    used: set[str] = set()
    for name, weight in _named_weights(model):
        sources = bridge.sources(name)
        used.update(sources)
        parts = [bridge.read(name, tensors[each]) for each in sources]
        found = bridge._weight_to_mcore_format(name, parts)
        assert found.shape == weight.shape, name
        weight.copy_(found)
    assert used == {*tensors}, {*tensors} - used


def by_their_names(model: Any, bridge: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Gives a model's weights by transformers' names, as `copy_in` takes them.

    Norms, which may be float32 on one process, have the bridge's type. So has all else but the
    biases of experts' scores, which are float32.

    Args:
        model: whole model, on one process.
        bridge: bridge of the model, after `pad_vocabulary`.
    """
    for name, weight in _named_weights(model):
        if not name.endswith(".expert_bias"):
            weight = weight.detach().to(bridge.dtype)
        yield from zip(*bridge._weight_to_hf_format(name, weight), strict=True)


def _named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Gives all weights by their names in Transformer Engine's layers, which mbridge reads."""
    yield from ((_of_engine(name, model), each) for name, each in model.named_parameters())
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer


def _of_engine(name: str, model: Any) -> str:
    """Returns what a weight of a local layer is called in Transformer Engine's layers.

    There norms belong to the linear layers behind them, and experts are weights of one layer.
    """
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is None:
        return name
    latents = model.config.multi_latent_attention
    has_experts = hasattr(model.decoder.layers[int(layer[1])].mlp, "router")
    moved = {
        ".self_attention.q_layernorm.": ".self_attention.linear_q_up_proj.layer_norm_",
        ".self_attention.kv_layernorm.": ".self_attention.linear_kv_up_proj.layer_norm_",
    }
    if not latents:
        moved = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_"}
    if not has_experts:
        moved[".pre_mlp_layernorm."] = ".mlp.linear_fc1.layer_norm_"
    for local, theirs in moved.items():
        name = name.replace(local, theirs)
    return re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d)\.(\w+)$", r".\2.\3\1", name)

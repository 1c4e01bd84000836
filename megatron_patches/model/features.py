"""What a spec of `--spec` asks of the model around its layers, which Megatron has no flags for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec

from distca.plan import LayerMasks
from megatron_patches.model.given_layers import given_spec

KEY = "distca_features"
"""Name of a spec's features in its `metainfo`."""


@dataclass(frozen=True)
class Features:
    """What layers of a family need beside Megatron's flags.

    Attributes:
        score_cap: bound of attention's scores `s`, which become `cap * tanh(s / cap)`, or None.
        logit_cap: bound of the model's logits, likewise, or None.
        scores_by: what attention's scores are divided by the root of: the elements of a head, or
            the hidden size divided by the number of heads.
        local_rotary_base: rotary base of layers with a window; None: that of all layers.
        scales_embeddings: whether embeddings are multiplied by the root of the hidden size.
    """

    score_cap: float | None = None
    logit_cap: float | None = None
    scores_by: Literal["head", "hidden size"] = "head"
    local_rotary_base: int | None = None
    scales_embeddings: bool = True

    def softmax_scale(self, sizes: Any) -> float:
        """Returns the factor of attention's scores.

        Args:
            sizes: what has `kv_channels`, `hidden_size` and `num_attention_heads`.
        """
        head = sizes.kv_channels
        if self.scores_by == "hidden size":
            head = sizes.hidden_size / sizes.num_attention_heads
        return float(head**-0.5)


def features_of(args: Namespace) -> Features | None:
    """Returns what the spec of `--spec` asks for; None: nothing, or there is none.

    Raises:
        ValueError: the spec cannot be used; see `given_spec`.
    """
    words: Sequence[str] | None = args.spec
    if words is None:
        return None
    spec = given_spec(words)
    found: Features | None = spec.metainfo.get(KEY) if isinstance(spec, ModuleSpec) else None
    return found


def check_features(args: Namespace) -> None:
    """Refuses a spec of `--spec` that cannot be used, and flags that its features do not follow.

    Raises:
        ValueError: there are such flags, or the spec cannot be used.
    """
    features = features_of(args)
    if features is None:
        return
    flag = f"--spec {' '.join(args.spec)}"
    if args.transformer_impl != "local":
        raise ValueError(f"{flag}: its layers are local ones: add --transformer-impl local")
    if not args.swiglu:
        raise ValueError(f"{flag}: its layers have gates: add --swiglu")
    for name, remedy in (
        ("add_bias_linear", "its layers have no biases: add --disable-bias-linear"),
        ("num_experts", "its layers have no experts: remove --num-experts"),
        ("apply_query_key_layer_scaling", "remove --apply-query-key-layer-scaling"),
        ("fp16", "attention's scores need more range: give --bf16"),
    ):
        if getattr(args, name, None):
            raise ValueError(f"{flag}: {remedy}")
    if features.local_rotary_base is not None and args.position_embedding_type != "rope":
        raise ValueError(f"{flag}: it has two rotary bases: add --position-embedding-type rope")


def add_features(model: GPTModel, features: Features, masks: LayerMasks) -> None:
    """Makes embeddings, rotary bases and logits of a stage of a GPT model those of a family.

    Args:
        model: the stage.
        features: features of the family.
        masks: masks of the model's layers.
    """
    if features.local_rotary_base is not None:
        for layer in model.decoder.layers:
            mask = masks.of_layer(layer.layer_number - 1)
            layer.self_attention.rotary_base = int(mask.window_left is not None)
    if features.scales_embeddings and model.pre_process:
        # Rounded as transformers has it, which rounds it as weights are.
        rounded = torch.tensor(model.config.hidden_size**0.5, dtype=model.config.params_dtype)
        factor = float(rounded)
        model.embedding.word_embeddings.register_forward_hook(
            lambda module, inputs, rows: rows * factor
        )
    cap = features.logit_cap
    if cap is not None and model.post_process:

        def bounded(module: Any, inputs: Any, outputs: Any) -> Any:
            logits, *others = outputs
            return (torch.tanh(logits / cap) * cap, *others)

        model.output_layer.register_forward_hook(bounded)

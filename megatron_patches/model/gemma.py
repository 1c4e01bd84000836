"""Layers of Gemma 2 and 3 for `--spec`, which `distca convert` prints.

They are Megatron's local layers with a norm behind attention and another behind the MLP, and with
GELU in its gates. What else the families have is in `Features`: `--apply-layernorm-1p`,
`--window-size` and `--qk-layernorm` say the rest.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_patches.model.features import KEY, Features
from megatron_patches.model.norms import SequenceParallelNorm


class NormedAttention(SelfAttention):
    """Megatron's attention with a norm behind it, and with the features of a family.

    Raises:
        ValueError: core attention is not DistCA's, which alone has all features.
    """

    def __init__(self, config: Any, *args: Any, features: Features, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if type(self.core_attention) is DotProductAttention:
            raise ValueError(
                "layers of Gemma need DistCA's core attention and embeddings: run DistCA's "
                "pretrain_gpt.py, or add --distca"
            )
        self.core_attention.softmax_scale = features.softmax_scale(config)
        self.post_layernorm = SequenceParallelNorm(
            config, config.hidden_size, config.layernorm_epsilon
        )
        # Which of two rotary bases is this layer's is known to the model; see `add_features`.
        self.rotary_base: int | None = None

    def forward(
        self, *args: Any, rotary_pos_emb: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Computes attention; arguments are those of Megatron's.

        With two rotary bases `rotary_pos_emb` holds the angles of layers without a window and
        behind them those of layers with one, `[tokens, 1, 1, 2 * rotary_dim]`.
        """
        if self.rotary_base is not None:
            assert rotary_pos_emb is not None
            rotary_pos_emb = rotary_pos_emb.chunk(2, dim=-1)[self.rotary_base].contiguous()
        out, bias = super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)
        assert bias is None
        return self.post_layernorm(out), None


class NormedGeluMLP(MLP):
    """Megatron's MLP with a norm behind it, whose gates have GELU as tanh approximates it."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # The forward pass reads both from here, and other layers share the other configuration.
        self.config = copy.copy(config)
        self.config.activation_func = partial(torch.nn.functional.gelu, approximate="tanh")
        self.config.bias_activation_fusion = False
        self.activation_func = self.config.activation_func
        self.post_layernorm = SequenceParallelNorm(
            config, config.hidden_size, config.layernorm_epsilon
        )

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Computes the MLP; arguments are those of Megatron's."""
        out, bias = super().forward(*args, **kwargs)
        assert bias is None
        return self.post_layernorm(out), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describes the weights for checkpoints; arguments are those of Megatron's."""
        found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        # Megatron's MLP forgets that tensor-parallel ranks have the same norm.
        whole = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        norm = f"{prefix}post_layernorm."
        return {
            name: whole[name] if name.startswith(norm) else each for name, each in found.items()
        }


def layer_spec(features: Features, *, qk_norms: bool) -> ModuleSpec:
    """Returns the spec of a layer.

    Args:
        features: features of the family.
        qk_norms: whether queries and keys have norms, as `--qk-layernorm` says.
    """
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norms)
    layer, attention = spec.submodules, spec.submodules.self_attention
    layer.input_layernorm = layer.pre_mlp_layernorm = SequenceParallelNorm
    attention.module = NormedAttention
    attention.params = {**attention.params, "features": features}
    if qk_norms:
        attention.submodules.q_layernorm = SequenceParallelNorm
        attention.submodules.k_layernorm = SequenceParallelNorm
    parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if hasattr(MLP, "as_mlp_submodule"):
        layer.mlp = partial(NormedGeluMLP.as_mlp_submodule, submodules=parts)
    else:
        layer.mlp = ModuleSpec(module=NormedGeluMLP, submodules=parts)
    spec.metainfo = {KEY: features}
    return spec


GEMMA2 = layer_spec(Features(score_cap=50.0, logit_cap=30.0), qk_norms=False)
"""A layer of Gemma 2, but of the model with 27 billion parameters."""

GEMMA2_27B = layer_spec(
    Features(score_cap=50.0, logit_cap=30.0, scores_by="hidden size"), qk_norms=False
)
"""A layer of the Gemma 2 with 27 billion parameters."""

GEMMA3 = layer_spec(Features(local_rotary_base=10000), qk_norms=True)
"""A layer of Gemma 3, but of the model with 27 billion parameters."""

GEMMA3_27B = layer_spec(Features(scores_by="hidden size", local_rotary_base=10000), qk_norms=True)
"""A layer of the Gemma 3 with 27 billion parameters."""

"""Small models of transformers with random weights, one of each family that is served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import AutoModel, PreTrainedConfig


VOCABULARY = 260
WINDOW = 24

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "phi3": ("Phi3Config", {"sliding_window": None, "pad_token_id": 0, "eos_token_id": 1}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
            # So small that it matters.
            "attn_logit_softcapping": 0.5,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def save_small_model(
    family: str,
    folder: Path,
    end: int | None = None,
    *,
    draws_norms: bool = False,
    **changes: object,
) -> Path:
    """Writes a model of a family, the same one each time, and returns its folder.

    Args:
        family: `model_type` of the family.
        folder: folder in which that of the model is made.
        end: token that ends an answer, or None.
        draws_norms: whether weights of norms are random, too, rather than those of a new model.
        changes: other values of its configuration.
    """
    import transformers

    name, special = FAMILIES[family]
    config = getattr(transformers, name)(**SIZES | special | changes)
    kind = transformers.AutoModelForCausalLM
    return save_model(kind, config, folder / family, end, draws_norms)


def save_model(
    kind: type[AutoModel],
    config: PreTrainedConfig,
    folder: Path,
    end: int | None = None,
    draws_norms: bool = False,
) -> Path:
    """Writes a model with random weights, and returns its folder.

    Args:
        kind: class of transformers that makes it.
        config: its configuration.
        folder: its folder.
        end: token that ends an answer, or None for random tokens.
        draws_norms: see `save_small_model`.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = kind.from_config(config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1 or name.endswith(("bias", "sinks")):
                # Large enough that tokens differ, and small enough that float32 stays exact.
                weight.normal_(0, 0.08)
        for name, weight in model.named_parameters():
            if draws_norms and name.endswith("norm.weight"):
                weight.uniform_(-0.5, 1.5)
    model.generation_config.eos_token_id = end
    # Each rank writes its own folder, where transformers would write on rank 0 alone.
    model.should_save_on_this_rank = lambda is_main_process: True
    model.save_pretrained(folder)
    return folder

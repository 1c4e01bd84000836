"""Small models of the families that `distca convert` knows, with random weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from support.converted import add_tokenizer

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LATENT_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8},
    "original_max_position_embeddings": 4096,
}
# The root of the hidden size is no number of bfloat16.
_GEMMA = {"hidden_size": 96, "head_dim": 16, "sliding_window": 48, "tie_word_embeddings": True}
TWO_BASES = {
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "full_attention": {"rope_theta": 500000.0, "rope_type": "default"},
}
_GEMMA3 = _GEMMA | {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": TWO_BASES,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 24}),
    "llama, scaled RoPE": ("LlamaConfig", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "llama, tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama, padded vocabulary": ("LlamaConfig", {"vocab_size": 320}),
    "mistral": ("MistralConfig", {"head_dim": 24, "sliding_window": None}),
    "mistral, sliding windows": ("MistralConfig", {"sliding_window": 48}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, tied embeddings": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2, sliding windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen3, YaRN": ("Qwen3Config", {"rope_parameters": YARN}),
    "phi3": ("Phi3Config", {"hidden_size": 96, "num_attention_heads": 4, "sliding_window": 48}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24},
            **{"sliding_window": 48, "rope_parameters": YARN | {"truncate": False}},
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _EXPERTS | {"shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe, a dense layer": (
        "Qwen3MoeConfig",
        _EXPERTS | {"head_dim": 24, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        _GROUPS
        | {
            **{"head_dim": 24, "use_qk_norm": True, "attention_bias": True},
            **{"n_group": 1, "topk_group": 1, "n_shared_experts": 2},
            "rope_parameters": {
                **{"rope_theta": 500000.0, "rope_type": "default"},
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "glm4_moe, without QK norm": (
        "Glm4MoeConfig",
        _GROUPS | {"head_dim": 16, "use_qk_norm": False, "attention_bias": False},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        _GROUPS
        | _LATENTS
        | {
            **{"topk_method": "group_limited_greedy", "num_experts_per_tok": 2},
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v2, greedy top-k": (
        "DeepseekV2Config",
        _GROUPS
        | _LATENTS
        | {"topk_method": "greedy", "norm_topk_prob": False, "rope_parameters": _LATENT_YARN},
    ),
    "deepseek_v2, uncompressed queries": (
        "DeepseekV2Config",
        _GROUPS
        | _LATENTS
        | {
            **{"topk_method": "greedy", "norm_topk_prob": False, "q_lora_rank": None},
            "rope_parameters": _LATENT_YARN,
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", _GROUPS | _LATENTS),
    "deepseek_v3, YaRN": (
        "DeepseekV3Config",
        _GROUPS | _LATENTS | {"rope_parameters": _LATENT_YARN},
    ),
    "deepseek_v3, uncompressed queries": (
        "DeepseekV3Config",
        _GROUPS | _LATENTS | {"q_lora_rank": None},
    ),
    "gemma2": ("Gemma2Config", _GEMMA | {"query_pre_attn_scalar": 16}),
    "gemma2, `query_pre_attn_scalar` = hidden size / heads": (
        "Gemma2Config",
        _GEMMA | {"query_pre_attn_scalar": 24},
    ),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA3 | {"query_pre_attn_scalar": 16}),
    "gemma3_text, scaled RoPE; `query_pre_attn_scalar` = hidden size / heads": (
        "Gemma3TextConfig",
        _GEMMA3
        | {
            "query_pre_attn_scalar": 24,
            "rope_parameters": TWO_BASES
            | {
                "full_attention": {
                    "rope_theta": 500000.0,
                    "rope_type": "linear",
                    "factor": 8.0,
                }
            },
        },
    ),
}
"""Cases by name: class of the configuration, and what differs from all others' sizes."""


def small_config(case: str, **changes: Any) -> Any:
    """The configuration of a case, with other values."""
    import transformers

    name, own = CONFIGS[case]
    # transformers adds to the dictionaries that it is given.
    return getattr(transformers, name)(**copy.deepcopy(_SIZES | own | changes))


def save_family(case: str, folder: Path) -> Any:
    """Saves a small model with a tokenizer, as transformers does, and returns it."""
    import transformers

    torch.manual_seed(1)
    config = small_config(case)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms of all ones would hide one that is mistaken for another. Gemma's differ from 1.
            norm = "norm" in name
            middle = float(norm and "gemma" not in case)
            weight.copy_((0.3 if norm else 0.1) * torch.randn(weight.shape) + middle)
            if "gemma" in case and "q_proj" in name:
                # Scores so large that a soft cap matters.
                weight.mul_(4)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.copy_(0.1 * torch.randn(buffer.shape))
    model.save_pretrained(folder)
    add_tokenizer(folder, 301)
    if "gemma" in case:
        # Else transformers takes the tokenizer for one of Gemma's own kind.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model

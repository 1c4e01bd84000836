"""Models of transformers that call no attention but their own."""

from __future__ import annotations

from typing import Any

import torch

from distca.library import AttentionShape, Planner
from distca.library import hugging_face as hf
from support.differing_ranks import LENGTHS
from support.library_loops import BLOCK, config, documents
from support.refused_rollouts import message_of


def _ignoring_masks(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention over all tokens."""
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2), None


def loss_of_another_attention() -> dict[str, str]:
    """What a model says that calls no attention but its own, and one of ours."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("ignores_masks", _ignoring_masks)
    hf.register()
    sizes = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    found = {}
    for name in ("gpt_neox_japanese", "ignores masks", "llama"):
        own = name == "gpt_neox_japanese"
        of_model = config(name if own else "llama", **sizes, **(none if own else {}))
        kind = "ignores_masks" if name == "ignores masks" else hf.IMPLEMENTATION
        model = AutoModelForCausalLM.from_config(of_model, attn_implementation=kind)
        # Without `planner_arguments`, which would refuse it.
        made = Planner(AttentionShape(4, 4, 16, 4), block=BLOCK)
        for step in range(2):
            batch = made.place(documents(0, LENGTHS))
            found[f"{name} {step}"] = message_of(lambda: model(**hf.inputs_of(batch)).loss)  # noqa: B023
        made.close()
    return found

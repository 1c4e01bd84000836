"""Models of transformers that call no attention but their own."""

from __future__ import annotations

from distca.library import AttentionShape, Planner
from distca.library import hugging_face as hf
from support.differing_ranks import LENGTHS
from support.library_loops import BLOCK, config, documents
from support.refused_rollouts import message_of


def loss_of_another_attention() -> dict[str, str]:
    """What a model says that calls no attention but its own, and one of ours."""
    from transformers import AutoModelForCausalLM

    hf.register()
    sizes = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    none = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    found = {}
    for family in ("gpt_neox_japanese", "llama"):
        of_model = config(family, **sizes, **(none if family != "llama" else {}))
        model = AutoModelForCausalLM.from_config(of_model, attn_implementation=hf.IMPLEMENTATION)
        # Without `planner_arguments`, which would refuse it.
        made = Planner(AttentionShape(4, 4, 16, 4), block=BLOCK)
        for step in range(2):
            batch = made.place(documents(0, LENGTHS))
            found[f"{family} {step}"] = message_of(lambda: model(**hf.inputs_of(batch)).loss)  # noqa: B023
        made.close()
    return found

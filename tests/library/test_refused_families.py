"""Types of models whose code takes no other attention, or no positions, are refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from distca.library import hugging_face as hf
from support.library_loops import config
from support.refused_families import loss_of_another_attention

pytest.importorskip("transformers")


def test_a_loss_without_our_attention_is_refused(ranks: Any) -> None:
    for found in ranks.run(loss_of_another_attention, world_size=2):
        assert found["llama 0"] == found["llama 1"] == "no error"
        for step in range(2):
            message = found[f"gpt_neox_japanese {step}"]
            assert "has not called DistCA's core attention" in message


def test_families_whose_positions_do_not_begin_with_0_are_refused() -> None:
    """Their embeddings know how to count from padding."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = set()
    for of_model, model in MODEL_FOR_CAUSAL_LM_MAPPING.items():
        there = vars(sys.modules[model.__module__]).values()
        if any(hasattr(each, "create_position_ids_from_input_ids") for each in there):
            found.add(of_model.model_type)
    # Those have no attention but their own.
    assert found - {"trocr"} == {*hf.OFFSET_POSITIONS}
    with pytest.raises(ValueError, match="type roberta are not supported, since they count posi"):
        hf.planner_arguments(config("roberta", is_decoder=True), torch.float32)


def test_a_configuration_without_one_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"type blt are .* has no one num_attention_heads"):
        hf.planner_arguments(config("blt"), torch.float32)


FAMILIES = {
    "takes no attention": ("gpt_neox_japanese", "xglm", "roformer", "bloom", "mamba", "cpmant"),
    "takes no position_ids": ("bart", "mbart", "pegasus"),
}


@pytest.mark.parametrize("why", FAMILIES)
def test_families_with_an_attention_or_positions_of_their_own_are_refused(why: str) -> None:
    for family in FAMILIES[why]:
        of_model = config(family)
        # As in the configuration that such a model has.
        of_model.is_encoder_decoder = False
        with pytest.raises(ValueError, match=f"models of the type {family} are not supported") as e:
            hf.planner_arguments(of_model, torch.float32)
        assert why.removeprefix("takes ") in str(e.value)

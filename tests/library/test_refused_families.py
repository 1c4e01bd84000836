"""Types of models whose code takes no other attention, or no positions, are refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from distca.library import hugging_face as hf
from distca.library.model_masks import NoMask, mask_of_layer, mask_of_layers
from distca.plan import Mask
from support.library_loops import config
from support.refused_families import loss_of_another_attention

pytest.importorskip("transformers")


def test_a_loss_without_our_attention_is_refused(ranks: Any) -> None:
    for found in ranks.run(loss_of_another_attention, world_size=2):
        assert found["llama 0"] == found["llama 1"] == "no error"
        for step in range(2):
            message = found[f"ignores masks {step}"]
            assert "has not called DistCA's core attention" in message
            message = found[f"gpt_neox_japanese {step}"]
            assert "attention_mask of inputs_of is no tensor" in message


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


@pytest.mark.parametrize("way", ["a bidirectional mask", "a mask of images"])
def test_masks_that_are_neither_causal_nor_windows_are_refused(way: str) -> None:
    from transformers.masking_utils import create_causal_mask

    hf.register()
    of_model = config("llama", is_causal=way != "a bidirectional mask")
    of_model._attn_implementation = hf.IMPLEMENTATION
    given = {"inputs_embeds": torch.zeros(1, 4, 8), "attention_mask": NoMask()}
    if way == "a mask of images":
        given["or_mask_function"] = lambda *_: True
    with pytest.raises(ValueError, match="neither causal nor a sliding window: models of the type"):
        create_causal_mask(of_model, **given, cache=None)


def test_a_layers_mask_and_window_are_one() -> None:
    of_model = config("mistral", sliding_window=8)
    given = {"attention_mask": NoMask(), "config": of_model, "allow_is_causal_skip": True}
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        mask_of_layers(**given, local_size=9)
    found = mask_of_layers(**given, local_size=8)
    assert mask_of_layer(found, None) == mask_of_layer(found, 8) == Mask(window_left=7)
    assert mask_of_layer(None, 8) == Mask(window_left=7)
    assert mask_of_layer(None, None) == mask_of_layer(mask_of_layers(**given), None) == Mask()
    for mask, window in ((found, 9), (mask_of_layers(**given), 8)):
        with pytest.raises(ValueError, match="but its attention asks for"):
            mask_of_layer(mask, window)


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

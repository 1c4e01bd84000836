"""Types of models whose code takes no other attention, or no positions, are refused by name."""

from __future__ import annotations

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

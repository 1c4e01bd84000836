"""A model called with other arguments than those of `inputs_of`, and what is said of it."""

from __future__ import annotations

from typing import Any

import torch

from distca.library import Planner
from distca.library import hugging_face as hf
from support.differing_ranks import LENGTHS
from support.library_loops import BLOCK, documents, make_model
from support.refused_rollouts import message_of

WRONG_MASK = "give documents without padding or mask: call with `inputs_of(batch)`"
WRONG_POSITIONS = "the model was called with other position_ids than those of inputs_of"
MISSING = "the model was called without the {} of inputs_of"
CHANGED = {
    "nothing": "no error",
    "copied positions": "no error",
    "positions": WRONG_POSITIONS,
    "no positions": WRONG_POSITIONS,
    "a mask of ones": WRONG_MASK,
    "a mask of two dimensions more": WRONG_MASK,
    "no mask": WRONG_MASK,
    "no shift_labels": MISSING.format("shift_labels"),
    "no num_items_in_batch": MISSING.format("num_items_in_batch"),
    "no loss": "no error",
}
"""What is changed, and how the message begins."""


def changed_inputs() -> dict[str, str]:
    """What is said of each change."""
    hf.register()
    model = make_model("llama", hf.IMPLEMENTATION)
    planner = Planner(**hf.planner_arguments(model.config, torch.float32), block=BLOCK)
    batch = planner.place(documents(0, LENGTHS))
    given = hf.inputs_of(batch)
    rows, positions = given["input_ids"].shape[1], given["position_ids"]
    others: dict[str, dict[str, Any]] = {
        "copied positions": {"position_ids": positions.clone()},
        "positions": {"position_ids": positions + 1},
        "no positions": {"position_ids": None},
        "a mask of ones": {"attention_mask": torch.ones(1, rows, dtype=torch.int64)},
        "a mask of two dimensions more": {"attention_mask": torch.zeros(1, 1, rows, rows)},
        "no mask": {"attention_mask": None},
        "no shift_labels": {"shift_labels": None},
        "no num_items_in_batch": {"num_items_in_batch": None},
        "no loss": {"labels": None, "shift_labels": None, "num_items_in_batch": None},
    }
    found = {
        name: message_of(lambda: model(**given | others.get(name, {})))  # noqa: B023
        for name in CHANGED
    }
    planner.close()
    return found

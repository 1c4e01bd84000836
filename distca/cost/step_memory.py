"""Sizes of the buffers that a plan's steps run in, which are the transport's alone."""

from __future__ import annotations

from distca.cost.memory import CoreAttentionMemory
from distca.cost.step_bytes import step_bytes
from distca.cost.volume import FORWARD_PHASES, AttentionShape
from distca.plan import SteppedPlan

STEP_SLOTS = 2
"""Slots that steps take in turn: the rows of one are computed while those of the next arrive."""


def step_memory(stepped: SteppedPlan, shape: AttentionShape) -> CoreAttentionMemory:
    """Sizes of the buffers for one layer's core attention, those of its largest step.

    Kernels read keys where they arrived, so there is no memory for them but the channels'. What a
    call takes besides, for its outputs, is as large as those of the model's other layers.

    Args:
        stepped: a valid plan.
        shape: the heads of one tensor-parallel rank.
    """
    largest = []
    steps = step_bytes(stepped, shape)
    for phase in FORWARD_PHASES:
        messages = [step.messages[phase] for step in steps]
        largest.append(max(int(each.sent().max()) for each in messages))
        largest.append(max(int(each.received().max()) for each in messages))
    return CoreAttentionMemory(*largest)

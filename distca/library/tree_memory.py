"""Memory of a micro-batch: of trees, kernels copy a prompt's keys for each branch."""

from __future__ import annotations

import os

import numpy as np
import torch

from distca.library.nodes import Nodes
from distca.library.trees import Tree
from distca.plan import Plan


def device_memory(device: torch.device) -> int:
    """Returns the bytes of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def without_room(nodes: Nodes, plan: Plan, needed: int, memory: float) -> str:
    """Says that buffers exceed the memory, and which document or tree needs most.

    Args:
        nodes: nodes of the micro-batch.
        plan: its plan.
        needed: bytes of the buffers.
        memory: bytes that a rank has.
    """
    t = plan.tasks
    keys = np.bincount(plan.trees[t.document], weights=t.kv_end - t.kv_start)
    most = int(keys.argmax())
    branches = int((plan.trees == most).sum())
    # Plans have the documents of the micro-batch in turn.
    given = nodes.documents[most]
    name = f"document {most}"
    if isinstance(given, Tree):
        name = f"the tree of rollout {min(given.rollouts)}"
    copies = f"{name} needs most: kernels take {int(keys[most]):,} keys"
    if branches > 1:
        copies += f" for its {branches} branches"
    return (
        f"core attention of this micro-batch needs {_size(needed)} of buffers on a rank, which has "
        f"{_size(memory)}. {copies}. Place fewer tokens at once, or use more ranks"
    )


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count:,.0f} bytes"

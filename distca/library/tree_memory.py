"""Memory of a micro-batch of trees: kernels copy a prompt's keys for each branch."""

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


def without_room(nodes: Nodes, plan: Plan, needed: int, memory: int) -> str:
    """Says that buffers exceed the memory, and which tree needs most.

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
    return (
        f"core attention of this micro-batch needs {needed / 1e9:,.2f} GB of buffers on a rank, "
        f"which has {memory / 1e9:,.2f} GB. {name} needs most: kernels copy {int(keys[most]):,} "
        f"keys for its {branches} branches. Place fewer rollouts at once, or use more ranks"
    )

"""Checkpoints without weights, for what only reads what tells their shape."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_patches.loop.checkpoint_folder import TRACKER, checkpoint_name


def write_checkpoint(root: Path, args: Namespace, iteration: int = 7) -> Path:
    """Writes a whole checkpoint of no tensors and its tracker; returns its folder."""
    folder = checkpoint_name(root, iteration)
    folder.mkdir(parents=True)
    torch.save({"args": args, "iteration": iteration}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (root / TRACKER).write_text(str(iteration))
    return folder

"""Boards that plot a run's figures: TensorBoard, and Weights & Biases."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any


class Boards:
    """The boards that flags ask for; none writes on other ranks than the first.

    Args:
        args: flags, of which those of TensorBoard and Weights & Biases are used.
        is_writer: whether this rank writes.
    """

    def __init__(self, args: Namespace, is_writer: bool) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        if is_writer and args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(log_dir=args.tensorboard_dir)
        if is_writer and args.wandb_project:
            import wandb

            folder = args.wandb_save_dir or (Path(args.save) / "wandb" if args.save else None)
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            self._wandb = wandb.init(
                project=args.wandb_project,
                name=args.wandb_exp_name,
                entity=args.wandb_entity,
                dir=folder,
                config=vars(args),
            )

    def add(self, name: str, value: float, iteration: int) -> None:
        """Adds a figure of an iteration."""
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log({name: value}, iteration)

    def add_by_samples(self, name: str, value: float, samples: int) -> None:
        """Adds a figure by the samples consumed, to TensorBoard, whose plots have one axis each."""
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(name, value, samples)

    def close(self) -> None:
        """Writes what is left."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

"""VeOmni with DistCA: the ranks share the core attention of all documents in a micro-batch.

    torchrun --nproc-per-node 8 examples/veomni_adapter.py CONFIG.yaml --train.micro_batch_size 2

It takes the configuration and flags of VeOmni's `tasks/train_text.py`, and was run with VeOmni
0.1.12, on CPUs. Each rank reads and packs its own samples, as VeOmni has it; the documents of all
ranks are then shared. Losses and gradients stay those of VeOmni. Its own sequence parallelism is
not needed, and refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from veomni.arguments import VeOmniArguments, parse_args
from veomni.trainer.text_trainer import TextTrainer

from distca.library import Planner, hugging_face, share_documents, split_rows

KEPT = ("cu_seq_lens_q", "tail_padding_length")
"""What VeOmni's meter counts: the documents that this rank has read. No layer uses them."""


def check(args: VeOmniArguments) -> None:
    """Checks that the ranks of the job differ in their data alone.

    Raises:
        ValueError: there is other parallelism, or logging that needs a rank's own samples.
    """
    accelerator = args.train.accelerator
    for name in ("tp_size", "pp_size", "cp_size", "ulysses_size"):
        if getattr(accelerator, name) > 1:
            raise ValueError(f"train.accelerator.{name} goes not together with DistCA: set it to 1")
    if args.train.channel_loss.enable:
        raise ValueError("ranks compute each other's samples: turn train.channel_loss off")


class DistcaTextTrainer(TextTrainer):
    """VeOmni's trainer of texts, whose ranks share the documents of each micro-batch."""

    def __init__(self, args: VeOmniArguments) -> None:
        check(args)
        hugging_face.register()
        args.model.ops_implementation.attn_implementation = hugging_face.IMPLEMENTATION
        super().__init__(args)
        precision = args.train.accelerator.fsdp_config.mixed_precision
        dtype = precision.param_dtype if precision.enable else "bfloat16"
        arguments = hugging_face.planner_arguments(self.base.model_config, getattr(torch, dtype))
        # A step's micro-batches are placed one after the other, and computed then.
        live = args.train.global_batch_size or 8
        self.planner = Planner(**arguments, device=self.base.device, max_live_batches=live)

    def train_step(self, data_iterator: Iterator[Any]) -> dict[str, float]:
        return super().train_step(self._placed(data_iterator))

    def _placed(self, steps: Iterable[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
        for micro_batches in steps:
            yield [self._place(each) for each in micro_batches]

    def _place(self, given: dict[str, Any]) -> dict[str, Any]:
        """Makes this rank's share of a micro-batch from what all ranks have read."""
        count = given["input_ids"].shape[-1] - int(given.get("tail_padding_length", 0))
        tokens, labels, positions = (
            given[name][:, :count] for name in ("input_ids", "labels", "position_ids")
        )
        own = split_rows(tokens, labels, shifted=False, positions_BT=positions)
        batch = self.planner.place(share_documents(own))
        inputs = hugging_face.inputs_of(batch)
        del inputs["use_cache"]  # VeOmni gives it.
        # VeOmni multiplies a rank's mean loss by the number of its targets, which may be none.
        inputs["num_items_in_batch"] = max(len(batch.predictions.rows), 1)
        return inputs | {name: given[name] for name in KEPT if name in given}


def main() -> None:
    DistcaTextTrainer(parse_args(VeOmniArguments)).train()


if __name__ == "__main__":
    main()

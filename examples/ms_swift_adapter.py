"""ms-swift with DistCA: the ranks share the core attention of all documents in a micro-batch.

    torchrun --nproc-per-node 8 examples/ms_swift_adapter.py --model MODEL --dataset DATA.jsonl

It takes the flags of `swift sft`, and was run with ms-swift 4.6.0, on CPUs. Each rank reads its own
samples, as ms-swift has it; the documents of all ranks are then shared, without their padding. So
`--packing` and `--padding_free` are not needed. Losses and gradients stay those of ms-swift.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from swift.pipelines import sft_main
from swift.trainers import Seq2SeqTrainer
from swift.trainers.trainer_factory import TrainerFactory

from distca.library import IGNORED, Planner, hugging_face, share_documents, split_rows


class DistcaTrainer(Seq2SeqTrainer):
    """ms-swift's trainer, whose ranks share the documents of each micro-batch."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if not self.args.average_tokens_across_devices:
            raise ValueError("ranks share tokens: set --average_tokens_across_devices true")
        if self.args.label_smoothing_factor:
            raise ValueError("placed labels cannot be smoothed: set --label_smoothing_factor 0")
        if self.template.sequence_parallel_size > 1:
            raise ValueError("DistCA shares sequences itself: set --sequence_parallel_size 1")
        if self.model.model_meta.is_multimodal:
            raise ValueError("DistCA shares texts alone: use a model of texts")
        if self.args.eval_strategy != "no":
            raise ValueError("evaluation takes means of ranks' losses: set --eval_strategy no")
        self.args.use_logits_to_keep = False  # A rank's last token may be within a document.
        mixed = torch.bfloat16 if self.args.bf16 else torch.float16
        dtype = mixed if self.args.bf16 or self.args.fp16 else self.model.dtype
        arguments = hugging_face.planner_arguments(self.model.config, dtype)
        self.planner = Planner(**arguments, device=self.args.device)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        for name in ("loss_scale", "channel"):
            if name in inputs:
                raise ValueError(f"samples have {name}, which DistCA does not share")
        own = split_rows(
            inputs["input_ids"],
            inputs["labels"],
            shifted=False,
            kept_BT=inputs.get("attention_mask"),
        )
        batch = self.planner.place(share_documents(own))
        placed = hugging_face.inputs_of(batch)
        # ms-swift multiplies a rank's mean loss by the number of its labels, without the first one.
        placed["labels"] = torch.nn.functional.pad(batch.targets[None], (1, 0), value=IGNORED)
        placed["num_items_in_batch"] = max(len(batch.predictions.rows), 1)
        return super()._prepare_inputs(placed)


def main(given: list[str]) -> None:
    hugging_face.register()
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{__name__}.{DistcaTrainer.__name__}"
    sft_main([*given, "--attn_impl", hugging_face.IMPLEMENTATION])


if __name__ == "__main__":
    main(sys.argv[1:])

"""Hugging Face's Trainer with DistCA: documents of any length, attention on all ranks.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 3

Every rank reads the same documents, a worker plans them ahead, and each rank gets its share.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from distca.library import Planner, hugging_face


def documents(count: int, vocabulary: int) -> list[torch.Tensor]:
    """Documents of 16 to 2,000 random tokens; read yours here, on every rank in the same order."""
    made = torch.Generator().manual_seed(0)
    lengths = (16 * 2 ** (7 * torch.rand(count, generator=made) ** 2)).long()
    return [torch.randint(vocabulary, (n,), generator=made) for n in lengths.tolist()]


class Batches(IterableDataset):
    """The arguments of the model for each micro-batch."""

    def __init__(self, planner: Planner, data: list[torch.Tensor], per_batch: int) -> None:
        self.planner = planner
        self.loader = DataLoader(data, per_batch, collate_fn=planner.collate, num_workers=1)

    def __iter__(self) -> Iterator[dict[str, object]]:
        for planned in self.loader:
            yield hugging_face.inputs_of(self.planner.place(planned))


class DistcaTrainer(Trainer):
    """A trainer whose batches are placed already, each rank's for itself.

    Raises:
        ValueError: its arguments ask for a loss that it would compute wrongly of such batches.
    """

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, **more: object) -> None:
        if args.label_smoothing_factor:
            # The smoother would shift labels once more.
            raise ValueError("DistCA's labels cannot be smoothed: set label_smoothing_factor to 0")
        if not args.average_tokens_across_devices:
            # It would divide a rank's loss by the rank's own targets.
            raise ValueError("ranks share documents: set average_tokens_across_devices to True")
        super().__init__(model, args, **more)

    def get_train_dataloader(self) -> Batches:
        return self.train_dataset

    def _prepare_inputs(self, inputs):
        return inputs  # On the device already; the batch's handle has to stay on the CPU.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = {"max_steps": args.steps, "learning_rate": 1e-3, "logging_steps": 1}
        flags |= {"gradient_accumulation_steps": args.accumulate}
        given = TrainingArguments(
            folder, use_cpu=not torch.cuda.is_available(), report_to=[], **flags
        )
        hugging_face.register()
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512}
        config = LlamaConfig(**sizes)
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="distca")
        planner = Planner(**hugging_face.planner_arguments(config, dtype), device=given.device)
        data = Batches(planner, documents(8 * args.steps, config.vocab_size), 8 // args.accumulate)
        DistcaTrainer(model, given, train_dataset=data).train()
        if dist.get_rank() == 0:
            print({phase: f"{sent / 1e6:.1f} MB" for phase, sent in planner.bytes_sent.items()})


if __name__ == "__main__":
    main()

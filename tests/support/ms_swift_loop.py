"""Steps of ms-swift's trainer, in processes that torchrun starts: it keeps state of its own.

    torchrun --nproc-per-node 2 tests/support/ms_swift_loop.py MODEL DATA FOLDER \\
        MICRO_BATCHES PROMPTS

Each rank writes its steps to FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

import ms_swift_adapter as adapter  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from support.trainer_loops import TrainerStep, count_tokens, record  # noqa: E402

STEPS = 2
FOUND = [TrainerStep()]


class Keep(TrainerCallback):
    """Keeps weights and gradients of each step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        record(more["model"], FOUND[-1])
        FOUND.append(TrainerStep())


class Recorded(adapter.DistcaTrainer):
    """The adapter's trainer, which keeps what it reads, and losses."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.add_callback(Keep())
        self.placed: list[int] = []
        count_tokens(self.planner, self.placed)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        columns = [inputs[name].tolist() for name in ("input_ids", "labels", "attention_mask")]
        for tokens, labels, mask in zip(*columns, strict=True):
            count = sum(mask)
            FOUND[-1].read.append((tokens[:count], [*labels[1:count], -100]))
        return super()._prepare_inputs(inputs)

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        loss = super().training_step(*args, **more)
        summed = loss.detach().clone()
        dist.all_reduce(summed)
        before = 0.0 if FOUND[-1].loss != FOUND[-1].loss else FOUND[-1].loss
        # It multiplies each rank's loss by the ranks, since DDP takes the mean.
        FOUND[-1].loss = before + summed.item() / dist.get_world_size()
        return loss

    def train(self, *args: Any, **more: Any) -> Any:
        said = super().train(*args, **more)
        each = len(self.placed) // STEPS
        for number, step in enumerate(FOUND[:-1]):
            step.tokens = self.placed[number * each : (number + 1) * each]
        torch.save(FOUND[:-1], Path(FOLDER) / f"rank{dist.get_rank()}.pt")
        return said


if __name__ == "__main__":
    model, data, FOLDER, micro_batches, prompts = sys.argv[1:]
    adapter.DistcaTrainer = Recorded
    flags = f"""--model {model} --model_type llama --template llama3 --dataset {data}
        --tuner_type full --torch_dtype float32 --per_device_train_batch_size 3 --use_cpu true
        --gradient_accumulation_steps {micro_batches} --max_steps {STEPS} --learning_rate 1e-2
        --max_grad_norm 1e9 --output_dir {FOLDER}/output --eval_strategy no --save_strategy no
        --split_dataset_ratio 0 --report_to none --dataloader_num_workers 0 --lazy_tokenize true
        --use_chat_template {prompts} --bf16 false --fp16 false --gradient_checkpointing true"""
    sys.modules[adapter.__name__].Recorded = Recorded
    adapter.main(flags.split())

"""Steps of VeOmni's trainer of texts on live ranks.

VeOmni's meter asks an accelerator for its name and memory: here numbers stand for these. All else
is VeOmni's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from support.trainer_loops import (
    TrainerStep,
    count_tokens,
    documents_of_packed,
    import_adapters,
    record,
)

STEPS, SAMPLES = 2, 64


def train(model: str, data: str, output: str, micro_batches: int) -> list[TrainerStep]:
    """Steps of `DistcaTextTrainer` on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    import_adapters()
    import veomni_adapter as adapter
    from veomni.arguments import arguments_types as types
    from veomni.utils import count_flops, helper

    memory = dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda: 0)
    stands = SimpleNamespace(**memory, memory_stats=lambda: {"num_alloc_retries": 0})
    helper.get_torch_device, count_flops.get_device_name = (lambda: stands), (lambda: "CPU")

    given = types.VeOmniArguments(
        model=types.ModelArguments(
            config_path=model,
            model_path=model,
            tokenizer_path=model,
            ops_implementation=types.OpsImplementationConfig(
                attn_implementation="eager",
                cross_entropy_loss_implementation="eager",
                rms_norm_implementation="eager",
                swiglu_mlp_implementation="eager",
                rotary_pos_emb_implementation="eager",
                moe_implementation="eager",
                load_balancing_loss_implementation="eager",
                rms_norm_gated_implementation="eager",
                causal_conv1d_implementation="eager",
                chunk_gated_delta_rule_implementation="eager",
            ),
        ),
        data=types.DataArguments(
            train_path=data,
            data_type="plaintext",
            text_keys="text",
            max_seq_len=512,
            dataloader=types.DataloaderConfig(num_workers=0, prefetch_factor=None),
        ),
        train=types.TrainingArguments(
            dyn_bsz=False,
            micro_batch_size=3,
            global_batch_size=3 * ranks * micro_batches,
            max_steps=STEPS,
            init_device="meta",
            checkpoint=types.CheckpointConfig(
                output_dir=output, save_steps=0, save_epochs=0, save_hf_weights=False
            ),
            optimizer=types.OptimizerConfig(lr=1e-2, max_grad_norm=1e9),
            accelerator=types.AcceleratorConfig(
                fsdp_config=types.FSDPConfig(
                    mixed_precision=types.MixedPrecisionConfig(param_dtype="float32")
                )
            ),
        ),
    )
    found: list[TrainerStep] = []
    placed: list[int] = []

    class Recorded(adapter.DistcaTextTrainer):
        def train_step(self, data_iterator: Iterator[Any]) -> Any:
            found.append(TrainerStep())
            return super().train_step(self.seen(data_iterator))

        def seen(self, steps: Iterator[Any]) -> Iterator[Any]:
            for given in steps:
                for each in given:
                    found[-1].read += documents_of_packed(
                        *(each[name] for name in ("input_ids", "position_ids", "labels"))
                    )
                yield given

        def on_step_end(self, loss: Any = None, **more: Any) -> None:
            summed = torch.tensor(loss)
            dist.all_reduce(summed)
            # VeOmni multiplies each rank's loss by the ranks, since FSDP takes the mean.
            found[-1].loss = summed.item() / ranks
            super().on_step_end(loss=loss, **more)

    trainer = Recorded(given)
    step = trainer.base.optimizer.step

    def stepped(*args: Any, **more: Any) -> Any:
        record(trainer.base.model, found[-1])
        return step(*args, **more)

    trainer.base.optimizer.step = stepped
    # The live rank ends its group itself.
    trainer.base.destroy_distributed = lambda: None
    count_tokens(trainer.planner, placed)
    trainer.train()
    for number, each in enumerate(found):
        each.tokens = placed[number * micro_batches : (number + 1) * micro_batches]
    trainer.planner.close()
    return found

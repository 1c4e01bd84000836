"""Steps of NeMo Automodel's fine-tuning recipe on live ranks.

Automodel asks for the current GPU and its memory: here the CPU and a number stand for these. All
else is Automodel's own.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from support.trainer_loops import Read, TrainerStep, count_tokens, import_adapters, record

STEPS = 2


def documents_of_padded(given: dict[str, torch.Tensor]) -> Read:
    """Documents of rows that are padded, whose labels are the next tokens."""
    columns = [given[name].tolist() for name in ("input_ids", "labels", "attention_mask")]
    found: Read = []
    for tokens, labels, mask in zip(*columns, strict=True):
        kept = sum(mask)
        found.append((tokens[:kept], labels[:kept]))
    return found


def configuration(model: str, data: str, output: str, micro_batches: int, ranks: int) -> Any:
    """Automodel's configuration of a small job, as its YAML files have it."""
    package = "nemo_automodel"
    datasets = f"{package}.components.datasets.llm.column_mapped_text_instruction_dataset"
    return {
        "seed": 7,
        "dist_env": {"backend": "gloo"},
        "step_scheduler": {
            "global_batch_size": 3 * ranks * micro_batches,
            "local_batch_size": 3,
            "max_steps": STEPS,
            "ckpt_every_steps": 1000,
            "num_epochs": 1,
        },
        "model": {
            "_target_": f"{package}.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": model,
            "torch_dtype": "float32",
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": output},
        "clip_grad_norm": {"max_norm": 1e9},
        "distributed": {
            "strategy": "fsdp2",
            "mp_policy": {
                "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
                "param_dtype": "float32",
                "reduce_dtype": "float32",
                "output_dtype": "float32",
            },
        },
        "loss_fn": {"_target_": f"{package}.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {
            "_target_": f"{datasets}.ColumnMappedTextInstructionDataset",
            "path_or_dataset_id": data,
            "column_mapping": {"question": "question", "answer": "answer"},
            "answer_only_loss_mask": False,
        },
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": f"{package}.components.datasets.utils.default_collater",
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
    }


class _OnCpu:
    """torch, whose current GPU is the CPU."""

    cuda = SimpleNamespace(current_device=lambda: torch.device("cpu"), is_available=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: Any) -> torch.device:
        return torch.device("cpu")


def train(model: str, data: str, output: str, micro_batches: int) -> list[TrainerStep]:
    """Steps of `DistcaRecipe` on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_adapters()
    import automodel_adapter as adapter
    from nemo_automodel._transformers import auto_model
    from nemo_automodel.components.config.loader import ConfigNode

    auto_model.torch = _OnCpu()

    nothing = lambda *_, **__: 0  # noqa: E731
    torch.cuda.reset_peak_memory_stats = torch.cuda.empty_cache = nothing
    torch.cuda.max_memory_allocated = nothing
    found: list[TrainerStep] = []
    placed: list[int] = []

    class Recorded(adapter.DistcaRecipe):
        def _run_train_optim_step(self, batches: Any, *args: Any, **more: Any) -> Any:
            found.append(TrainerStep())
            for each in batches:
                found[-1].read += documents_of_padded(each)
            said = super()._run_train_optim_step(batches, *args, **more)
            found[-1].loss = said.metrics["loss"]
            return said

    recipe = Recorded(ConfigNode(configuration(model, data, output, micro_batches, ranks)))
    recipe.setup()
    optimizer = recipe.optimizer[0]
    step = optimizer.step

    def stepped(*args: Any, **more: Any) -> Any:
        record(recipe.model_parts[0], found[-1])
        return step(*args, **more)

    optimizer.step = stepped
    count_tokens(recipe.planner, placed)
    recipe.run_train_validation_loop()
    for number, each in enumerate(found):
        each.tokens = placed[number * micro_batches : (number + 1) * micro_batches]
    recipe.planner.close()
    return found

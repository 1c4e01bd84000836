"""Steps of torchtitan's trainer on live ranks, and the same in one process.

torchtitan takes the device of an accelerator, and its memory, from modules of torch: here a CPU
stands for it. All else is torchtitan's own.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

VOCABULARY, ROW, ROWS, STEPS = 97, 256, 2, 2
DOCUMENTS = (
    (190, 40, 26),
    (1, 255),
    (256,),
    (100, 3, 153),
    (17, 239),
    (120, 136),
    (256,),
    (80, 176),
)


def rows_of(step: int, rank: int, ranks: int, accumulated: int) -> list[list[list[int]]]:
    """Lengths of the documents in each row, for each micro-batch of a rank in a step."""
    found = []
    for number in range(accumulated):
        first = ((step * accumulated + number) * ranks + rank) * ROWS
        found.append([list(DOCUMENTS[(first + n) % len(DOCUMENTS)]) for n in range(ROWS)])
    return found


def row(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and targets of a row; a document's last token predicts nothing."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (ROW,), generator=made)
    positions = torch.cat([torch.arange(n) for n in lengths])
    targets = tokens.roll(-1)
    targets[torch.tensor(lengths).cumsum(0) - 1] = -100
    targets[::7] = -100
    return tokens, positions, targets


def all_rows(step: int, rank: int, ranks: int, accumulated: int) -> list[list[Any]]:
    """The rows of a rank's micro-batches in a step, with the lengths of their documents."""
    return [
        [
            (lengths, row(lengths, 1000 * step + 100 * number + 10 * rank + n))
            for n, lengths in given
        ]
        for number, given in (
            (number, list(enumerate(each)))
            for number, each in enumerate(rows_of(step, rank, ranks, accumulated))
        )
    ]


@dataclass
class TitanStep:
    """A step: the loss that torchtitan logs, weights before it, and gradients."""

    loss: float
    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    tokens: list[int]


def _on_cpu() -> None:
    """Lets a CPU stand for torchtitan's accelerator."""
    from torchtitan.tools import utils

    properties = SimpleNamespace(total_memory=2**30)
    module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda *_: None,
        get_device_name=lambda *_: "CPU",
        get_device_properties=lambda *_: properties,
        memory_stats=lambda *_: {},
        reset_peak_memory_stats=lambda *_: None,
        empty_cache=lambda: None,
        manual_seed_all=torch.manual_seed,
    )
    utils.device_type, utils.device_module = "cpu", module
    utils.get_local_device = lambda: torch.device("cpu")
    from torchtitan.distributed import utils as groups

    # It calls what torch 2.13 does not have, after the first step, to shorten timeouts.
    groups.set_pg_timeouts = lambda **_: None


def model_config() -> Any:
    """A small Llama of torchtitan with grouped queries."""
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3 import (
        _EMBEDDING_INIT,
        _LINEAR_INIT,
        _NORM_INIT,
        Llama3Model,
        _build_llama3_layers,
    )

    rope = ComplexRoPE.Config(dim=16, max_seq_len=4096, theta=10000)
    sizes = {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96}
    return Llama3Model.Config(
        dim=64,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=64, param_init=_EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=64, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=64, out_features=VOCABULARY, param_init=_LINEAR_INIT),
        layers=_build_llama3_layers(**sizes, rope=rope, attn_backend="flex"),
    )


def train(folder: str, accumulated: int = 1) -> list[TitanStep]:
    """Steps of `DistcaTrainer` on this rank."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    _on_cpu()
    import torchtitan_adapter as adapter
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import TrainingConfig
    from torchtitan.models.llama3 import model_registry

    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Rows(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            for step in range(STEPS):
                for rows in all_rows(step, rank, ranks, accumulated):
                    stacked = [
                        torch.stack(each) for each in zip(*(r for _, r in rows), strict=True)
                    ]
                    yield {"input": stacked[0], "positions": stacked[1]}, stacked[2]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **_: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    given = adapter.llama3_debugmodel()
    given.model_spec = model_registry("debugmodel")
    given.model_spec.model = model_config()
    given.loss.loss_fn.global_vocab_size = VOCABULARY
    given.dump_folder = folder
    given.dataloader, given.tokenizer = Rows.Config(), NoTokenizer.Config()
    given.training = TrainingConfig(
        local_batch_size=ROWS,
        global_batch_size=ROWS * ranks * accumulated,
        seq_len=ROW,
        steps=STEPS,
        max_norm=1e9,
        mixed_precision_param="float32",
    )
    trainer = given.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            # gloo sums, but does not multiply by torchtitan's factor of 1.
            module.set_force_sum_reduction_for_comms(True)
    found: list[TitanStep] = []
    step, log = trainer.optimizers.step, trainer.metrics_processor.log

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return getattr(tensor, "full_tensor", tensor.clone)().detach().clone()

    def stepped() -> None:
        parameters = dict(trainer.model_parts[0].named_parameters())
        weights = {name: whole(each) for name, each in parameters.items()}
        gradients = {name: whole(each.grad) for name, each in parameters.items()}
        found.append(TitanStep(0.0, weights, gradients, []))
        step()

    def logged(number: int, loss: float, *args: Any, **more: Any) -> None:
        found[-1].loss = loss
        log(number, loss, *args, **more)

    place = trainer.planner.place
    placed: list[int] = []

    def counted(documents: Any) -> Any:
        batch = place(documents)
        placed.append(len(batch.tokens))
        return batch

    trainer.planner.place = counted
    trainer.optimizers.step, trainer.metrics_processor.log = stepped, logged
    trainer.train()
    for number, each in enumerate(found):
        each.tokens = placed[number * accumulated : (number + 1) * accumulated]
    trainer.close()
    trainer.planner.close()
    gc.enable()
    return found


def expected(
    step: int, weights: dict[str, torch.Tensor], ranks: int, accumulated: int
) -> TitanStep:
    """Loss and gradients by torchtitan's model with its own attention, document by document."""
    _on_cpu()
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = model_config()
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.load_state_dict(
        {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in weights.items()}
    )
    total, count = torch.zeros(()), 0
    for rank in range(ranks):
        for rows in all_rows(step, rank, ranks, accumulated):
            for lengths, each in rows:
                tokens, _, targets = (torch.split(column, lengths) for column in each)
                for ids, target in zip(tokens, targets, strict=True):
                    logits = model(ids[None], torch.arange(len(ids))[None])[0]
                    total = total + torch.nn.functional.cross_entropy(
                        logits, target, reduction="sum", ignore_index=-100
                    )
                    count += int((target != -100).sum())
    (total / count).backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return TitanStep(total.item() / count, weights, gradients, [])

"""torchtitan with DistCA: the ranks share the core attention of all documents in a micro-batch.

    cd examples && torchrun --nproc-per-node 8 -m torchtitan.train \\
        --module torchtitan_adapter --config llama3_8b --training.seq_len 65536

It was run with torchtitan 0.3.0, on CPUs. The inner attention of each layer is replaced by
torchtitan's own overrides, and each micro-batch is placed between data loader and model. Each rank
reads its own rows, as torchtitan has it; the documents of all ranks are then shared. Losses and
gradients stay those of torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.llama3 import config_registry
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from distca.library import AttentionShape, Planner, core_attention, share_documents, split_rows


class DistcaAttention(Module):
    """Core attention of a layer. What torchtitan calls masks is the handle of a batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: int | None,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if not isinstance(attention_masks, int):
            raise ValueError("the batch was not placed by DistCA: run it by DistcaTrainer")
        # One row: `DistcaTrainer` makes no others.
        q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
        return core_attention(q, k, v, attention_masks, scale=scale)[None]


def _replace(given: Module.Config) -> DistcaAttention.Config:
    window = getattr(given, "window_size", (-1, 0))
    if tuple(window) != (-1, 0):
        raise ValueError(f"a layer has the window {window}: only causal attention is shared here")
    return derive(given, DistcaAttention.Config)


@override(target=FlexAttention.Config, description="DistCA")
def flex(given: FlexAttention.Config) -> DistcaAttention.Config:
    return _replace(given)


@override(target=VarlenAttention.Config, description="DistCA")
def varlen(given: VarlenAttention.Config) -> DistcaAttention.Config:
    return _replace(given)


@override(target=ScaledDotProductAttention.Config, description="DistCA")
def sdpa(given: ScaledDotProductAttention.Config) -> DistcaAttention.Config:
    return _replace(given)


class DistcaTrainer(Trainer):
    """torchtitan's trainer, whose ranks share the documents of each micro-batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        parallel = config.parallelism
        for name in ("tensor", "context", "pipeline", "expert"):
            if getattr(parallel, f"{name}_parallel_degree") > 1:
                raise ValueError(f"there is no {name} parallelism with DistCA here: set it to 1")
        if parallel.spmd_backend != "partial_dtensor":
            raise ValueError(
                f"set parallelism.spmd_backend to partial_dtensor, not {parallel.spmd_backend}"
            )
        if config.validator.enable:
            raise ValueError("validation has a loop of its own, which places nothing: turn it off")
        config.training.disable_cuda_graphs = True  # Each batch has another plan.
        config.override.imports += [f"{__name__}.{each.__name__}" for each in (flex, varlen, sdpa)]
        super().__init__(config)
        attention = self.model_config.first_attention
        head_dim = attention.head_dim or attention.dim // attention.n_heads
        kv_heads = attention.n_kv_heads or attention.n_heads
        name = config.training.mixed_precision_param
        size = getattr(torch, name).itemsize
        self.planner = Planner(
            AttentionShape(attention.n_heads, kv_heads, head_dim, size),
            device=self.device,
            max_live_batches=self.gradient_accumulation_steps,
            vocabulary=self.model_config.vocab_size,
        )

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        for given, labels in super().batch_generator(data_iterable):
            own = split_rows(
                given["input"], labels, shifted=True, positions_BT=given.get("positions")
            )
            batch = self.planner.place(share_documents(own))
            inputs = {"input": batch.tokens[None], "positions": batch.positions[None]}
            yield inputs | {"attention_masks": batch.handle}, batch.targets[None]


def _with_distca(registered: Callable[[], Trainer.Config]) -> Callable[[], DistcaTrainer.Config]:
    def make() -> DistcaTrainer.Config:
        given = registered()
        values = {each.name: getattr(given, each.name) for each in fields(given)}
        made = DistcaTrainer.Config(**values)
        made.validator.enable = False
        made.parallelism.spmd_backend = "partial_dtensor"
        return made

    return make


def __getattr__(name: str) -> Callable[[], DistcaTrainer.Config]:
    """The configurations of torchtitan's Llama 3, each by its own name, for `--config`."""
    if not name.startswith("llama3_"):
        raise AttributeError(name)
    return _with_distca(getattr(config_registry, name))

"""A step of PPO by verl's engine: with DistCA on several ranks, and without it in one process.

verl's engines run where one of its platforms says: here one that is a CPU. All else is verl's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from support.trainer_loops import count_tokens, import_adapters, whole
from support.verl_loop import PROMPT, RESPONSE, RESPONSES, padded_batch


@dataclass
class EngineStep:
    """A step of verl's engine on a rank.

    Attributes:
        loss: of all ranks.
        log_probs: of its sequences' responses, `[sequences, response]`.
        entropy: likewise.
        gradients: of the whole model, by name.
        tokens: how many tokens it computed, for each micro-batch.
    """

    loss: float = 0.0
    log_probs: list[torch.Tensor] = field(default_factory=list)
    entropy: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)


def sequences(ranks: list[int]) -> Any:
    """The padded sequences of some ranks, with advantages and old log-probabilities."""
    data = torch.cat([padded_batch(rank) for rank in ranks])
    made = torch.Generator().manual_seed(7)
    shape = 4 * RESPONSES, RESPONSE
    rows = slice(ranks[0] * RESPONSES, (ranks[-1] + 1) * RESPONSES)
    data["advantages"] = torch.randn(shape, generator=made)[rows]
    data["old_log_probs"] = -5 - 0.1 * torch.rand(shape, generator=made)[rows]
    return data


def _on_cpu() -> None:
    """Sets a platform of verl that is a CPU."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    memory = dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: 0)
    module = SimpleNamespace(**memory, mem_get_info=lambda *_: (0, 0))

    class OnCpu(PlatformCUDA):
        device_name, vendor_name, device_module = "cpu", "cpu", module

        def current_device(self) -> str:
            return "cpu"

        def empty_cache(self) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

    platform_manager.set_platform(OnCpu())


def step(
    model: str, shared: bool, ranks: int, micro_batches: int, differs: bool = False
) -> EngineStep:
    """A step of PPO on this rank; one that is alone has the sequences of as many ranks.

    With `differs` the last rank asks for what DistCA refuses.
    """
    import_adapters()
    _on_cpu()
    import verl_adapter as adapter
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.workers import config as configs
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    given = configs.HFModelConfig(
        path=model,
        use_remove_padding=shared,
        override_config={"attn_implementation": "eager"},
    )
    engine_config = configs.FSDPEngineConfig(
        strategy="fsdp2",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_torch_compile=False,
    )
    optimizer = configs.FSDPOptimizerConfig(lr=1e-2, clip_grad=1e9)
    kind = adapter.DistcaEngine if shared else FSDPEngineWithLMHead
    engine = kind(given, engine_config, optimizer, CheckpointConfig())
    engine.initialize()
    found = EngineStep()
    if shared:
        count_tokens(engine.planner, found.tokens)
    mine = [dist.get_rank()] if shared else list(range(ranks))
    data = left_right_2_no_padding(sequences(mine))
    tensordict_utils.assign_non_tensor(
        data,
        temperature=0.9,
        calculate_entropy=True,
        distillation_use_topk=differs and dist.get_rank() == ranks - 1,
        use_remove_padding=shared,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(mine) * RESPONSES // micro_batches,
        global_batch_size=ranks * RESPONSES,
    )
    policy = configs.ActorConfig(
        strategy="fsdp2",
        rollout_n=RESPONSES,
        ppo_micro_batch_size_per_gpu=1,
        entropy_coeff=0.01,
        clip_ratio=0.2,
        use_dynamic_bsz=False,
    )

    def loss_of(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss, metrics = partial(ppo_loss, config=policy)(
            model_output=model_output, data=data, dp_group=dp_group
        )
        found.loss += loss.item()
        for name in ("log_probs", "entropy"):
            values = no_padding_2_padding(model_output[name], data).detach()
            getattr(found, name).extend(values.unbind())
        return loss, metrics

    updated = engine.optimizer_step

    def kept() -> Any:
        for name, each in engine.module.named_parameters():
            found.gradients[name] = whole(
                torch.zeros_like(each) if each.grad is None else each.grad
            )
        return updated()

    engine.optimizer_step = kept
    with engine.train_mode():
        engine.train_batch(data, loss_of)
    if shared:
        # verl multiplies each rank's loss by the ranks, since FSDP takes the mean.
        total = torch.tensor(found.loss / ranks)
        dist.all_reduce(total)
        found.loss = total.item()
        engine.planner.close()
    return found


TOKENS = RESPONSES * (PROMPT + RESPONSE)
"""More tokens than a rank has, and about as many."""

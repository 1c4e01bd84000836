"""verl with DistCA: the ranks share all sequences of a micro-batch, and compute prompts once.

    PYTHONPATH=examples python -m verl.trainer.main_ppo \\
        actor_rollout_ref.model.external_lib=verl_adapter ...

It takes the place of verl's FSDP engine for actors and reference models, and was run with verl
0.9.1, on CPUs. Each rank gets its own sequences, as verl has it. Log-probabilities, entropies and
gradients stay those of verl; its losses, rewards and optimizer are not touched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from distca.library import Planner, hugging_face, share_documents, split_packed

REFUSED = ("use_fused_kernels", "calculate_sum_pi_squared", "distillation_use_topk")


def refusal(micro_batch: TensorDict) -> str:
    """Says why ranks cannot share a micro-batch; nothing if they can."""
    for name in REFUSED:
        if tensordict_utils.get_non_tensor_data(micro_batch, name, False):
            return f"DistCA does not compute what {name} needs: turn it off"
    if "multi_modal_inputs" in micro_batch:
        return "DistCA shares texts alone, and no multi_modal_inputs"
    if len(torch.as_tensor(micro_batch["temperature"]).unique()) > 1:
        return "sequences of one micro-batch share tokens: give one temperature"
    return ""


# More specific than verl's own, which are for any vendor.
@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia"
)
class DistcaEngine(FSDPEngineWithLMHead):
    """verl's engine, whose ranks share the sequences of each micro-batch."""

    def initialize(self) -> None:
        if self.use_ulysses_sp:
            raise ValueError(
                "DistCA shares sequences itself: set ulysses_sequence_parallel_size to 1"
            )
        hugging_face.register()
        config = self.model_config.hf_config
        config._attn_implementation = hugging_face.IMPLEMENTATION
        super().initialize()
        arguments = hugging_face.planner_arguments(config, self._autocast_dtype)
        self.planner = Planner(**arguments, device=get_device_name())

    def prepare_model_inputs(
        self, micro_batch: TensorDict
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        ids = micro_batch["input_ids"]
        own = split_packed(ids.values(), ids.offsets())
        # Sequences are numbered in the order of the ranks, and all ranks refuse what one cannot do.
        found: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(found, (refusal(micro_batch), len(own)))
        for rank, (why, _) in enumerate(found):
            if why:
                raise ValueError(f"rank {rank}: {why}")
        first = sum(count for _, count in found[: dist.get_rank()])
        batch = self.planner.place(share_documents(own))
        inputs = hugging_face.inputs_of(batch)
        del inputs["use_cache"]  # verl gives it.
        return inputs, {"batch": batch, "first": first}

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, torch.Tensor]:
        temperature = float(torch.as_tensor(micro_batch["temperature"]).flatten()[0])
        batch, offsets = output_args["batch"], micro_batch["input_ids"].offsets()
        numbers = range(output_args["first"], output_args["first"] + len(offsets) - 1)
        logits = output.logits[0].float() / temperature
        values = {"log_probs": batch.log_probabilities(logits)}
        if tensordict_utils.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            values["entropy"] = self.compute_entropy_from_logits(logits[batch.predictions.rows])
        found = {}
        for name, each in values.items():
            of_sequences = batch.gather_rollouts(each)
            # A value lies where verl has it, with the token that predicts.
            mine = torch.cat([of_sequences[number].roll(-1) for number in numbers])
            found[name] = torch.nested.nested_tensor_from_jagged(mine, offsets)
        return found

"""What a decode step costs: few bytes sent, nothing that grows with the context, no copied keys."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.serving.decode_step import MASKS, Decoding, Setting
from benchmarks.serving.planned_steps import PlannedSteps
from distca.attention import select_kernel
from distca.cost.volume import AttentionShape
from distca.inference.models import ServedModel, read_model
from support.ranks import Ranks
from support.small_models import save_small_model

SETTING = Setting(
    sequences=5,
    ranks=2,
    block_size=128,
    kernel=select_kernel("cpu"),
    shape=AttentionShape(4, 2, 16, 4),
    dtype=torch.float32,
)


class NewMemory(TorchDispatchMode):
    """Counts operations, and bytes of results in memory of none of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def storages(values: Any) -> set[int]:
            tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
            return {each.untyped_storage().data_ptr() for each in tensors}

        before = storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not storages(each) <= before:
                self.nbytes += each.untyped_storage().nbytes()
        self.count += 1
        return result


def costs_of_a_step(setting: Setting) -> tuple[int, int, int]:
    """Bytes of new tensors, torch's operations, and Python's calls, in a step of both masks."""
    decoding = Decoding(setting)
    calls = 0

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(2):
        # The first makes room in the buffers.
        batch = decoding.plan()
        assert sum(len(feed.new_blocks) for feed in batch.feeds) <= setting.sequences
        with torch.no_grad(), NewMemory() as found:
            run = decoding.build(batch)
            for layer in range(len(MASKS)):
                decoding.layer(run, layer)
    batch = decoding.plan()
    sys.setprofile(profile)
    decoding.build(batch)
    sys.setprofile(None)
    return found.nbytes, found.count, calls


@pytest.mark.parametrize("stripe", [128, 1024])
def test_neither_work_nor_memory_grow_with_the_context(stripe: int) -> None:
    """In a step of 164,000 cached tokens as in one of 20,000: no key is copied, and no operation is
    added. The window has begun to hide keys in both, and no block begins."""
    found = [
        costs_of_a_step(replace(SETTING, tokens=tokens, stripe=stripe))
        for tokens in (20_485, 163_845)
    ]
    (nbytes, count, calls), longer = found
    assert longer[:2] == (nbytes, count)
    # Python makes a few calls of its own at times.
    assert longer[2] == pytest.approx(calls, rel=0.01)
    row = 4 * (2 * 4 * 16 + 2 * 2 * 16)
    assert found[1][0] < 100 * row * SETTING.sequences


def logits_of_a_mixed_step(model: ServedModel) -> dict[int, torch.Tensor]:
    """A prompt prefilled beside a decoded token of another sequence, in one run of the model."""
    import torch.distributed as dist

    from distca.cost.steps import STEP_SLOTS
    from distca.inference.model_runner import ModelRunner
    from distca.runtime import Buffers, CoreAttention
    from distca.transport import CollectiveTransport, new_exchange_group

    device, size = torch.device("cpu"), dist.get_world_size()
    group = new_exchange_group(list(range(size)))
    assert group is not None
    buffers = Buffers(device, max(STEP_SLOTS, len(model.masks)))
    core = CoreAttention(CollectiveTransport(group, device), select_kernel("cpu"), buffers)
    rank = ModelRunner(model, core, device, 40, 4)
    planner = PlannedSteps(model.masks, size, 4, runner=rank)
    prompts = prompts_of_a_mixed_step()
    rank.run(planner.plan({7: 30}), {7: prompts[7][:30]})
    step = planner.plan({3: 21, 7: 1})
    return rank.run(step, {3: prompts[3], 7: prompts[7][30:]})


def prompts_of_a_mixed_step() -> dict[int, list[int]]:
    rng = np.random.default_rng(3)
    return {
        sequence: rng.integers(0, 260, count).tolist() for sequence, count in ((3, 21), (7, 31))
    }


def test_prefills_and_decoded_tokens_share_a_step(ranks: Ranks, tmp_path: Path) -> None:
    model = read_model(str(save_small_model("gemma3_text", tmp_path)), torch.float32)
    found: dict[int, torch.Tensor] = {}
    for each in ranks.run(logits_of_a_mixed_step, model, world_size=2):
        found |= each
    alone = model.load(torch.device("cpu"), "eager")
    for sequence, prompt in prompts_of_a_mixed_step().items():
        with torch.no_grad():
            expected = alone(torch.tensor([prompt])).logits[0, -1]
        assert torch.allclose(found[sequence], expected, rtol=0, atol=1e-5)

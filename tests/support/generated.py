"""`Generator` in the ranks of a test, which answers turns of conversations."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from distca.inference.generation import Answer
from distca.inference.models import ServedModel
from distca.inference.sampling import SamplingParams
from distca.schedule.serving import Sharding
from distca.schedule.serving.csps.layouts import SplitModel

Turns = list[dict[int, list[int]]]


def answers_of_a_rank(
    model: ServedModel,
    strategy: Any,
    stripe: int,
    sampling: SamplingParams,
    turns: Turns,
    sharding: Sharding | None = None,
    restripes: bool = False,
    split: SplitModel | None = None,
) -> tuple[list[dict[int, Answer]], int, int, list[list[int]]]:
    """All turns' answers, bytes by the plans and as counted, and the rows that ranks hold."""
    import torch.distributed as dist

    from distca.attention import select_kernel
    from distca.cost.step_memory import STEP_SLOTS
    from distca.inference.generation import Generator
    from distca.inference.model_runner import ModelRunner
    from distca.inference.pool_size import PoolSize, Sharing
    from distca.inference.sequence_parallel import share_rows
    from distca.inference.tensor_parallel import join_ranks
    from distca.runtime import Buffers, CoreAttention
    from distca.transport import CollectiveTransport

    device = torch.device("cpu")
    group, tensor_ranks = join_ranks(model.tensor_parallel_size, timedelta(minutes=2))
    transport = CollectiveTransport(group, device)
    if split is not None:
        tensor_ranks = share_rows(tensor_ranks, split, device, timedelta(minutes=2))
    core = CoreAttention(
        transport, select_kernel("cpu"), Buffers(device, max(STEP_SLOTS, len(model.masks)))
    )
    size = dist.get_world_size() // model.tensor_parallel_size
    # Small blocks, so that there are many.
    pool = PoolSize(400, 128 if stripe > 8 else 2 * stripe)
    planner = pool.planner(model, Sharing(size, stripe, sharding, restripes, split))
    rank = ModelRunner(model, core, device, pool.blocks, pool.block_size, tensor_ranks)
    generator = Generator(model, rank, planner, strategy, sampling, keeps_logits=True)
    answers = [generator.answer(new) for new in turns]
    held = [planner.rows_per_rank(sequence) for sequence in turns[0]]
    sent = sum(transport.bytes_sent.values()) + tensor_ranks.bytes_sent
    return answers, generator.bytes_planned, sent, held

"""How many blocks of keys and values a GPU has room for, beside all that the largest steps need.

What is not weights is measured: the ranks decode as many sequences as a graph is captured for, then
compute as many tokens of prompts as an iteration feeds. Buffers of exchanges, those of libraries
and graphs are there by then, and the peak says what else a step needs for a while.
"""

from __future__ import annotations

import gc
import math

import torch
import torch.distributed as dist

from distca.inference.config import EngineConfig
from distca.inference.cuda_graphs import SIZES
from distca.inference.engine import Engine
from distca.inference.messages import AddRequest
from distca.inference.processes import Processes
from distca.inference.sampling import SamplingParams
from distca.inference.worker import Worker


def agreed_room(worker: Worker, config: EngineConfig, processes: Processes) -> int:
    """Returns the blocks that all ranks have room for. Collective.

    Args:
        worker: this process's, without any sequence.
        config: configuration of the engine.
        processes: this process among the others.

    Raises:
        ValueError: a rank has no room for a block.
    """
    needed = 0
    if config.cache.nbytes is None:
        needed = _most_needed(worker, config, processes)
    blocks = int(
        processes.reduce(torch.tensor(worker.runner.room(config, needed)), dist.ReduceOp.MIN)
    )
    if blocks < 1:
        raise ValueError(
            "weights and the largest step leave a rank no memory for a block of keys and values: "
            "use more ranks, feed fewer tokens at a time, or let them fill more of a GPU's memory"
        )
    return blocks


def _most_needed(worker: Worker, config: EngineConfig, processes: Processes) -> int:
    """Bytes of this GPU that the largest steps need for a while, beside what stays."""
    limits, positions = config.scheduler, config.model.positions
    decoded = min(limits.max_num_seqs, SIZES[-1])
    tokens = limits.max_num_batched_tokens
    longest = min(tokens, max(positions - 2, 1))
    prompts = [longest] * (tokens // longest)
    size = config.cache.block_size
    blocks = max(2 * decoded, sum(math.ceil((each + 2) / size) + 1 for each in prompts))
    device = worker.runner.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    worker.runner.resize_pool(blocks)
    pool = blocks * worker.runner.block_bytes
    # Graphs are captured first, so that their memory is part of what the longest step needs.
    _answer(worker, Engine(config, blocks), [1] * decoded, processes)
    _answer(worker, Engine(config, blocks), prompts, processes)
    peak = torch.cuda.max_memory_allocated(device)
    worker.runner.resize_pool(1)
    gc.collect()
    torch.cuda.empty_cache()
    return max(peak - pool - torch.cuda.memory_allocated(device), 0)


def _answer(worker: Worker, engine: Engine, lengths: list[int], processes: Processes) -> None:
    """Answers prompts of some lengths by two tokens each, which nobody reads."""
    for number, length in enumerate(lengths):
        # With salts of their own they share no blocks.
        salt = number.to_bytes(4)
        engine.add(AddRequest(number, [1] * length, SamplingParams(2), salt=salt))
    while (begun := engine.schedule()) is not None:
        said = processes.gather(worker.execute(begun))
        engine.finish({rank: each for rank, each in enumerate(said) if each is not None})
    worker.forget()

"""The configuration of a model's engine, from values that have defaults."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from distca.inference.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from distca.inference.machine import Machine
from distca.inference.models import ServedModel
from distca.inference.pool_size import bytes_of_block, check_stripe
from distca.inference.transports import TRANSPORTS, TransportName
from distca.schedule.serving.balanced import NAME as TILES
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.batches import PrefillStrategy
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.schedule.serving.csps.layouts import SplitModel
from distca.schedule.serving.csps.levels import Levels
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.partitions import Chain
from distca.schedule.serving.steps import Strategy


def configure(
    model: ServedModel,
    context_parallel_size: int = 1,
    *,
    strategy: PrefillStrategy | Literal["tiles"] = "pass-kv",
    chain: Chain | Levels | None = None,
    growing: GrowingGroups | None = None,
    attention_servers: int = 0,
    split: SplitModel | None = None,
    block_size: int = 16,
    stripe: int | None = None,
    cache_bytes: int | None = 1 << 30,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    threshold: int | None = None,
    prefix_caching: bool = True,
    evens_out: bool = False,
    step_timeout: float = 600.0,
    enforce_eager: bool = False,
    keeps_logits: bool = False,
    gpu_utilization: float = 0.9,
    transport: TransportName | None = None,
) -> EngineConfig:
    """Makes the configuration of a model's engine.

    Args:
        model: model that answers.
        context_parallel_size: ranks that share a sequence's keys and values.
        strategy: what travels in prefills, or who chooses it. By "tiles" each prompt stays on one
            rank, and tiles of its attention go to others by this machine's published rates;
            `Machine.tiles` takes others.
        chain: who shares out prompts, a chain or levels; None: in zigzag.
        growing: how each prompt of at least `threshold` tokens is given ranks of its own, more from
            chunk to chunk; None: all ranks share it.
        attention_servers: further ranks, which hold keys and values of long sequences and have no
            weights.
        split: layers whose weights processes split, if they share the rows of prefills.
        block_size: tokens of a block of keys and values.
        stripe: consecutive decoded tokens that one rank owns; None: a block.
        cache_bytes: bytes of each rank's keys and values; None: what a GPU has left.
        max_num_seqs: most sequences that run at a time.
        max_num_batched_tokens: most tokens of an iteration: longer prompts are fed in chunks.
        threshold: tokens from which ranks share a sequence; shorter ones stay on one rank. None:
            all are shared, or with tiles none.
        prefix_caching: whether later prompts find the keys and values of earlier ones.
        evens_out: whether keys and values move after a prefill until ranks hold equal shares.
        step_timeout: seconds after which an exchange has failed.
        enforce_eager: whether GPUs decode without CUDA graphs.
        keeps_logits: whether answers keep their logits.
        gpu_utilization: part of a GPU's memory that weights, keys and values may fill.
        transport: what moves rows; None: gloo on CPUs, NCCL on GPUs.

    Raises:
        ValueError: a number is out of range, the stripe is not a multiple of a block, or the bounds
            contradict each other.
    """
    for name, value, least in (
        ("context_parallel_size", context_parallel_size, 1),
        ("attention_servers", attention_servers, 0),
        ("block_size", block_size, 1),
        ("stripe", block_size if stripe is None else stripe, 1),
        ("cache_bytes", 1 if cache_bytes is None else cache_bytes, 1),
        ("max_num_seqs", max_num_seqs, 1),
        ("max_num_batched_tokens", max_num_batched_tokens, 1),
        ("threshold", 0 if threshold is None else threshold, 0),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value}: give a whole number of at least {least}")
    names = (*get_args(Strategy), TILES)
    if isinstance(strategy, str) and strategy not in names:
        raise ValueError(f"strategy={strategy!r}: give one of {', '.join(names)}")
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: give one of {', '.join(TRANSPORTS)}")
    if not 0 < gpu_utilization <= 1:
        raise ValueError(f"gpu_utilization={gpu_utilization}: give a part of 1, such as 0.9")
    if not step_timeout > 0:
        raise ValueError(f"step_timeout={step_timeout}: give more than 0 seconds")
    one = bytes_of_block(model, block_size)
    if cache_bytes is not None and cache_bytes < one:
        raise ValueError(
            f"cache_bytes={cache_bytes:,} is less than a block of {block_size} tokens, which takes "
            f"{one:,}: give more, or lower block_size"
        )
    stripe = block_size if stripe is None else stripe
    check_stripe(stripe, block_size)
    ranks = context_parallel_size + attention_servers
    if strategy == TILES:
        machine = Machine.described(torch.cuda.is_available(), None, None)
        strategy = machine.tiles(model.shape, ranks)
    balanced = isinstance(strategy, BalancedTiles)
    if balanced and chain is not None:
        raise ValueError(
            "strategy='tiles' leaves each prompt on one rank, and a chain shares it out: leave one"
        )
    if threshold is None:
        # Sequences have no more tokens than positions.
        threshold = model.positions + 1 if balanced else 0
    limits = SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        stripe,
        threshold,
        attention_servers,
        chain=chain,
        evens_out=evens_out,
        growing=growing,
        prefix_caching=prefix_caching,
        equal_shares=balanced,
    )
    groups = head_groups(model.shape.heads, model.shape.kv_heads, ranks)
    dtype = str(model.dtype).removeprefix("torch.")
    return EngineConfig(
        ModelConfig(
            model.path,
            dtype,
            model.windows,
            model.positions,
            model.vocab_size,
            # Others never come.
            stops=frozenset(each for each in model.stops if each < model.vocab_size),
        ),
        limits,
        ParallelConfig(
            ranks, model.tensor_parallel_size, strategy, groups, split, transport, step_timeout
        ),
        CacheConfig(block_size, cache_bytes, gpu_utilization),
        enforce_eager,
        keeps_logits,
        counts_bytes=True,
    )

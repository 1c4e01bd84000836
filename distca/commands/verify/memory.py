"""Stage: a pool that is too small for all requests, the longest prefill, and every CUDA graph."""

from __future__ import annotations

import importlib.util

import torch

from distca.attention.choice import default_block_size
from distca.commands.verify.stage import SEND, Context, Fault, Found, NotRun
from distca.inference.config import EngineConfig
from distca.inference.cuda_graphs import SIZES
from distca.inference.defaults import configure
from distca.inference.llm import LLM
from distca.inference.models import ServedModel, read_model
from distca.inference.pool_size import bytes_of_block
from distca.inference.sampling import SamplingParams
from distca.inference.small_models import VOCABULARY, save_small_model
from distca.wording import install

_GREEDY = SamplingParams(6)
_POSITIONS = 4096
"""Fewest positions of the model."""
_BLOCKS_OF_A_RANK = 3
"""Blocks that each rank has of a prompt that crowds others out."""
_SHORT = [n % VOCABULARY for n in range(3, 9)]


def check_memory(context: Context) -> Found:
    """Fills pools: answers stay the same, and a GPU's memory is enough for all graphs."""
    if importlib.util.find_spec("transformers") is None:
        raise NotRun(f"transformers is not installed: {install('inference')}")
    positions = positions_for(context.size, default_block_size())
    folder = save_small_model("llama", context.folder, max_position_embeddings=positions)
    model = read_model(str(folder), context.dtype)
    blocks = _crowd(context, model)
    if not context.on_gpu:
        return Found(
            f"a full pool of {blocks} blocks answers as a large one; no GPU has graphs", {}
        )
    torch.cuda.reset_peak_memory_stats(context.device)
    pool = _whole_gpu(context, model, positions)
    peak = context.largest(torch.cuda.max_memory_allocated(context.device)) / 1e9
    total = torch.cuda.mem_get_info(context.device)[1] / 1e9
    return Found(
        f"a full pool of {blocks} blocks gives the answers of a large one; with a pool of "
        f"{pool / 1e9:.1f} GB, {len(SIZES)} graphs and a prompt of {positions - 8:,} tokens at "
        f"most {peak:.1f} of {total:.1f} GB were used",
        {"pool_gb": pool / 1e9, "peak_gb": peak},
    )


def positions_for(ranks: int, block: int) -> int:
    """Returns the positions of a model whose prompts have several blocks on each rank."""
    return max(_POSITIONS, (_BLOCKS_OF_A_RANK + 1) * block * ranks)


def _config(context: Context, model: ServedModel, cache_bytes: int | None) -> EngineConfig:
    return configure(
        model,
        context.size,
        block_size=default_block_size(),
        cache_bytes=cache_bytes,
        max_num_seqs=max(SIZES),
        max_num_batched_tokens=max(2048, max(SIZES)),
    )


def _crowd(context: Context, model: ServedModel) -> int:
    """Answers more prompts than a pool has room for; returns its blocks."""
    block = default_block_size()
    length = _BLOCKS_OF_A_RANK * block * context.size
    prompts = [[(n * (7 + each)) % VOCABULARY for n in range(length)] for each in range(3)]
    one = bytes_of_block(model, block)
    tokens = {}
    for name, blocks in (("full", 5), ("large", 64)):
        llm = LLM(_config(context, model, blocks * one))
        answers = llm.generate(prompts, _GREEDY)
        tokens[name] = [each.outputs[0].token_ids for each in answers]
        del llm
    if tokens["full"] != tokens["large"]:
        raise Fault("a pool that is full changes answers", SEND)
    return 5


def _whole_gpu(context: Context, model: ServedModel, positions: int) -> int:
    """Lets a pool take what the GPU has left, and runs the longest prompt and every graph.

    Returns:
        Bytes of the pool.
    """
    llm = LLM(_config(context, model, None))
    llm.generate([[n % VOCABULARY for n in range(positions - 8)]], SamplingParams(2))
    for size in SIZES:
        llm.generate([_SHORT] * size, SamplingParams(2))
    return llm.engine.cache.available(0) * bytes_of_block(model, default_block_size())

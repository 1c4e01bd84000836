"""Stage: tokens a second of a prefill and of decoding, with the simulator's beside them."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

from distca.attention.choice import default_block_size
from distca.commands.verify.predictions import NO_PREDICTION, measured_cluster, prefill_seconds
from distca.commands.verify.stage import Context, Found, NotRun
from distca.inference.defaults import configure
from distca.inference.llm import LLM
from distca.inference.models import model_size, read_model
from distca.inference.sampling import SamplingParams
from distca.inference.small_models import VOCABULARY, save_small_model
from distca.wording import install

_LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
_SMALL_PROMPT, _LARGE_PROMPT = 512, 16_384
_TOKENS, _SEQUENCES = 16, 8


def measure_serving(context: Context) -> Found:
    """Times one long prompt on all ranks, and answers of several sequences."""
    if importlib.util.find_spec("transformers") is None:
        raise NotRun(f"transformers is not installed: {install('inference')}")
    length = _LARGE_PROMPT if context.is_fast else _SMALL_PROMPT
    sizes: dict[str, Any] = dict(_LARGE) if context.is_fast else {}
    folder = save_small_model("llama", context.folder, max_position_embeddings=2 * length, **sizes)
    model = read_model(str(folder), context.dtype)
    config = configure(
        model,
        context.size,
        block_size=default_block_size(),
        cache_bytes=None if context.is_fast else 1 << 25,
        max_num_batched_tokens=length,
        prefix_caching=False,
    )
    llm = LLM(config)
    prompt = [n % VOCABULARY for n in range(length)]
    llm.generate([prompt], SamplingParams(1))
    begin = time.perf_counter()
    llm.generate([prompt], SamplingParams(1))
    prefill = context.largest(time.perf_counter() - begin)
    short = [prompt[: 32 + n] for n in range(_SEQUENCES)]
    llm.generate(short, SamplingParams(2))
    first = _seconds(context, llm, short, 1)
    decode = (_seconds(context, llm, short, 1 + _TOKENS) - first) / _TOKENS
    figures = {
        "prefill_tokens_per_s": length / prefill,
        "decode_ms_a_step": 1e3 * decode,
    }
    text = (
        f"a prompt of {length:,} tokens: {length / prefill:,.0f} tokens/s; a decode step of "
        f"{_SEQUENCES} sequences: {1e3 * decode:.1f} ms"
    )
    cluster = measured_cluster(context)
    if cluster is not None:
        predicted = prefill_seconds(model_size(model), cluster, length, context.size)
        figures["predicted_prefill_tokens_per_s"] = length / predicted
        if context.is_fast:
            text += f" (simulated prefill: {length / predicted:,.0f} tokens/s)"
        else:
            text += f"; {NO_PREDICTION}"
    return Found(text, figures)


def _seconds(context: Context, llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Measures the seconds that answers of a number of tokens take."""
    begin = time.perf_counter()
    llm.generate(prompts, SamplingParams(tokens))
    return context.largest(time.perf_counter() - begin)

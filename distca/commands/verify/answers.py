"""Stage: tiny models answer on all ranks as one process with transformers' own attention does."""

from __future__ import annotations

import importlib.util
import itertools
import json

import torch.distributed as dist

from distca.attention.choice import default_block_size
from distca.commands.verify.apart import run_apart
from distca.commands.verify.report import REPORT
from distca.commands.verify.stage import SEND, Context, Fault, Found, NotRun
from distca.inference.defaults import configure
from distca.inference.llm import LLM
from distca.inference.models import read_model
from distca.inference.sampling import SamplingParams
from distca.inference.small_models import VOCABULARY, save_small_model
from distca.inference.verify import compare
from distca.schedule.serving.batches import PrefillStrategy
from distca.wording import install

FAMILIES: dict[str, PrefillStrategy] = {
    "llama": "pass-kv",
    "mistral": "pass-q",
    "qwen3_moe": "pass-kv",
    "gpt_oss": "pass-q",
}
"""Families, and what travels between ranks in prefills. They have groups of heads, windows,
experts, and experts with biases beside windows and sinks."""
_LENGTHS = (90, 300, 33)
_LONGEST = 4000
"""Tokens for which the models have positions."""
_TOKENS = 8
_SECONDS_ALONE = 200


def check_answers(context: Context) -> Found:
    """Holds answers of each family against one process's, eager and with CUDA graphs."""
    if importlib.util.find_spec("transformers") is None:
        raise NotRun(f"transformers is not installed: {install('inference')}")
    block = default_block_size()
    # Of the last prompt all ranks have tokens.
    lengths = [*_LENGTHS, min(block * context.size + 50, _LONGEST)]
    prompts = [[(7 * n + n * n) % VOCABULARY for n in range(length)] for length in lengths]
    ways = [("eager", True), ("CUDA graphs", False)] if context.on_gpu else [("eager", True)]
    for (family, strategy), (way, eager) in itertools.product(FAMILIES.items(), ways):
        folder = str(save_small_model(family, context.folder, draws_norms=True))
        model = read_model(folder, context.dtype)
        config = configure(
            model,
            context.size,
            strategy=strategy,
            block_size=block,
            cache_bytes=1 << 24,
            max_num_batched_tokens=256,
            enforce_eager=eager,
            keeps_logits=True,
        )
        done = LLM(config).generate(prompts, SamplingParams(_TOKENS))
        if context.rank == 0:
            found = compare(model, done, greedy=True)
            if not found.holds:
                raise Fault(
                    f"{family}, {way}, on {context.size} rank(s): {found.line}",
                    ("give --enforce-eager, and " if not eager else "") + SEND,
                )
        dist.barrier(group=context.control)
    said = " and ".join(way for way, _ in ways)
    on = f"{context.size} rank(s)"
    if context.on_gpu and context.size > 1:
        # A rank alone has other CUDA graphs.
        failed = _run_alone(context) if context.rank == 0 else None
        if (why := context.gather(failed)[0]) is not None:
            raise Fault(*why)
        on += " and on 1"
    return Found(f"{', '.join(FAMILIES)} on {on}, {said}: logits are one process's", {})


def _run_alone(context: Context) -> tuple[str, str, str] | None:
    """Runs this stage on one rank, in a process of its own, which has this one's GPU.

    Returns:
        What is wrong, what to do, and what was printed; None: nothing failed.
    """
    arguments = ["verify", "--ranks", "1", "--stages", "answers", "--output", str(context.folder)]
    status, printed = run_apart("distca", arguments, _SECONDS_ALONE, context.folder)
    if status == 0:
        return None
    report = context.folder / REPORT
    stages = json.loads(report.read_text())["stages"] if report.exists() else []
    if not stages:
        last = " ".join(printed.split())[-300:]
        return f"one rank alone: it ended with status {status}: {last}", SEND, printed
    return f"one rank alone: {stages[-1]['text']}", stages[-1]["cure"], stages[-1]["details"]

"""Families of models with vLLM and prefill ranks: answers of vLLM alone, and with ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from distca.prefill.client import PrefillClient
from support.prefills import RankDone, free_address, in_background, prefill_with, prompt
from support.quantized_models import KINDS, quantize
from support.ranks import Ranks
from support.small_models import FAMILIES, SIZES, save_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "vllm.md"
LAYOUTS = {(1, 1): "1 rank", (2, 1): "2 ranks", (4, 1): "4 ranks", (2, 2): "2 ranks of 2"}
"""Names by ranks, and processes of each that share its layers."""

LEAST = 32
"""Fewest tokens that are asked for."""

LENGTHS = (LEAST + 1, 150, 311, 700)
"""Tokens of the prompts: those of 311 and 700 begin alike."""

SECONDS = 600.0
"""Until ranks that do not work have failed: longer than they take to start on a busy machine."""

LEASE = 30.0
"""Seconds of a lease: engines look for ranks that are new a few times in it."""


@dataclass(frozen=True)
class Family:
    """A small model of a class of vLLM.

    Attributes:
        config: name of its configuration in transformers.
        values: values of its configuration.
        operators: `custom_ops` of vLLM's compilation config.
    """

    config: str
    values: Mapping[str, Any]
    operators: tuple[str, ...] = ()


def _of(family: str, **values: Any) -> Family:
    """A family that transformers' code computes, too, with heads that vLLM's kernels have."""
    config, special = FAMILIES[family]
    return Family(config, {**special, "head_dim": 32, **values})


_LATENTS: dict[str, Any] = {
    # vLLM's kernel of latent attention on CPUs has these two sizes alone.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}

SMALL: dict[str, Family] = {
    # vLLM's kernels of four bits on CPUs have slices of 32.
    "LlamaForCausalLM": _of("llama", intermediate_size=128),
    "Qwen2ForCausalLM": _of("qwen2"),
    "Qwen3ForCausalLM": _of("qwen3"),
    "MistralForCausalLM": _of("mistral"),
    "Phi3ForCausalLM": _of("phi3"),
    "Gemma2ForCausalLM": _of("gemma2", query_pre_attn_scalar=32),
    "Gemma3ForCausalLM": _of("gemma3_text", query_pre_attn_scalar=32),
    # vLLM's experts on CPUs have slices of at least 64.
    "GptOssForCausalLM": _of("gpt_oss", intermediate_size=128),
    "MixtralForCausalLM": Family(
        "MixtralConfig",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Qwen3MoeForCausalLM": _of("qwen3_moe"),
    "DeepseekV2ForCausalLM": Family(
        "DeepseekV2Config",
        {**_LATENTS, "q_lora_rank": None, "topk_method": "greedy"},
        # vLLM's kernel on CPUs rotates queries of several heads wrongly.
        ("-rotary_embedding",),
    ),
    "DeepseekV3ForCausalLM": Family(
        "DeepseekV3Config",
        # YaRN has no such kernel.
        {**_LATENTS, "q_lora_rank": 32, "topk_method": "noaux_tc", "rope_parameters": _YARN},
    ),
}
"""By the names of vLLM's classes, in the order of `docs/vllm.md`."""


def save(name: str, folder: Path, **changes: Any) -> Path:
    """Writes the small model of a class with changed values, and returns its folder."""
    import transformers

    family = SMALL[name]
    values = SIZES | {"hidden_size": 128} | dict(family.values) | changes
    config = getattr(transformers, family.config)(**values)
    return save_model(transformers.AutoModelForCausalLM, config, folder / name)


def prompts() -> list[list[int]]:
    """Prompts of all families."""
    return [prompt(min(number, 2), length) for number, length in enumerate(LENGTHS)]


@dataclass(frozen=True)
class Answers:
    """What vLLM has answered.

    Attributes:
        tokens: tokens of each prompt.
        logprobs: their log-probabilities.
        groups: groups of layers that vLLM keeps in blocks of their own.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    groups: int


def answer(pipe: Connection) -> None:
    """Answers the prompts by one model after the other: the main function of vLLM's process.

    It receives a model's folder, the address of its ranks, the dtype and vLLM's operators. For each
    run it then receives whether ranks must be there; None: no more.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    while (told := pipe.recv()) is not None:
        _answer(pipe, *told)
        gc.collect()
        cleanup_dist_env_and_memory()


def connected(folder: str, address: str, **flags: Any) -> tuple[Any, Callable[[], None]]:
    """Makes vLLM with the connector in a process of `answering`.

    Args:
        folder: folder of the model.
        address: where prefill ranks are looked for.
        flags: further ones of vLLM's engine.

    Returns:
        It, and a function that waits for ranks that were not there at its last call.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    # As vLLM's workers on CPUs do.
    torch.accelerator.empty_cache = lambda: None
    settings = {"distca_address": address, "distca_min_tokens": LEAST}
    model = LLM(
        folder,
        enforce_eager=True,
        max_num_batched_tokens=256,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DistCAConnector",
            kv_connector_module_path="distca.vllm",
            kv_role="kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={**settings, "distca_connect_seconds": 0},
        ),
        **flags,
    )
    # Of vLLM's scheduler and of its worker, which run in this process.
    scheduler = model.llm_engine.engine_core.engine_core.scheduler
    connectors = scheduler.connector._asks, get_kv_transfer_group()._loads
    clients, known = [each._client for each in connectors], {None}

    def wait() -> None:
        due = time.monotonic() + SECONDS
        while any(_instance(each) in known for each in clients):
            assert time.monotonic() < due, "no ranks"
            time.sleep(0.05)
        known.add(_instance(clients[0]))

    return model, wait


def _answer(
    pipe: Connection, folder: Path, address: str, dtype: torch.dtype, operators: Sequence[str]
) -> None:
    model, wait = connected(
        str(folder),
        address,
        dtype=str(dtype).removeprefix("torch."),
        compilation_config={"custom_ops": list(operators)},
    )
    from vllm import SamplingParams

    core = model.llm_engine.engine_core
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False)
    while (with_ranks := pipe.recv()) is not None:
        if with_ranks:
            wait()
        model.reset_prefix_cache()
        asked = [{"prompt_token_ids": each} for each in prompts()]
        found = [each.outputs[0] for each in model.generate(asked, sampling, use_tqdm=False)]
        tokens = [list(each.token_ids) for each in found]
        logprobs = [
            [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)]
            for each in found
        ]
        groups = core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        pipe.send(Answers(tokens, logprobs, len(groups)))
    core.shutdown()


def _instance(client: PrefillClient) -> str | None:
    """Which run of prefill ranks a client knows."""
    return None if client.welcome is None else client.welcome.instance


def _run(main: Callable[..., None], *args: Any) -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    main(*args)


@contextmanager
def answering(main: Callable[..., None] = answer, *args: Any) -> Iterator[Connection]:
    """A process in which vLLM answers: its main function is given a pipe, and `args`."""
    context = multiprocessing.get_context("spawn")
    pipe, its = context.Pipe()
    process = context.Process(target=_run, args=(main, its, *args), daemon=True)
    process.start()
    its.close()
    try:
        yield pipe
        pipe.send(None)
        process.join(20)
    finally:
        process.kill()


def prefill(model: Any, address: str, count: int) -> RankDone:
    """Computes prompts on a rank, by vLLM's class."""
    from vllm.distributed import parallel_state

    try:
        changes = {"block_size": 16, "step_timeout": SECONDS}
        return prefill_with(model, address, count, changes, chunk=96, lease=LEASE)
    finally:
        # The next model has ranks of its own.
        parallel_state.destroy_model_parallel()
        parallel_state.get_world_group().destroy()
        parallel_state._WORLD = None


def check_quantized(found: Answers, alone: Answers, where: str) -> None:
    """Answers of weights and activations of eight bits are equal, but where two tokens are near.

    A last bit more or less is a whole step of such an activation. vLLM's own batches differ by it,
    too, with the moments at which prompts arrive. So an answer may take the other one of two
    tokens that are about as likely, and is compared up to there.
    """
    whole = 0
    for tokens, others, mine, theirs in zip(
        found.tokens, alone.tokens, found.logprobs, alone.logprobs, strict=True
    ):
        pairs = enumerate(zip(tokens, others, strict=True))
        equal = next((n for n, (each, other) in pairs if each != other), len(tokens))
        whole += equal == len(tokens)
        # The token at which they part is the likeliest one of each.
        compared = slice(0, equal + 1)
        np.testing.assert_allclose(mine[compared], theirs[compared], atol=0.05, err_msg=where)
    assert whole > len(found.tokens) / 2, (where, found.tokens, alone.tokens)


def compare(
    name: str,
    ranks: Ranks,
    pipe: Connection,
    layouts: Iterable[tuple[int, int]],
    quantized: str = "",
) -> None:
    """Answers of vLLM with some ranks are those of vLLM alone; ranks compute every prompt.

    Args:
        name: vLLM's class.
        ranks: processes of the ranks.
        pipe: to the process in which vLLM answers.
        layouts: numbers of ranks, and processes of each that share its layers.
        quantized: kind of quantized weights; empty: they are not.
    """
    from distca.vllm.model import read_vllm_model

    with TemporaryDirectory() as temporary:
        folder, address = save(name, Path(temporary)), free_address()
        if quantized:
            quantize(folder, quantized)
        dtype = KINDS[quantized].dtype if quantized else torch.float32
        read = partial(read_vllm_model, str(folder), dtype)
        for told in ((folder, address, dtype, SMALL[name].operators), False):
            pipe.send(told)
        alone: Answers = pipe.recv()
        assert len({tuple(each) for each in alone.tokens}) == len(LENGTHS), "all the same"
        for count, size in layouts:
            model = read(tensor_parallel_size=size, step_timeout=SECONDS)
            assert model.class_name == name
            assert model.quantization == (quantized or "none")
            of_ranks = model, address, len(LENGTHS)
            processes = {"world_size": count * size, "timeout": SECONDS}
            run = partial(ranks.run, prefill, *of_ranks, **processes)
            with in_background(run) as done:
                pipe.send(True)
                while not pipe.poll(1.0):
                    assert not any(isinstance(each, BaseException) for each in done), done
                found: Answers = pipe.recv()
            where = f"{name} on {count} ranks of {size}"
            if quantized:
                check_quantized(found, alone, where)
            else:
                assert found.tokens == alone.tokens, where
                np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=2e-4)
            assert all(each.referenced == 0 for each in done[0])
            received = {each.counts.prompts for each in done[0]}
            assert received == {len(LENGTHS)}, "a prompt ended before"
            wanted = sum(LENGTHS) - len(LENGTHS)
            assert done[0][0].counts.tokens == wanted, "vLLM computed tokens itself"
        pipe.send(None)

"""Models that vLLM's loader and classes make, as the prefill ranks run them.

Nothing of vLLM's engine runs: a layer asks the ranks for its attention, and they share it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from distca.cost.volume import AttentionShape
from distca.inference.models import ServedModel, expert_count
from distca.inference.runnable import LayerAttention, RunnableModel
from distca.inference.tensor_parallel import ALONE, TensorRanks
from distca.prefill.facts import NOT_QUANTIZED, frequencies_of_vllm
from distca.vllm.families import (
    attention_layers,
    check_layers,
    check_model,
    quantization,
    softcap,
)


@dataclass(frozen=True)
class VllmModel(ServedModel):
    """A model that vLLM's classes compute; see `ServedModel`.

    Attributes:
        class_name: name of vLLM's class.
        longest: most tokens of a sequence.
        whole_kv_heads: key-value heads of a whole layer.
        step_timeout: seconds after which an exchange of the ranks that share layers has failed.
        quantized: how vLLM quantizes the weights.
        cap: bound of the scores of attention, or None.
    """

    class_name: str = ""
    longest: int = 0
    whole_kv_heads: int = 0
    step_timeout: float = 600.0
    quantized: str = NOT_QUANTIZED
    cap: float | None = None

    @property
    def softcap(self) -> float | None:
        """See `ServedModel.softcap`."""
        return self.cap

    @property
    def positions(self) -> int:
        """Most tokens of a sequence."""
        return self.longest

    @property
    def frequencies(self) -> str:
        """See `ServedModel.frequencies`."""
        return frequencies_of_vllm(self.longest)

    @property
    def quantization(self) -> str:
        """See `ServedModel.quantization`."""
        return self.quantized

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a whole layer."""
        return self.whole_kv_heads

    def runnable(
        self, device: torch.device, ranks: TensorRanks = ALONE, computes: bool = True
    ) -> RunnableModel:
        """Loads the weights by vLLM's loader: this rank's slice. Collective.

        vLLM's layers have process groups of their own. They are of neighbouring ranks, as `ranks`
        are. See `ServedModel.runnable`.

        Raises:
            ValueError: the checkpoint does not have the weights of the model.
        """
        assert computes, "each prefill rank has weights"
        assert ranks.size == self.tensor_parallel_size, "ranks of another model"
        config = _config(
            self.path,
            self.dtype,
            self.trust_remote_code,
            self.longest,
            ranks.size,
            self.step_timeout,
        )
        with set_current_vllm_config(config), _on(device):
            parallel_state.init_distributed_environment(
                dist.get_world_size(),
                dist.get_rank(),
                local_rank=device.index or 0,
                backend=dist.get_backend(),
            )
            parallel_state.ensure_model_parallel_initialized(ranks.size, 1)
            asks_host = self.frequencies_ask_host or expert_count(self.config) > 0
            return _Runnable(get_model(vllm_config=config), config, asks_host)


def read_vllm_model(
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    step_timeout: float = 600.0,
) -> VllmModel:
    """Reads a model's configuration by vLLM, and refuses what the ranks cannot compute.

    The layers are made without weights, so that it is known what they are before ranks start.

    Args:
        path: folder of the model, or its name on the Hugging Face hub.
        dtype: dtype of weights and rows.
        trust_remote_code: whether code of the model's folder may run.
        max_model_len: most tokens of a sequence; None: what the model has positions for.
        tensor_parallel_size: ranks that share each layer.
        step_timeout: seconds after which an exchange of these ranks has failed.

    Raises:
        ValueError: vLLM has no such model, or it has what the ranks do not compute, or they cannot
            share its layers evenly.
    """
    size = tensor_parallel_size
    config = _config(path, dtype, trust_remote_code, max_model_len, size, step_timeout)
    model = config.model_config
    check_model(model)
    with _alone(), set_current_vllm_config(config), set_default_torch_dtype(dtype):
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        try:
            # Rotary embeddings that vLLM keeps for later layers have tables, which these have not.
            with (
                torch.device("meta"),
                mock.patch.dict(rotary_embedding._ROPE_DICT, clear=True),
                # Layers without weights are not computed, so that no other rank must be there.
                mock.patch.object(parallel_state.get_tp_group(), "world_size", size),
            ):
                made = initialize_model(vllm_config=config)
        # vLLM's layers raise all of these for what they cannot do on this device.
        except (NotImplementedError, ValueError, AssertionError, ArithmeticError) as error:
            here = "here" if size == 1 else f"with --tensor-parallel-size {size}"
            raise ValueError(
                f"{path}: vLLM cannot make this model {here}: {_line(error)}"
            ) from error
    layers = _layers(config)
    check_layers(model, made, layers)
    first = layers[0]
    return VllmModel(
        path,
        model.hf_text_config,
        AttentionShape(
            first.num_heads, first.num_kv_heads, first.head_size, dtype_bytes=dtype.itemsize
        ),
        tuple(_window(layers[number]) for number in range(len(layers))),
        dtype,
        None,
        size,
        trust_remote_code,
        class_name=type(made).__name__,
        longest=int(model.max_model_len),
        whole_kv_heads=int(model.get_total_num_kv_heads()),
        step_timeout=step_timeout,
        quantized=quantization(model),
        cap=softcap(first),
    )


def _config(
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    max_model_len: int | None,
    tensor_parallel_size: int,
    step_timeout: float,
) -> VllmConfig:
    """vLLM's configuration of a model.

    Raises:
        ValueError: vLLM refuses the model.
    """
    try:
        config = EngineArgs(
            model=path,
            dtype=str(dtype).removeprefix("torch."),
            trust_remote_code=trust_remote_code,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            # Ranks are started by us, so that vLLM does not look for their GPUs here.
            distributed_executor_backend="external_launcher" if tensor_parallel_size > 1 else None,
            distributed_timeout_seconds=ceil(step_timeout),
            enforce_eager=True,
            use_tqdm_on_load=False,
        ).create_engine_config()
    # vLLM raises all of these for models and settings that it does not have here.
    except (ValueError, OSError, NotImplementedError) as error:
        raise ValueError(f"{path}: vLLM refuses this model: {_line(error)}") from error
    if config.model_config.use_mla and current_platform.is_cpu():
        # vLLM's kernel for CPUs rotates queries of several heads wrongly.
        config.compilation_config.custom_ops.append(f"-{RotaryEmbedding.name}")
        # That for AMX packs the weights that bring queries to the latents.
        config.attention_config.backend = AttentionBackendEnum.CPU_MLA
    return config


def _line(error: Exception) -> str:
    """What an error of vLLM says, in a line."""
    # Errors of pydantic have a list of what is wrong, and a page of text.
    told = getattr(error, "errors", None)
    text = str(told()[0]["msg"]) if callable(told) else str(error)
    return " ".join(text.removeprefix("Value error, ").split()) or type(error).__name__


def _layers(config: VllmConfig) -> dict[int, Attention]:
    """Attention layers of a model by their numbers."""
    found = attention_layers(config.compilation_config.static_forward_context)
    return {extract_layer_index(name): layer for name, layer in found.items()}


def _window(layer: Attention) -> int | None:
    """Earlier tokens that a layer's queries see; vLLM counts the query's own, too."""
    window = layer.sliding_window
    return None if window is None else int(window) - 1


@contextmanager
def _alone() -> Iterator[None]:
    """Makes a process group of this process for as long as vLLM makes layers without weights."""
    assert not dist.is_initialized(), "models are read before ranks join"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Lets vLLM's loader work on a device."""
    if device.type == "cpu":
        with (
            # As vLLM's own workers on CPUs do: torch has no memory of an accelerator to give back.
            mock.patch.object(torch.accelerator, "empty_cache", return_value=None),
            # Ranks that share layers would spin in shared memory until the others come, which may
            # be dead. Those of gloo give up.
            mock.patch.object(
                CpuCommunicator, "_all_group_ranks_share_shm_group_name", return_value=False
            ),
        ):
            yield
    else:
        with torch.device(device):
            yield


class _Runnable:
    """See `distca.inference.runnable.RunnableModel`.

    Args:
        module: model of vLLM, with its weights.
        config: vLLM's configuration.
        asks_host: see `RunnableModel.asks_host`.

    Attributes:
        module: the model.
        asks_host: see `RunnableModel.asks_host`.
        scales: the factor of each layer's scores.
    """

    def __init__(self, module: Any, config: VllmConfig, asks_host: bool) -> None:
        self.module, self._config, self.asks_host = module, config, asks_host
        layers = _layers(config)
        self.scales: Sequence[float] = [float(layers[n].impl.scale) for n in range(len(layers))]
        self._attention: LayerAttention | None = None
        for number, layer in layers.items():
            of_latents = isinstance(layer, MLAAttention)
            function = self._attend_latents if of_latents else self._attend
            layer.forward = functools.partial(function, number, layer)

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attention: LayerAttention,
    ) -> torch.Tensor:
        """See `RunnableModel.logits`."""
        self._attention = attention
        try:
            with set_forward_context({}, self._config, num_tokens=len(ids)):
                hidden = self.module(ids, positions)
                logits: torch.Tensor = self.module.compute_logits(hidden[rows])
        finally:
            self._attention = None
        return logits

    def _attend(
        self,
        number: int,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: Sequence[int] | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Attention as vLLM's layers call it: rows of all heads, `[rows, heads * head_dim]`."""
        assert self._attention is not None, "a layer runs by itself"
        q, k, v = (
            rows.view(-1, heads, layer.head_size)
            for rows, heads in (
                (query, layer.num_heads),
                (key, layer.num_kv_heads),
                (value, layer.num_kv_heads),
            )
        )
        sink = getattr(layer.impl, "sinks", None)
        scale = self.scales[number]
        out = self._attention.attend(number, q.contiguous(), k, v, scale, sink)
        return out.to(output_dtype or query.dtype).reshape(len(query), -1)

    def _attend_latents(
        self,
        number: int,
        layer: MLAAttention,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        output_shape: Sequence[int] | None = None,
        q_dcp_replicated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over latents, as vLLM's layers call it.

        The weights of keys bring queries to the latents. So all heads have the same keys: latents,
        with the rotated parts behind them. Outputs are latents, too; the weights of values turn
        them into those of the heads.

        Args:
            number: number of the layer.
            layer: the layer.
            q: queries, `[rows, heads, nope + rope]`.
            kv_c_normed: latents, `[rows, rank]`.
            k_pe: rotated parts of keys, `[rows, 1, rope]`.
            output_shape: shape of the result.
            q_dcp_replicated: never given: layers that give it are refused.

        Returns:
            Outputs of the heads, `[rows, heads * v_dim]`.
        """
        assert self._attention is not None, "a layer runs by itself"
        rows, rank = kv_c_normed.shape
        q = q.view(rows, layer.num_heads, layer.qk_head_dim)
        nope, rotated = q[..., : layer.qk_nope_head_dim], q[..., layer.qk_nope_head_dim :]
        # Head by head: [heads, rows, nope] @ [heads, nope, rank].
        absorbed = torch.bmm(nope.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
        k = torch.cat([kv_c_normed, k_pe.view(rows, -1)], dim=-1)[:, None]
        # Values have as many numbers as keys in the memory of the ranks.
        v = torch.nn.functional.pad(kv_c_normed, (0, layer.qk_rope_head_dim))[:, None]
        out = self._attention.attend(
            number, torch.cat([absorbed, rotated], dim=-1), k, v, self.scales[number], None
        )
        latents = out[..., :rank].to(q.dtype).transpose(0, 1)
        return torch.bmm(latents, layer.W_UV).transpose(0, 1).reshape(rows, -1)

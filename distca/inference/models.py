"""Models that are served: decoders of transformers whose attention DistCA's plans can compute."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from distca.attention.fused import load_expert_kernels, load_fused_kernels
from distca.checkpoints.weights import Checkpoint
from distca.cost.model_sizes import Experts, ModelSize
from distca.cost.volume import AttentionShape
from distca.inference.fused_layers import fuse_experts, fuse_layers, products_ask_host
from distca.inference.runnable import RunnableModel
from distca.inference.tensor_parallel import (
    ALONE,
    TensorRanks,
    check_divides,
    load_slice,
    slice_config,
)
from distca.inference.transformers_model import IMPLEMENTATION, TransformersModel, register
from distca.plan import Mask
from distca.wording import install

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

logger = logging.getLogger(__name__)

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "gemma2",
    "gemma3_text",
    "qwen3_moe",
    "gpt_oss",
)
"""Families of models, by `model_type`, whose logits were held against transformers' own."""

_SOFTCAPPED = ("gemma2",)
"""Families whose attention bounds its scores."""

_WINDOW_OF_ALL = ("mistral", "phi3", "qwen3_moe")
"""Families whose layers all have the same window."""

_WINDOW_BY_LAYER = ("qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss")
"""Families whose `layer_types` say which layers have a window."""

_NOT_APPLIED: dict[str, object] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": [],
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "num_beams": 1,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "stop_strings": [],
    "watermarking_config": None,
}
"""Fields of a generation config that change the likeliest answer and are not applied, with the
values that change nothing; None changes nothing in any."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts that a token chooses among, in one family or another."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def need_transformers() -> ModuleType:
    """Imports transformers.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"models to generate with are read by transformers: {install('inference')}"
        ) from error
    return transformers


@dataclass(frozen=True)
class ServedModel:
    """A model's folder and what its core attention needs, without its weights.

    Attributes:
        path: folder of the model, or its name on the Hugging Face hub.
        config: configuration of transformers.
        shape: heads of a layer that a rank has.
        windows: for each layer how many earlier tokens a query sees; None: all.
        dtype: dtype of weights and rows.
        generation: generation config of transformers; None: another engine generates.
        tensor_parallel_size: ranks that share each layer.
        trust_remote_code: whether code of the model's folder may run.
        multimodal: configuration of the multimodal model whose language part this is.
            None: it is the whole model.
    """

    path: str
    config: PreTrainedConfig
    shape: AttentionShape
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    generation: GenerationConfig | None
    tensor_parallel_size: int = 1
    trust_remote_code: bool = False
    multimodal: PreTrainedConfig | None = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The files of the weights."""
        return Checkpoint(self.path, self.config, self.multimodal, self.trust_remote_code)

    @property
    def softcap(self) -> float | None:
        """Bound of the scores of attention; None without one, or if the family does not use it."""
        if self.config.model_type not in _SOFTCAPPED:
            return None
        cap = getattr(self.config, "attn_logit_softcapping", None)
        return None if cap is None else float(cap)

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The different masks of the layers."""
        return tuple(Mask(window) for window in dict.fromkeys(self.windows))

    @property
    def description(self) -> str:
        """Names the model by its sizes, wherever its folder lies."""
        config = self.config
        return f"{config.model_type}, {len(self.windows)} layers of {config.hidden_size}"

    @property
    def positions(self) -> int:
        """Most tokens of a sequence; with LongRoPE those before its frequencies change."""
        most = int(self.config.max_position_embeddings)
        rotary = getattr(self.config, "rope_parameters", None) or {}
        if rotary.get("rope_type") == "longrope":
            # Else a key would depend on how long its sequence was when it was kept.
            most = min(most, int(rotary["original_max_position_embeddings"]))
        return most

    @property
    def frequencies(self) -> str:
        """How rotary frequencies that depend on the longest sequence are chosen."""
        return "those of transformers' code"

    @property
    def frequencies_ask_host(self) -> bool:
        """Whether rotary frequencies follow the longest sequence, which the host then reads."""
        return "dynamic" in str(getattr(self.config, "rope_parameters", None))

    @property
    def quantization(self) -> str:
        """How weights are quantized."""
        return "none"

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a whole layer."""
        config = self.config
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end an answer, by the model's generation config."""
        ends = None if self.generation is None else self.generation.eos_token_id
        if ends is None:
            return frozenset()
        return frozenset([ends] if isinstance(ends, int) else ends)

    def load(
        self,
        device: torch.device,
        attention: str = IMPLEMENTATION,
        ranks: TensorRanks = ALONE,
    ) -> PreTrainedModel:
        """Checks and reads the weights, and returns the model.

        Args:
            device: device of the weights.
            attention: implementation of attention; others than ours are transformers' own.
            ranks: ranks that share each layer: this one reads its slice. One alone reads all.

        Raises:
            ValueError: the checkpoint does not have exactly the weights of the model.
            ImportError: accelerate is not installed, which loads to GPUs.
        """
        if device.type != "cpu" and importlib.util.find_spec("accelerate") is None:
            raise ImportError(f"models are loaded to GPUs by accelerate: {install('inference')}")
        if ranks.size > 1:
            model = load_slice(self.checkpoint, ranks, self.dtype, attention, device)
        else:
            model = self.checkpoint.load(self.dtype, attention, device=device)
        return model.to(device).eval()

    def runnable(
        self, device: torch.device, ranks: TensorRanks = ALONE, computes: bool = True
    ) -> RunnableModel:
        """Makes the model that runs on a rank.

        Args:
            device: device of the weights.
            ranks: ranks that share each layer.
            computes: whether this rank has weights; else it knows what its layers are, and serves
                them.

        Raises:
            ValueError: see `load`.
        """
        register(need_transformers())
        if computes:
            model, kernels = self.load(device, ranks=ranks), load_fused_kernels(device.type)
            of_experts = load_expert_kernels(device.type)
            if kernels is not None:
                fuse_layers(model, kernels)
            fused = of_experts is not None and fuse_experts(model, of_experts)
            asks_host = self.frequencies_ask_host
            if expert_count(self.config) > 0:
                asks_host |= not fused or products_ask_host(device, self.dtype)
            return TransformersModel(model, asks_host)
        return TransformersModel(self.checkpoint.outline(IMPLEMENTATION, self.dtype))


def read_model(
    path: str,
    dtype: torch.dtype,
    tensor_parallel_size: int = 1,
    trust_remote_code: bool = False,
    checks_weights: bool = True,
) -> ServedModel:
    """Reads a model's configuration, and refuses what cannot be served.

    Weights are not read, but their names and shapes are. Logs the parts of a multimodal model that
    are left out.

    Args:
        path: folder of the model, or its name on the Hugging Face hub.
        dtype: dtype of weights and rows.
        tensor_parallel_size: ranks that share each layer.
        trust_remote_code: whether code of the model's folder may run.
        checks_weights: False: not yet, but as they are loaded.

    Raises:
        ValueError: there is no such model, or its attention is not covered, or the ranks cannot
            share its layers evenly, or it does not have exactly the weights of its configuration.
        ImportError: transformers is not installed.
    """
    transformers = need_transformers()
    checkpoint = Checkpoint.read(path, trust_remote_code)
    config = checkpoint.config
    for each in (config, checkpoint.multimodal):
        _refuse_quantized(each, path)
    _refuse_uncovered(config, path)
    windows = _windows(config, path)
    if checks_weights and (left_out := checkpoint.check()):
        logger.warning("%s: %s left out: only text is answered", path, ", ".join(left_out))
    check_divides(config, tensor_parallel_size)
    of_rank = slice_config(config, tensor_parallel_size)
    shape = AttentionShape(
        of_rank.num_attention_heads,
        of_rank.num_key_value_heads,
        of_rank.head_dim,
        dtype_bytes=dtype.itemsize,
    )
    generation = _read_generation(transformers, path, config)
    ignored = [
        name
        for name, harmless in _NOT_APPLIED.items()
        if getattr(generation, name, None) not in (None, harmless)
    ]
    if checks_weights and ignored:
        logger.warning("%s: generation_config.json: not applied: %s", path, ", ".join(ignored))
    return ServedModel(
        path,
        config,
        shape,
        windows,
        dtype,
        generation,
        tensor_parallel_size,
        trust_remote_code,
        checkpoint.multimodal,
    )


def _read_generation(
    transformers: ModuleType, path: str, config: PreTrainedConfig
) -> GenerationConfig:
    """Reads the generation config, or makes one of the model's if there is none.

    Raises:
        ValueError: it cannot be read, or ends answers by what is no token.
    """
    try:
        generation = transformers.GenerationConfig.from_pretrained(path)
    except Exception as error:
        # A missing file raises the same error as a damaged one.
        if isinstance(error, OSError) and not (Path(path) / "generation_config.json").exists():
            return transformers.GenerationConfig.from_model_config(config)
        raise ValueError(
            f"{path}: generation_config.json cannot be read: correct or remove it"
        ) from None
    ends = generation.eos_token_id
    for each in ends if isinstance(ends, list) else [ends]:
        if each is not None and not isinstance(each, int):
            raise ValueError(
                f"{path}: eos_token_id in generation_config.json is {ends!r}: it must be a token "
                "id or a list of them"
            )
    return generation


def model_digest(model: ServedModel) -> bytes:
    """A digest of a model by its configuration and its files' sizes, wherever its folder lies."""
    config = {name: value for name, value in model.config.to_dict().items() if name[0] != "_"}
    folder = Path(model.path)
    sizes = sorted(
        (each.name, each.stat().st_size) for end in _WEIGHTS for each in folder.glob(end)
    )
    told = json.dumps([str(model.dtype), config, sizes], default=str, sort_keys=True)
    return hashlib.sha256(told.encode()).digest()


def expert_count(config: PreTrainedConfig) -> int:
    """Returns the number of experts that a token chooses among, or 0."""
    return next(filter(None, (getattr(config, name, None) for name in _EXPERTS)), 0)


def model_size(model: ServedModel) -> ModelSize:
    """The sizes of a whole model."""
    config, heads = model.config, model.config.num_attention_heads
    width, experts = int(config.intermediate_size), None
    if chosen := getattr(config, "num_experts_per_tok", None):
        of_expert = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        width, experts = 0, Experts(expert_count(config), chosen, of_expert)
    return ModelSize(
        layers=len(model.windows),
        hidden_size=int(config.hidden_size),
        heads=int(heads),
        kv_heads=model.kv_heads,
        head_dim=model.shape.head_dim,
        ffn_hidden_size=width,
        vocab_size=model.vocab_size,
        experts=experts,
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model, which runs no code of the model's folder.

    Args:
        path: folder of the model, or its name on the Hugging Face hub.

    Raises:
        ValueError: there is none.
    """
    try:
        return need_transformers().AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} has no tokenizer that can be read: add its tokenizer.json, or give token ids "
            "by --prompt-ids"
        ) from error


def _refuse_quantized(config: PreTrainedConfig | None, path: str) -> None:
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{path} has quantized weights, which are not loaded: choose another model"
        )


def _refuse_uncovered(config: PreTrainedConfig, path: str) -> None:
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{path} has multi-latent attention, which our attention does not compute: choose "
            "another model"
        )
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{path} is a {config.model_type}: only models of these families are supported: "
            f"{', '.join(FAMILIES)}"
        )


def _windows(config: PreTrainedConfig, path: str) -> tuple[int | None, ...]:
    """Earlier tokens that each layer's queries see; transformers counts the query's own, too.

    Raises:
        ValueError: the family's layers do not use the window or the kinds that are given, or lack a
            window.
    """
    family, layers = config.model_type, int(config.num_hidden_layers)
    window: int | None = getattr(config, "sliding_window", None)
    kinds: list[str] = getattr(config, "layer_types", None) or []
    used = ["full_attention" if window is None else "sliding_attention"] * layers
    if family in _WINDOW_BY_LAYER:
        used = kinds or used
    elif window is not None and family not in _WINDOW_OF_ALL:
        raise ValueError(
            f"{path}: config.json of a {family} has sliding_window, which its layers do not use: "
            "remove it"
        )
    elif kinds and kinds != used:
        raise ValueError(
            f"{path}: config.json of a {family} has layer_types, which its layers do not use: "
            "remove them"
        )
    unknown = {*used} - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"{path}: layers with {', '.join(sorted(unknown))} are not served")
    if window is None and "sliding_attention" in used:
        raise ValueError(
            f"{path}: config.json has layers of sliding_attention, but no sliding_window: add it"
        )
    near = None if window is None else window - 1
    return tuple(near if kind == "sliding_attention" else None for kind in used)

"""Settings of the connector, checked before vLLM loads a model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.platforms import current_platform

from distca.prefill.address import own_host
from distca.prefill.client import LANDING_BYTES
from distca.prefill.facts import (
    are_weights_there,
    frequencies_of_vllm,
    model_facts,
    model_folder,
)
from distca.prefill.inquiry import ask_ranks
from distca.prefill.messages import TRANSFERS, TransferChoice, TransferName
from distca.vllm.families import quantization

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PREFIX = "distca_"


@dataclass(frozen=True)
class Settings:
    """What `kv_connector_extra_config` says, as `distca_` and a name of these.

    Attributes:
        address: where `distca prefill` listens, `tcp://HOST:PORT`.
        min_tokens: prompts of fewer tokens that vLLM does not have yet are vLLM's own.
        connect_seconds: how long a worker waits for the ranks at its start.
        transfer: how keys and values come, `nixl`, `tcp`, or `auto`: by NIXL where both sides have
            it.
        landing_bytes: memory of each worker into which ranks write by NIXL, at most.

    Raises:
        ValueError: a value cannot be used; the message says what to change.
    """

    address: str
    min_tokens: int = 1024
    connect_seconds: float = 10.0
    transfer: TransferChoice = "auto"
    landing_bytes: int = LANDING_BYTES

    def __post_init__(self) -> None:
        if not isinstance(self.address, str):
            raise ValueError(f"distca_address {self.address}: give an address as tcp://HOST:PORT")
        try:
            own_host(self.address)
        except ValueError as error:
            raise ValueError(f"distca_address {error}") from None
        if type(self.min_tokens) is not int or self.min_tokens < 1:
            raise ValueError(f"distca_min_tokens {self.min_tokens!r}: give a number of at least 1")
        if type(self.connect_seconds) not in (int, float) or not 0 <= self.connect_seconds <= 3600:
            raise ValueError(
                f"distca_connect_seconds {self.connect_seconds!r}: give seconds from 0 to 3600"
            )
        if self.transfer not in get_args(TransferChoice):
            raise ValueError(
                f"distca_transfer {self.transfer!r}: choose from "
                f"{', '.join(get_args(TransferChoice))}"
            )
        if self.transfer == "nixl" and find_spec("nixl") is None:
            raise ValueError("distca_transfer 'nixl': NIXL is not installed here")
        if type(self.landing_bytes) is not int or self.landing_bytes < 1:
            raise ValueError(
                f"distca_landing_bytes {self.landing_bytes!r}: give a number of at least 1"
            )

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Reads `kv_connector_extra_config`.

        Raises:
            ValueError: a setting is missing, not known, or cannot be used.
        """
        names = [_PREFIX + field.name for field in fields(cls)]
        for name in extra:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                meant = f" (is {near[0]} meant?)" if near else ""
                raise ValueError(
                    f"kv_connector_extra_config has no setting {name}{meant}: choose from "
                    f"{', '.join(names)}"
                )
        if not extra.get("distca_address"):
            raise ValueError(
                "DistCAConnector needs to know where `distca prefill` listens: add "
                '"kv_connector_extra_config": {"distca_address": "tcp://HOST:PORT"} to '
                "--kv-transfer-config"
            )
        return cls(**{name.removeprefix(_PREFIX): value for name, value in extra.items()})


def checked_settings(config: VllmConfig) -> Settings:
    """Returns the connector's settings, or refuses what cannot work with it.

    Raises:
        ValueError: it cannot work; the message says what to change.
    """
    transfer = config.kv_transfer_config
    settings = Settings.of(transfer.kv_connector_extra_config)
    if transfer.kv_role == "kv_producer":
        raise ValueError(
            'DistCAConnector only receives: give "kv_role": "kv_consumer" instead of '
            '"kv_producer" in --kv-transfer-config'
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            'DistCAConnector needs "kv_load_failure_policy": "recompute" in --kv-transfer-config: '
            "else requests fail where the prefill ranks do"
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            "DistCAConnector knows no pipeline stages: leave --pipeline-parallel-size out"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(config.parallel_config, name, 1) > 1:
            raise ValueError(
                "DistCAConnector writes blocks that lie whole in each process of vLLM: leave "
                f"--{name.replace('_', '-')} out"
            )
    kept = config.cache_config.cache_dtype
    if kept not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
        raise ValueError(
            f"DistCAConnector writes keys and values as the model has them, not as {kept}: leave "
            "--kv-cache-dtype out"
        )
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in ("ngram", "suffix"):
        raise ValueError(
            f"DistCAConnector fills no layers of a draft model, as the method {drafts.method} of "
            "--speculative-config has: leave it out, or use ngram"
        )
    if config.model_config.use_mla:
        _check_latents(config)
    return settings


def engine_facts(config: VllmConfig) -> dict[str, str]:
    """Returns what an engine whose model is loaded tells the prefill ranks of it.

    Raises:
        ValueError: the model is in no folder.
    """
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    frequencies = frequencies_of_vllm(model.max_model_len)
    quantized = quantization(model)
    return model_facts(model.hf_text_config, _folder(config), dtype, frequencies, quantized)


def refusal_of_ranks(config: VllmConfig, settings: Settings) -> str | None:
    """Asks the prefill ranks, before the model is loaded, whether they would work for vLLM.

    Returns:
        Why they would not; None: they would, or nobody answers, or the model is not there yet.
    """
    try:
        facts, folder = engine_facts(config), _folder(config)
    except ValueError:
        return None
    if not are_weights_there(folder):
        # They are downloaded later, and vLLM's workers tell of them.
        del facts["weights"]
    transfers: tuple[TransferName, ...] = ("tcp",)
    if settings.transfer == "nixl":
        transfers = ("nixl",)
    elif settings.transfer == "auto" and find_spec("nixl") is not None:
        transfers = TRANSFERS
    return ask_ranks(settings.address, facts, transfers, settings.connect_seconds)


def _folder(config: VllmConfig) -> str:
    """Returns the folder of the model."""
    model = config.model_config
    return model_folder(str(model.model), model.revision, config.load_config.download_dir)


def _check_latents(config: VllmConfig) -> None:
    """Refuses multi-latent attention where it was not proved.

    Raises:
        ValueError: it was not.
    """
    model = config.model_config
    if not current_platform.is_cpu():
        raise ValueError(
            f"DistCAConnector: {model.model} has multi-latent attention, which prefill ranks "
            "compute only on CPUs"
        )
    rotary = getattr(model.hf_text_config, "rope_parameters", None) or {}
    off = f"-{RotaryEmbedding.name}"
    operators = config.compilation_config.custom_ops
    if rotary.get("rope_type") == "default" and "all" in operators and off not in operators:
        raise ValueError(
            f"{model.model} has multi-latent attention, and vLLM's kernel for CPUs rotates its "
            f'queries wrongly: add --compilation-config \'{{"custom_ops": ["{off}"]}}\''
        )

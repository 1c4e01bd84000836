"""Small checkpoints with quantized weights, in the formats that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
"""Inputs that share a scale, where weights have four bits."""

_MIDDLE = 8
"""What stands for 0 in four bits."""


def _int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Eight bits, and a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    quantized = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {name: quantized, f"{name}_scale": scale}


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Four bits, 0 to 15, `[outputs, inputs]`, and scales, `[outputs, groups]`."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2).clamp(min=1e-8) / 7
    four = (groups / scale[..., None]).round().clamp(-8, 7) + _MIDDLE
    return four.flatten(1).to(torch.int32), scale


def _packed(values: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight values of the last dimension in each int32, the first of `order` in the lowest bits."""
    eights = values.unflatten(-1, (-1, 8))[..., list(order)].to(torch.int64)
    whole = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(whole < 1 << 31, whole, whole - (1 << 32)).to(torch.int32)


def _pack(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Four bits, packed as compressed-tensors does."""
    four, scale = _int4(weight)
    shape = torch.tensor(weight.shape)
    return {f"{name}_packed": _packed(four), f"{name}_scale": scale, f"{name}_shape": shape}


def _gptq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Four bits, packed along the inputs, and what stands for 0, less one."""
    four, scale = _int4(weight)
    stem, zeros = name.removesuffix("weight"), torch.full_like(scale.t(), _MIDDLE - 1)
    return {
        f"{stem}qweight": _packed(four).t(),
        f"{stem}qzeros": _packed(zeros),
        f"{stem}scales": scale.t(),
        f"{stem}g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Four bits, packed along the outputs in AWQ's order, and what stands for 0."""
    four, scale = _int4(weight)
    stem, order = name.removesuffix("weight"), (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{stem}qweight": _packed(four.t(), order),
        f"{stem}qzeros": _packed(torch.full_like(scale.t(), _MIDDLE), order),
        f"{stem}scales": scale.t(),
    }


def _config(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str) -> Any:
    """`quantization_config` of compressed-tensors."""
    groups = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": groups},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_EIGHT = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}

_FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


@dataclass(frozen=True)
class Kind:
    """A kind of quantized weights.

    Attributes:
        of_weight: function of a weight's name and values, which returns what stands for it.
        config: `quantization_config` of the checkpoint.
        dtype: dtype in which vLLM computes with it.
    """

    of_weight: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
    config: Mapping[str, Any]
    dtype: torch.dtype = torch.float32


KINDS: dict[str, Kind] = {
    "compressed-tensors int-quantized": Kind(
        _int8,
        _config(
            {**_EIGHT, "strategy": "channel"},
            {**_EIGHT, "strategy": "token", "dynamic": True},
            "int-quantized",
        ),
    ),
    # vLLM's kernel of four bits has no float32.
    "compressed-tensors pack-quantized": Kind(
        _pack, _config(_FOUR, None, "pack-quantized"), torch.bfloat16
    ),
    "gptq": Kind(
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        torch.bfloat16,
    ),
    "awq": Kind(
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
        torch.bfloat16,
    ),
}
"""By the names that the handshake has."""


def quantize(folder: Path, kind: str) -> None:
    """Quantizes the projections of a checkpoint."""
    chosen = KINDS[kind]
    (path,) = folder.glob("*.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path).items():
        if name.endswith("proj.weight"):
            found |= chosen.of_weight(name, weight.float())
        else:
            found[name] = weight
    save_file({name: each.contiguous() for name, each in found.items()}, path, {"format": "pt"})
    told = folder / "config.json"
    told.write_text(
        json.dumps(json.loads(told.read_text()) | {"quantization_config": chosen.config})
    )

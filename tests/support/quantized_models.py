"""Small checkpoints with quantized weights, in the formats that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def _int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Eight bits, and a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    quantized = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {name: quantized, f"{name}_scale": scale}


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

KINDS: dict[str, tuple[Callable[[str, torch.Tensor], dict[str, torch.Tensor]], Any]] = {
    "compressed-tensors int-quantized": (
        _int8,
        _config(
            {**_EIGHT, "strategy": "channel"},
            {**_EIGHT, "strategy": "token", "dynamic": True},
            "int-quantized",
        ),
    ),
}
"""By the names that the handshake has."""


def quantize(folder: Path, kind: str) -> None:
    """Quantizes the projections of a checkpoint."""
    of_weight, config = KINDS[kind]
    (path,) = folder.glob("*.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path).items():
        if name.endswith("proj.weight"):
            found |= of_weight(name, weight.float())
        else:
            found[name] = weight
    save_file({name: each.contiguous() for name, each in found.items()}, path, {"format": "pt"})
    told = folder / "config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"quantization_config": config}))

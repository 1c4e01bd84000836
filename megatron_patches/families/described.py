"""What all families add to mbridge's description of them.

A class describes the model by a namespace of megatron-core's names instead of megatron-core's
configuration, which needs a GPU's packages, and whose fields differ between versions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from distca.checkpoints.stored_weights import StoredTensor
from megatron_patches.families.rotary import main_rope_parameters, rotary_flags


class OlderConfig:
    """A configuration of transformers 5 by the names of transformers 4, which mbridge reads."""

    def __init__(self, config: Any) -> None:
        rope = main_rope_parameters(config)
        heads = config.num_attention_heads
        self._config = config
        self._changed = {
            "rope_theta": rope["rope_theta"],
            # Scaled angles are described by `rotary_flags` of the classes below.
            "rope_scaling": None,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        }

    def __getattr__(self, name: str) -> Any:
        changed = self.__dict__["_changed"]
        return changed[name] if name in changed else getattr(self.__dict__["_config"], name)

    def __contains__(self, name: str) -> bool:
        return name in self._changed or hasattr(self._config, name)


class Described:
    """What the classes here add to mbridge's.

    Attributes:
        supported: values of `config.json` that are converted, by name. A name that a configuration
            lacks is passed over.
        turns_part: whether transformers turns a part of keys by `partial_rotary_factor`.
        has_windows: whether attention may have windows.
        reads_layer_types: whether transformers reads in `layer_types` which layers have windows.
    """

    TransformerConfigClass = SimpleNamespace
    supported: ClassVar[dict[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
    turns_part: ClassVar[bool] = False
    has_windows: ClassVar[bool] = False
    reads_layer_types: ClassVar[bool] = False
    hf_config: Any

    def _build_config(self) -> SimpleNamespace:
        described: SimpleNamespace = super()._build_config()  # type: ignore[misc]
        vars(described).update(self.mends())
        return described

    def _adjust_mapping_for_shared_weights(self) -> None:
        """Does nothing: mbridge would change the tables of all models of the class."""

    def mends(self) -> dict[str, Any]:
        """Returns what mbridge says wrongly or not at all, by megatron-core's names."""
        return {}

    def rotary_flags(self) -> list[str]:
        """Returns the flags of the rotary embedding.

        Raises:
            ValueError: Megatron-LM has none for it.
        """
        return rotary_flags(self.hf_config)

    def layers(self) -> str | None:
        """Returns the layers of `megatron_patches.model.gemma` that it has; None: Megatron's."""
        return None

    def sources(self, name: str) -> list[str]:
        """Returns the names in transformers of what becomes one of Megatron's weights."""
        found: list[str] = self._weight_name_mapping_mcore_to_hf(name)  # type: ignore[attr-defined]
        return found

    def read(self, name: str, tensor: StoredTensor) -> torch.Tensor:
        """Reads the part of a source that becomes one of Megatron's weights."""
        return tensor[:]


class Windowed(Described):
    """A family whose attention may have windows."""

    has_windows: ClassVar = True

    def mends(self) -> dict[str, Any]:
        return windows(self.hf_config)


def check_layer_types(family: type[Described], config: Any) -> None:
    """Checks that layers have windows as transformers' model of the family has them.

    Raises:
        ValueError: they have not, or are of another kind.
    """
    kinds = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None) if family.has_windows else None
    wanted = ["sliding_attention" if window is not None else "full_attention"]
    slide = window is not None
    if family.reads_layer_types:
        wanted = ["full_attention", "sliding_attention"]
        slide = "sliding_attention" in kinds
    for kind in kinds:
        if kind not in wanted:
            raise ValueError(
                f"layer_types in config.json has {kind!r}: of {config.model_type} with "
                f"sliding_window {window} only models with {' and '.join(wanted)} are converted"
            )
    if slide and (not window or window < 1):
        found = "null" if window is None else window
        raise ValueError(f"sliding_window in config.json is {found}, but layers are to have one")


def windows(config: Any) -> dict[str, Any]:
    """Returns the attention windows of a model's layers, by megatron-core's names.

    A query sees itself and the window's other tokens before it.
    """
    window = getattr(config, "sliding_window", None)
    if not window:
        return {}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    slides = [int(kind == "sliding_attention") for kind in kinds]
    if not any(slides):
        return {}
    found: dict[str, Any] = {"window_size": (window - 1, 0)}
    return found if all(slides) else found | {"window_attn_skip_freq": slides}

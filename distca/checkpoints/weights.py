"""Checks that a checkpoint has exactly the weights of its language model, and loads them.

`distca generate`, `distca prefill` and `distca convert` read through `Checkpoint`. Every parameter
must come from the checkpoint or be tied by the configuration, and every tensor must be used or
belong to a part that is left out, such as a vision tower. transformers maps the names.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from distca.checkpoints.config_values import check_file, check_values
from distca.checkpoints.hub import check_path
from distca.checkpoints.problems import Source, find_problems
from distca.checkpoints.stored_weights import (
    Content,
    StoredTensor,
    Where,
    abbreviated,
    open_tensors,
)

if TYPE_CHECKING:
    from transformers import AutoModel, PreTrainedConfig, PreTrainedModel


_CPU = torch.device("cpu")

Cut: TypeAlias = Callable[[str, StoredTensor], torch.Tensor]
"""Reads a part of a stored tensor, by the tensor's name."""

MULTIMODAL = ("gemma3", "internvl", "llava", "mistral3")
"""Multimodal models, by `model_type`, whose language part was held against transformers' own."""


@dataclass(frozen=True)
class _FiniteContent:
    """Content of a stored tensor; each part is checked for NaN and infinity as it is read.

    Kernels of attention may take a NaN score for a masked one, so NaN in weights of queries and
    keys does not always reach the logits.

    Attributes:
        name: name of the tensor.
        content: its content.
        dtype: data type of the model, in which it must be finite, too.
        not_finite: names of those that are not; is appended to.
    """

    name: str
    content: Content
    dtype: torch.dtype
    not_finite: list[str]

    def __getitem__(self, where: Where) -> torch.Tensor:
        part = self.content[where]
        if not part.to(self.dtype).isfinite().all():
            self.not_finite.append(self.name)
        return part


@dataclass(frozen=True)
class _CutContent:
    """The part of a stored tensor that a slice of the model has, read when it is asked for.

    Attributes:
        name: name of the tensor.
        whole: the tensor.
        cut: reads the part, by the tensor's name.
    """

    name: str
    whole: StoredTensor
    cut: Cut

    def __getitem__(self, where: object) -> torch.Tensor:
        assert where is ..., "transformers asks for all of a value"
        return self.cut(self.name, self.whole)


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face model whose language part is loaded.

    Attributes:
        path: folder of the model, or its name on the Hugging Face hub.
        config: configuration of the language model.
        multimodal: configuration of the multimodal model that it is a part of; None: it is alone.
        trust_remote_code: whether code of the model's folder may run.
    """

    path: str
    config: PreTrainedConfig
    multimodal: PreTrainedConfig | None = None
    trust_remote_code: bool = False

    @classmethod
    def read(cls, path: str, trust_remote_code: bool = False) -> Checkpoint:
        """Reads a model's configuration.

        Args:
            path: folder of the model, or its name on the Hugging Face hub.
            trust_remote_code: whether code of the model's folder may run.

        Raises:
            ValueError: there is no configuration, or it cannot be read, or has values that make no
                model, or it is of a multimodal model that is not covered.
        """
        from transformers import AutoConfig

        check_path(path)
        if Path(path).is_file():
            raise ValueError(f"{path} is a file, not a folder: give the folder of a model")
        if Path(path).exists() and not (Path(path) / "config.json").is_file():
            raise ValueError(
                f"{path} has no config.json: give the folder of a model of transformers"
            )
        if Path(path).exists():
            check_file(Path(path))
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            text = config.get_text_config(decoder=True)
        # What values of a wrong kind raise is up to each family's configuration.
        except Exception as error:
            raise ValueError(f"no model can be read from {path}: {_reason(error)}") from None
        check_values(text, path)
        if text is config:
            return cls(path, config, None, trust_remote_code)
        if config.model_type not in MULTIMODAL:
            raise ValueError(
                f"{path} is a {config.model_type}, which is not supported. Multimodal models whose "
                f"language part can be loaded: {', '.join(MULTIMODAL)}"
            )
        text = copy.deepcopy(text)
        # The whole model's configuration says whether embeddings are tied.
        text.tie_word_embeddings = config.tie_word_embeddings
        return cls(path, text, config, trust_remote_code)

    def language_values(self) -> dict[str, Any]:
        """Returns `config.json` of the language model, as its folder has it where it is alone."""
        if self.multimodal is None:
            values: dict[str, Any] = json.loads(
                (Path(self.path) / "config.json").read_text(encoding="utf-8")
            )
            return values
        return {**self.config.to_dict(), "architectures": [type(self.outline()).__name__]}

    def outline(
        self, attention: str | None = None, dtype: torch.dtype = torch.float32
    ) -> PreTrainedModel:
        """Makes the language model without weights, on the meta device.

        Args:
            attention: implementation of attention; None: transformers' default.
            dtype: data type of its parameters.

        Raises:
            ValueError: the configuration describes no model.
        """
        from transformers import AutoModelForCausalLM

        named = {} if attention is None else {"attn_implementation": attention}
        return self._outline(AutoModelForCausalLM, self.config, dtype=dtype, **named)

    def check(self) -> tuple[str, ...]:
        """Compares names, shapes and data types with the model, without reading weights.

        Returns:
            The parts of the checkpoint that are left out, as `model.vision_tower`.

        Raises:
            ValueError: the checkpoint does not have exactly the weights of its model.
        """
        with self._opened(self.outline()) as (_, left_out):
            return left_out

    def load(
        self,
        dtype: torch.dtype,
        attention: str | None = None,
        config: PreTrainedConfig | None = None,
        cut: Cut | None = None,
        device: torch.device = _CPU,
    ) -> PreTrainedModel:
        """Checks and reads the weights; returns the language model.

        Each tensor goes to the device as soon as it is read, so that the host never has all.

        Args:
            dtype: data type of the weights.
            attention: implementation of attention; None: transformers' default.
            config: configuration of a slice of the model; None: the whole model.
            cut: reads the part of a tensor that the slice has, by the tensor's name.
            device: device of the weights; others than the CPU need accelerate.

        Raises:
            ValueError: the checkpoint does not have exactly the weights of its model, or what is
                read is not finite in `dtype`.
        """
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        outline = self.outline()
        named: dict[str, object] = {} if attention is None else {"attn_implementation": attention}
        if device != _CPU:
            named["device_map"] = {"": device}
        with self._opened(outline) as (tensors, _):
            not_finite: list[str] = []
            weights = {
                name: replace(each, content=_FiniteContent(name, each.content, dtype, not_finite))
                for name, each in tensors.items()
            }
            if cut is not None:
                weights = {
                    name: replace(each, content=_CutContent(name, each, cut))
                    for name, each in weights.items()
                }
            try:
                model, report = type(outline).from_pretrained(
                    None,
                    # Loading writes the implementation into it.
                    config=copy.deepcopy(self.config if config is None else config),
                    state_dict=weights,
                    dtype=dtype,
                    output_loading_info=True,
                    **named,
                )
            except RuntimeError as error:
                raise ValueError(
                    f"{self.path}: transformers cannot load it: {_reason(error)}"
                ) from None
        self._refuse_not_finite(not_finite, dtype)
        # Such as a slice that no whole shape shows to be wrong.
        left = [name for kind in ("missing_keys", "mismatched_keys") for name in report[kind]]
        if left:
            names = [str(each if isinstance(each, str) else each[0]) for each in left]
            raise self._refused([f"{len(names)} cannot be loaded: {abbreviated(sorted(names))}"])
        return model

    @contextmanager
    def opened(self, dtype: torch.dtype) -> Iterator[dict[str, StoredTensor]]:
        """Checks and opens the weights, and gives them by the names under which they are saved.

        They are read as they are asked for. Where embeddings are tied, the input's alone are given.

        Args:
            dtype: data type in which what is read must be finite.

        Raises:
            ValueError: the checkpoint does not have exactly the weights of its model; or, when it
                is closed, what was read is not finite in `dtype`.
        """
        outline, not_finite = self.outline(), list[str]()
        prefix, whole = f"{outline.base_model_prefix}.", outline.state_dict()
        with self._opened(outline) as (tensors, _):
            found = {
                # Where the base model was saved alone, names lack its prefix.
                name
                if name.startswith(prefix) or f"{prefix}{name}" not in whole
                else f"{prefix}{name}": replace(
                    each, content=_FiniteContent(name, each.content, dtype, not_finite)
                )
                for name, each in tensors.items()
            }
            yield self._without_tied_head(found, outline)
        self._refuse_not_finite(not_finite, dtype)

    def _without_tied_head(
        self, tensors: dict[str, StoredTensor], outline: PreTrainedModel
    ) -> dict[str, StoredTensor]:
        for tied, shared in outline.all_tied_weights_keys.items():
            if tied not in tensors:
                continue
            own = tensors.pop(tied)
            if shared in tensors and not torch.equal(own[:], tensors[shared][:]):
                raise ValueError(
                    f"{self.path}: config.json ties embeddings, but {tied} differs from {shared}: "
                    'set "tie_word_embeddings": false'
                )
            tensors.setdefault(shared, own)
        return tensors

    def _refuse_not_finite(self, found: Sequence[str], dtype: torch.dtype) -> None:
        if found:
            names = sorted(set(found))
            raise ValueError(
                f"{self.path} has weights that are not finite in {str(dtype).split('.')[-1]}, "
                f"{len(names)} tensors: {abbreviated(names)}: download or convert the model again"
            )

    def _outline(
        self, kind: type[AutoModel], config: PreTrainedConfig, **named: object
    ) -> PreTrainedModel:
        try:
            with torch.device("meta"):
                return kind.from_config(
                    copy.deepcopy(config), trust_remote_code=self.trust_remote_code, **named
                )
        # Values that make no model raise whatever the layer that they reach does.
        except Exception as error:
            raise ValueError(
                f"{self.path}: config.json describes no model: {_reason(error)}"
            ) from None

    def _refused(self, problems: Sequence[str]) -> ValueError:
        return ValueError(
            f"{self.path}: the weights are not those of the model in config.json: "
            f"{'; '.join(problems)}: correct config.json, or save the model again with "
            "transformers' save_pretrained"
        )

    @contextmanager
    def _opened(
        self, outline: PreTrainedModel
    ) -> Iterator[tuple[dict[str, StoredTensor], tuple[str, ...]]]:
        """Opens the tensors of the language model, by names that its class reads, and checks them.

        Args:
            outline: the language model without weights.
        """
        with open_tensors(self.path) as stored:
            names = {name: name for name in stored}
            left_out: tuple[str, ...] = ()
            if self.multimodal is not None:
                names, left_out = self._language_names(outline, list(stored))
            predicting = self._layers_that_predict_more(names.values())
            names = {old: new for old, new in names.items() if _layer_of(new) not in predicting}
            left_out = (*left_out, *(f"model.layers.{layer}" for layer in predicting))
            rename, computed = _renaming(outline, converts=True), _computed_buffers(outline)
            expected = {name: tuple(each.shape) for name, each in outline.state_dict().items()}
            sources = []
            for name, renamed in names.items():
                target, pattern = rename(renamed)
                if target in expected or not computed.search(target):
                    tensor = stored[name]
                    sources.append(Source(name, target, pattern, tensor.shape, tensor.dtype))
            problems = find_problems(expected, sources, outline.all_tied_weights_keys)
            if problems:
                raise self._refused(problems)
            yield {names[each.name]: stored[each.name] for each in sources}, left_out

    def _layers_that_predict_more(self, names: Iterable[str]) -> list[int]:
        """Returns the layers for multi-token prediction, which transformers leaves out, too."""
        if not getattr(self.config, "num_nextn_predict_layers", None):
            return []
        layers = {_layer_of(name) for name in names}
        return sorted(each for each in layers if each >= self.config.num_hidden_layers)

    def _language_names(
        self, outline: PreTrainedModel, stored: Sequence[str]
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """Maps names of a multimodal checkpoint to those of its language model.

        Args:
            outline: the language model without weights.
            stored: names of the checkpoint.

        Returns:
            The new name of each tensor but those of other parts; the names of these parts.
        """
        from transformers import AutoModelForImageTextToText

        whole = self._outline(AutoModelForImageTextToText, self.multimodal)
        moved = {
            _path_of(whole, whole.get_decoder()): outline.base_model_prefix,
            _path_of(whole, whole.get_output_embeddings()): _path_of(
                outline, outline.get_output_embeddings()
            ),
        }
        parts = _parts_beside(whole, list(moved))
        rename = _renaming(whole, converts=False)
        names, left_out = {}, set()
        for name in stored:
            full, _ = rename(name)
            part = next((each for each in parts if full.startswith(f"{each}.")), None)
            if part is not None:
                left_out.add(part)
                continue
            for old, new in moved.items():
                if full.startswith(f"{old}."):
                    full = new + full.removeprefix(old)
                    break
            names[name] = full
        return names, tuple(sorted(left_out))


def _renaming(model: PreTrainedModel, converts: bool) -> Callable[[str], tuple[str, str | None]]:
    """Returns transformers' mapping of names of checkpoints to names of a model's parameters.

    Args:
        model: the model.
        converts: whether tensors that are joined are given the name of what they become.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping, parameters = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)] * converts

    def rename(name: str) -> tuple[str, str | None]:
        prefix = model.base_model_prefix
        found = rename_source_key(name, renamings, converters, prefix, parameters)
        if found[0] not in parameters and name in parameters:
            return name, None
        return found[0], found[1]

    return rename


def _reason(error: Exception) -> str:
    """Returns an error's message as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _layer_of(name: str) -> int:
    """Returns the layer that a tensor is of; -1: none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _path_of(model: torch.nn.Module, module: torch.nn.Module) -> str:
    return next(name for name, each in model.named_modules() if each is module)


def _parts_beside(model: torch.nn.Module, paths: Sequence[str]) -> list[str]:
    """Returns the paths of a model's modules that are neither inside nor ancestors of `paths`."""
    around = {""}
    for path in paths:
        words = path.split(".")
        around |= {".".join(words[:count]) for count in range(1, len(words))}
    children = [
        f"{parent}.{name}".lstrip(".")
        for parent in sorted(around)
        for name, _ in model.get_submodule(parent).named_children()
    ]
    return [path for path in children if path not in around and path not in paths]


def _computed_buffers(model: torch.nn.Module) -> re.Pattern[str]:
    """Returns a pattern of buffers that models compute, and that old checkpoints have."""
    names = {name.split(".", 1)[-1] for name, _ in model.named_buffers()}
    # Layers had them before the model had one for all.
    names.add("rotary_emb.inv_freq")
    return re.compile(rf"(^|\.)({'|'.join(re.escape(name) for name in sorted(names))})$")

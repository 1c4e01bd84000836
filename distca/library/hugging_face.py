"""Models of Hugging Face transformers with DistCA's core attention.

    register()
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="distca")
    planner = Planner(**planner_arguments(model.config, torch.bfloat16))
    batch = planner.place(documents)
    loss = model(**inputs_of(batch)).loss
    loss.backward()

The losses and gradients of all ranks add up to those of the mean over the micro-batch: sum them
over the group's ranks. DistributedDataParallel and FSDP take the mean over the ranks, so multiply
the loss by the number of ranks (see `examples/`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distca.cost.volume import AttentionShape
from distca.library.batch import Batch, Progress
from distca.library.documents import IGNORED
from distca.library.model_masks import LayerMask, NoMask, mask_of_layer, mask_of_layers
from distca.library.operation import core_attention
from distca.library.planner import find_planner
from distca.plan import Mask

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IMPLEMENTATION = "distca"
"""Value of `attn_implementation`."""
_PADDED = "distca_padded"
"""Argument of models: whether their only row is padding."""
OFFSET_POSITIONS = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
"""Types of models whose positions do not begin with 0."""
_OF_LOSS = ("shift_labels", "num_items_in_batch")
"""Arguments of models without which labels give another loss."""


def register() -> None:
    """Makes `attn_implementation="distca"` known to transformers.

    Raises:
        ImportError: transformers is not installed, or older than 5.
    """
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(
            f"transformers {transformers.__version__} is too old: pip install 'transformers>=5'"
        )
    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_of_layers)


def planner_arguments(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns what `Planner` must know of a model: `shape`, `masks`, `softcap` and `vocabulary`.

    Args:
        config: configuration of a decoder.
        dtype: dtype of queries, keys and values. Under autocast, and with a mixed-precision policy
            of FSDP, it is not that of the weights.

    Raises:
        ValueError: the model has layers, masks or rotary embeddings that cannot be shared, or its
            type takes no other attention or no positions. Code of a model that transformers don't
            have is not looked at: compare its loss with one process's.
    """
    config = config.get_text_config()
    _refuse_models(config)
    _refuse_families(config)
    # A configuration may have one for each layer, which is an `AttributeError`.
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(
            f"models of the type {config.model_type} are not supported, since their configuration "
            "has no one num_attention_heads of all layers: use another model"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {
        "shape": AttentionShape(heads, kv_heads, head_dim, dtype.itemsize),
        "masks": _masks_of(config),
        "softcap": getattr(config, "attn_logit_softcapping", None),
        "vocabulary": config.vocab_size,
    }


def _refuse_models(config: PreTrainedConfig) -> None:
    """Refuses models whose answers would be silently wrong.

    Raises:
        ValueError: the model is one of these.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    for kind in kinds:
        name = kind.get("rope_type", kind.get("type", "default"))
        if name in ("longrope", "dynamic"):
            raise ValueError(
                f"rotary embeddings of the type {name} depend on the longest position of a rank, "
                "and ranks have parts of documents: use another model"
            )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError("latent attention (MLA) is not supported here: use another model")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{config.model_type} is no decoder: use another model")


def _refuse_families(config: PreTrainedConfig) -> None:
    """Refuses types of models whose code has an attention or positions of its own.

    Raises:
        ValueError: the model is one of these.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.model_type in OFFSET_POSITIONS:
        raise ValueError(
            f"models of the type {config.model_type} are not supported, since they count positions "
            "from padding_idx + 1: use another model"
        )
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None:
        return
    # The flag is not set for all that look their attention up.
    looks_up = model._supports_attention_backend
    looks_up |= hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not looks_up:
        raise ValueError(
            f"models of the type {config.model_type} are not supported, since they take no "
            "attention but their own: use another model"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"models of the type {config.model_type} are not supported, since they take no "
            "position_ids, and ranks have parts of documents: use another model"
        )


def _masks_of(config: PreTrainedConfig) -> tuple[Mask, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    masks = {"full_attention": Mask()}
    if window is not None:
        # transformers count the query's own token.
        masks["sliding_attention"] = Mask(window_left=window - 1)
    for kind in kinds:
        if kind not in masks:
            raise ValueError(f"layers of the kind {kind} are not supported: use another model")
    return tuple(mask for kind, mask in masks.items() if kind in kinds)


class _Targets(int):
    """Number of targets, by which a model divides its loss: until core attention has run, it
    refuses.

    A model that does not call our attention computes the rest of its loss as others do, so that
    nothing else would see it. A compiled model is traced before anything has run.
    """

    progress: Progress

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        for each in args:
            if isinstance(each, cls) and not torch.compiler.is_compiling():
                each.check()
        plain = [int(each) if isinstance(each, cls) else each for each in args]
        return function(*plain, **(kwargs or {}))

    def check(self) -> None:
        """Raises a `ValueError` if core attention has not run."""
        if not self.progress.attended:
            raise ValueError(
                "the model gives a loss, but has not called DistCA's core attention: make it with "
                'attn_implementation="distca", and give each model a config of its own. If it '
                "was, models of its type are not supported"
            )


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Returns the arguments of a causal language model for this rank's tokens, `[1, rows]` each.

    A rank without tokens has one row of padding, since models need one. No token sees it, and it
    has no label. `Batch.loss` and `Batch.gather` leave it out.

    Leave the arguments as they are: the model refuses another `attention_mask`. If it hands its
    arguments on to its attention, it also refuses other positions, and a lack of `shift_labels` or
    `num_items_in_batch` alone.

    The loss that the model then returns is divided by the targets of all ranks. With trees there
    are no labels: give the model's logits to `Batch.loss`. The `attention_mask` is no tensor: a
    model with another `attn_implementation` looks at it, and raises a `ValueError`. So does a loss
    of transformers of a planner's first batches, if the model has not called our attention; losses
    of other code, and with another `num_items_in_batch`, do not.
    """
    padded = not len(batch.tokens)
    arguments = {
        "input_ids": _padded(batch.tokens, 0),
        "attention_mask": NoMask(),
        "position_ids": _padded(batch.positions, 0),
        "use_cache": False,
        IMPLEMENTATION: batch.handle,
        _PADDED: padded,
    }
    if batch.nodes.have_trees:
        return arguments
    targets = _padded(batch.targets, IGNORED)
    # The model would shift labels, but the next token may be on another rank. A micro-batch may be
    # all prompt.
    labels = {"labels": targets, "shift_labels": targets}
    number = max(batch.num_targets, 1)
    if batch.progress.first:
        # Later on a plain number: compiled models would be compiled again for each other one.
        number = _Targets(number)
        number.progress = batch.progress
    return arguments | labels | {"num_items_in_batch": number}


def _padded(rows: torch.Tensor, padding: int) -> torch.Tensor:
    """Returns rows, or one of padding if there are none, `[1, rows]`."""
    return rows[None] if len(rows) else rows.new_full((1, 1), padding)


def _check_loss(given: Mapping[str, object]) -> None:
    """Checks that what decides a loss is there together, where a model hands it on.

    Raises:
        ValueError: one is missing: the model would shift labels once more, or take a rank's mean.
    """
    there = [name for name in _OF_LOSS if given.get(name) is not None]
    if len(there) == 1:
        (missing,) = {*_OF_LOSS} - {*there}
        raise ValueError(
            f"the model was called without the {missing} of inputs_of, so its loss would be wrong: "
            "keep it, or leave out labels, shift_labels and num_items_in_batch and compute the loss"
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LayerMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    distca: int | None = None,
    distca_padded: bool = False,
    position_ids: torch.Tensor | None = None,
    **of_loss: object,
) -> tuple[torch.Tensor, None]:
    """Core attention of a layer, as transformers call it.

    Args:
        module: attention module of the layer.
        query: `[1, heads, rows, head_dim]`.
        key: `[1, kv_heads, rows, head_dim]`.
        value: `[1, kv_heads, rows, head_dim]`.
        attention_mask: mask of the layer, which `mask_of_layers` made; None: the model made none.
        scaling: factor of the scores.
        dropout: 0.
        sliding_window: keys that a query sees, with its own; None: all before it.
        softcap: bound of the scores, or None.
        s_aux: the sink of each head, or None.
        is_causal: not False.
        distca: handle of the batch.
        distca_padded: whether the only row is padding, whose output is 0.
        position_ids: positions that the model was called with, if it hands them on.
        of_loss: what else it hands on; arguments of its loss are among that.

    Returns:
        The output, `[1, rows, heads, head_dim]`, and no weights.

    Raises:
        ValueError: an argument is not what `inputs_of` makes of it; see `core_attention`, too.
    """
    if distca is None:
        raise ValueError(
            'attn_implementation="distca" needs a batch: call the model with `inputs_of(batch)`; '
            "models that do not pass its arguments on to their attention are not supported"
        )
    if query.shape[0] != 1:
        raise ValueError(f"there are {query.shape[0]} rows: call with `inputs_of(batch)`")
    mask = mask_of_layer(attention_mask, sliding_window)
    _check_loss(of_loss)
    if position_ids is not None and not (distca_padded or torch.compiler.is_compiling()):
        planner, number = find_planner(distca)
        planner.check_positions(number, position_ids)
    if dropout:
        raise ValueError(f"attention dropout {dropout} is not supported: set it to 0")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ValueError("a layer's attention is not causal: only causal attention is shared")
    # Under autocast rotary embeddings give queries and keys in float32.
    q, k, v = (each[0].transpose(0, 1).to(value.dtype) for each in (query, key, value))
    if distca_padded:
        q, k, v = q[:0], k[:0], v[:0]
    cap = softcap or 0.0
    out = core_attention(q, k, v, distca, mask=mask, scale=scaling, sink_H=s_aux, softcap=cap)
    if distca_padded:
        # It keeps the graph, since the backward pass is collective, too.
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 1))
    return out[None], None

"""Models of Hugging Face transformers with DistCA's core attention.

    register()
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="distca")
    planner = Planner(**heads_of(model.config, torch.bfloat16))
    batch = planner.place(documents)
    loss = model(**inputs_of(batch)).loss
    loss.backward()

The losses of all ranks add up to the mean over the micro-batch, and so do the gradients: sum them
over the group's ranks. DistributedDataParallel and FSDP take the mean over the ranks, so multiply
the loss by the number of ranks (see `examples/`).
"""

from __future__ import annotations

from typing import Any

import torch

from distca.cost.volume import AttentionShape
from distca.library.batch import Batch
from distca.library.operation import core_attention
from distca.library.planner import find_planner
from distca.plan import Mask

IMPLEMENTATION = "distca"
"""Value of `attn_implementation`."""


def register() -> None:
    """Makes `attn_implementation="distca"` known to transformers.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)


def heads_of(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Returns what `Planner` must know of a model: `shape`, `masks` and `softcap`.

    Args:
        config: configuration of the model, or of its text part.
        dtype: dtype of queries, keys and values.

    Raises:
        ValueError: some of its layers have masks that plans do not express.
    """
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {
        "shape": AttentionShape(heads, kv_heads, head_dim, dtype.itemsize),
        "masks": _masks_of(config),
        "softcap": getattr(config, "attn_logit_softcapping", None),
    }


def _masks_of(config: Any) -> tuple[Mask, ...]:
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


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Returns the arguments of a causal language model for this rank's tokens, `[1, rows]` each.

    The loss that the model then returns is divided by the targets of all ranks.
    """
    labels = batch.labels[None]
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.positions[None],
        # The targets of tokens are on this rank, the tokens that they are may not be.
        "labels": labels,
        "shift_labels": labels,
        "num_items_in_batch": batch.num_targets,
        "use_cache": False,
        IMPLEMENTATION: batch.handle,
    }


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    distca: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Core attention of a layer, as transformers call it.

    Args:
        module: attention module of the layer.
        query: `[1, heads, rows, head_dim]`.
        key: `[1, kv_heads, rows, head_dim]`.
        value: `[1, kv_heads, rows, head_dim]`.
        attention_mask: None.
        scaling: factor of the scores.
        dropout: 0.
        sliding_window: keys that a query sees, with its own; None: all before it.
        softcap: bound of the scores; None: there is none.
        s_aux: the sink of each head; None: there is none.
        distca: handle of the batch.

    Returns:
        The output, `[1, rows, heads, head_dim]`, and no weights.

    Raises:
        ValueError: an argument is not what `inputs_of` makes of it; see `core_attention`, too.
    """
    if distca is None:
        raise ValueError(
            'attn_implementation="distca" needs a batch: call the model with `inputs_of(batch)`'
        )
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError("give documents without padding or mask: call with `inputs_of(batch)`")
    if dropout:
        raise ValueError(f"attention dropout {dropout} is not supported: set it to 0")
    if not torch.compiler.is_compiling():
        find_planner(int(distca[0])).check_softcap(softcap)
    mask = Mask() if sliding_window is None else Mask(window_left=sliding_window - 1)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    out = core_attention(q, k, v, distca, mask=mask, scale=scaling, sink_H=s_aux)
    return out[None], None

"""Core attention of a batch as an operation of torch, which `torch.compile` does not look into.

The forward pass runs all three steps of `distca.runtime.AttentionCall`, as does the backward
pass, on what autograd kept: queries, keys, values, output and LSE of this rank's own rows. A layer
that is recomputed runs its forward pass again, with its exchanges.
"""

from __future__ import annotations

from typing import Any

import torch

from distca.library.batch import Batch
from distca.library.planner import Planner, find_planner
from distca.plan import Mask
from distca.runtime import AttentionCall, Exchange

_CAUSAL = Mask()
_UNKNOWN = -1.0
"""Number in place of a soft cap that is not compared."""
_NONE = -1
"""Number in place of a window or of chunks that a mask does not have."""


def core_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    batch: Batch | int,
    *,
    mask: Mask = _CAUSAL,
    scale: float | None = None,
    sink_H: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Computes softmax(QKᵀ)V of this rank's tokens over their documents. Collective.

    Every rank of the planner's group must call it for every layer, in the same order. This also
    holds in evaluation, and for a rank without tokens. Use `torch.no_grad()` on all ranks or on
    none. Ranks that call it in different orders, or with different masks or scales, get wrong
    numbers, and an error when they next call `Planner.place`.

    Args:
        q_THD: queries, `[rows, heads, head_dim]`, of the dtype that the planner's shape has.
        k_THD: keys, `[rows, kv_heads, head_dim]`.
        v_THD: values, `[rows, kv_heads, v_head_dim]`.
        batch: the batch, or its handle.
        mask: mask of the layer, one of the planner's.
        scale: factor of the scores; None: `head_dim ** -0.5`.
        sink_H: one more logit of each head, which has no value, `[heads]`, as in GPT-OSS, or None.
        softcap: the soft cap that the layer has, 0.0 for none, which must be the planner's; None:
            it is not compared.

    Returns:
        The output, `[rows, heads, v_head_dim]`.

    Raises:
        ValueError: a tensor has another shape or dtype than the batch or the planner, the planner
            has no such mask or soft cap, or the batch is gone. In a planner's first call: the dtype
            is another one on some rank, or a tensor of some rank is refused; on all ranks.
    """
    handle = batch.handle if isinstance(batch, Batch) else batch
    if scale is None:
        scale = float(q_THD.shape[-1]) ** -0.5
    window = _NONE if mask.window_left is None else mask.window_left
    chunk = _NONE if mask.attention_chunk is None else mask.attention_chunk
    cap = _UNKNOWN if softcap is None else softcap
    out, _ = _forward(q_THD, k_THD, v_THD, sink_H, handle, window, chunk, scale, cap)
    return out


def _call_of(
    handle: int, window: int, chunk: int, scale: float
) -> tuple[Planner, AttentionCall, Exchange]:
    planner, number = find_planner(handle)
    mask = Mask(None if window == _NONE else window, None if chunk == _NONE else chunk)
    return planner, *planner.call(number, mask, scale)


def _in_words(
    phase: str, q: torch.Tensor, handle: int, window: int, chunk: int, scale: float
) -> str:
    """Says what all ranks must call the same."""
    found = f"{phase} of batch {find_planner(handle)[1]} in {q.dtype} with a scale of {scale}"
    if window != _NONE:
        found += f" and a window of {window}"
    return found if chunk == _NONE else f"{found} and chunks of {chunk}"


def _check(
    planner: Planner, exchange: Exchange, sink: torch.Tensor | None, **rows: torch.Tensor
) -> None:
    """Checks the tensors of a call.

    Raises:
        ValueError: one of them has another shape or dtype.
    """
    shape, local = planner.shape, exchange.q.local
    expected = {
        "q": (local, shape.heads, shape.head_dim),
        "k": (local, shape.kv_heads, shape.head_dim),
        "v": (local, shape.kv_heads, shape.value_dim),
    }
    for name, tensor in rows.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"{name} is {list(tensor.shape)}, but the batch and the planner's shape have "
                f"{list(expected[name])}"
            )
        wrong = tensor.dtype.itemsize != shape.dtype_bytes or not tensor.is_floating_point()
        if wrong or tensor.dtype != rows["q"].dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}: q, k and v need one dtype of {shape.dtype_bytes} bytes "
                "an element, as the planner's shape says"
            )
    if sink is not None and tuple(sink.shape) != (shape.heads,):
        raise ValueError(f"the sink is {list(sink.shape)}, but there are {shape.heads} heads")


@torch.library.custom_op("distca::core_attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    handle: int,
    window: int,
    chunk: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, and the LSE, `[rows, heads]`, float32."""
    planner, call, exchange = _call_of(handle, window, chunk, scale)

    def check() -> torch.Tensor:
        _check(planner, exchange, sink, q=q, k=k, v=v)
        if softcap != _UNKNOWN:
            planner.check_softcap(softcap)
        return q

    planner.agree(check)
    planner.add_call(_in_words("the forward pass", q, handle, window, chunk, scale))
    call.dispatch(q.contiguous(), k.contiguous(), v.contiguous())
    call.compute()
    call.combine(sink)
    return call.outputs


@_forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    handle: int,
    window: int,
    chunk: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("distca::core_attention_backward", mutates_args=())
def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: int,
    window: int,
    chunk: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries, keys, values and sink; an empty one where there is none."""
    planner, call, _ = _call_of(handle, window, chunk, scale)
    planner.add_call(_in_words("the backward pass", q, handle, window, chunk, scale))
    call.resume(q.contiguous(), k.contiguous(), v.contiguous(), out, lse, sink)
    of_sink = call.dispatch_backward(dout.contiguous())
    call.compute_backward()
    dq, dk, dv = call.combine_backward()
    return dq, dk, dv, q.new_empty(0) if of_sink is None else of_sink


@_backward.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    handle: int,
    window: int,
    chunk: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (each.new_empty(each.shape) for each in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, sink, *ctx.layer = inputs
    ctx.save_for_backward(q, k, v, sink, *output)


def _differentiate(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, sink, out, lse = ctx.saved_tensors
    dq, dk, dv, of_sink = _backward(dout, q, k, v, sink, out, lse, *ctx.layer)
    return dq, dk, dv, None if sink is None else of_sink, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)

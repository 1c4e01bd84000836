"""Attention sinks: one more logit of each row, which takes its share of the weights and no value.

A sink of 0 makes the softmax that is off by one; learned ones are a number for each head. The owner
of a row merges its sink into the final output and LSE. With these the backward kernels are exact as
they are, wherever they run, and the sink's own gradient is the owner's to sum up.
"""

from __future__ import annotations

import torch


def with_sink(
    out_THD: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs and LSE of rows that have one more logit.

    Args:
        out_THD: final outputs without it, `[rows, heads, head_dim]`.
        lse_TH: their LSE, float32 `[rows, heads]`.
        sink_H: logit of each head, `[heads]`.
    """
    # Dtypes differ: each operator converts as it reads and writes, and needs no copies for it.
    kept = (lse_TH - sink_H).sigmoid_()
    kept_out = torch.mul(out_THD, kept.unsqueeze(-1), out=torch.empty_like(out_THD))
    return kept_out, torch.logaddexp(lse_TH, sink_H)


def sink_gradient(
    dout_THD: torch.Tensor, out_THD: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the sinks, `[heads]`.

    Args:
        dout_THD: gradient of the outputs, `[rows, heads, head_dim]`.
        out_THD: outputs of `with_sink`.
        lse_TH: LSE of `with_sink`, float32 `[rows, heads]`.
        sink_H: logit of each head, `[heads]`.
    """
    share = torch.exp(sink_H.to(lse_TH.dtype) - lse_TH)
    dots = (dout_THD.to(lse_TH.dtype) * out_THD.to(lse_TH.dtype)).sum(-1)
    return -(share * dots).sum(0).to(sink_H.dtype)

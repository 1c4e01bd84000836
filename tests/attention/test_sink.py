"""Sinks against the definition of the softmax with one more logit, in float64."""

from __future__ import annotations

import pytest
import torch

from distca.attention.merge import merge_partial
from distca.attention.reference import attend, task_visibility
from distca.attention.sink import sink_gradient, with_sink

SCALE, HEADS = 0.3, 4


def inputs() -> list[torch.Tensor]:
    """Queries, keys, values, sinks and an output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(30, HEADS, 8), (50, 2, 8), (50, 2, 8), (HEADS,), (30, HEADS, 8)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_the_reference_has_one_more_logit() -> None:
    q, k, v, sink, _ = inputs()
    out, lse = attend(q, k, v, torch.ones(30, 50, dtype=torch.bool), SCALE, sink)
    keys = k.repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->qhk", q, keys) * SCALE
    scores = torch.cat([scores, sink.expand(30, HEADS)[..., None]], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :-1]
    expected = torch.einsum("qhk,khd->qhd", weights, v.repeat_interleave(2, dim=1))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("window", [None, 3])
def test_merged_parts_and_a_sink_are_the_whole(window: int | None) -> None:
    """Output, LSE and the sink's gradient; a row without keys has its sink alone."""
    *tensors, dout = inputs()
    q, k, v, sink = (tensor.requires_grad_() for tensor in tensors)
    visible = task_visibility(30, 50, causal=True, window_left=window)
    visible[4] = False
    expected, expected_lse = attend(q, k, v, visible, SCALE, sink)
    expected.backward(dout)
    with torch.no_grad():
        out, lse = attend(q, k[:25], v[:25], visible[:, :25], SCALE)
        merge_partial(out, lse, slice(0, 30), *attend(q, k[25:], v[25:], visible[:, 25:], SCALE))
        out, lse = with_sink(out, lse, sink)
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(lse, expected_lse.detach())
        torch.testing.assert_close(lse[4], sink.detach())
        torch.testing.assert_close(sink_gradient(dout, out, lse, sink), sink.grad)

"""Keys and values with heads of unlike sizes, for kernels that have one size.

The smaller heads are filled up with zeros, which change no score and no sum, so that results and
gradients are exact. It costs copies, and products with the zeros: of multi-latent attention with
keys of 192 and values of 128 a sixth of the forward pass's operations.
"""

from __future__ import annotations

import torch

from distca.attention.kernel import Gradients, Kernel, KernelTasks, Outputs


class FilledHeadsKernel:
    """A `Kernel` for unlike head sizes, by one for equal ones.

    Args:
        kernel: kernel for heads of one size, the larger.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def forward(
        self,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        tasks: KernelTasks,
        into: Outputs | None = None,
    ) -> Outputs:
        size, of_value = max(q_THD.shape[-1], v_THD.shape[-1]), v_THD.shape[-1]
        q, k, v = (_filled(each, size) for each in (q_THD, k_THD, v_THD))
        if into is None:
            out, lse = self._kernel.forward(q, k, v, tasks)
            return out[..., :of_value].contiguous(), lse
        out, lse = into
        if of_value == size:
            return self._kernel.forward(q, k, v, tasks, into)
        wide, _ = self._kernel.forward(
            q, k, v, tasks, (out.new_empty((*out.shape[:-1], size)), lse)
        )
        return out.copy_(wide[..., :of_value]), lse

    def backward(
        self,
        dout_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_THD: torch.Tensor,
        v_THD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        tasks: KernelTasks,
        into: Gradients | None = None,
    ) -> Gradients:
        size = max(q_THD.shape[-1], v_THD.shape[-1])
        dout, q, k, v, out = (
            _filled(each, size) for each in (dout_THD, q_THD, k_THD, v_THD, out_THD)
        )
        wide = self._kernel.backward(dout, q, k, v, out, lse_TH, tasks)
        if into is None:
            into = torch.empty_like(q_THD), torch.empty_like(k_THD), torch.empty_like(v_THD)
        for gradient, found in zip(into, wide, strict=True):
            gradient.copy_(found[..., : gradient.shape[-1]])
        return into


def _filled(x_THD: torch.Tensor, size: int) -> torch.Tensor:
    """Heads of a size, the last elements zeros where there were fewer."""
    missing = size - x_THD.shape[-1]
    return torch.nn.functional.pad(x_THD, (0, missing)) if missing else x_THD

"""Launches of the fused kernels of layers with experts.

A pair is a row and one of its experts. Pairs are sorted by expert, so that the rows of an expert
lie side by side, at places that are numbered from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from distca.attention.fused.jobs import encoded, power_of_2

_TILE = 1024
"""Elements that a program handles at a time: 8 for each of its threads."""


class SortedRows(NamedTuple):
    """Rows in the order of their experts.

    Attributes:
        rows: the row of each place, `[pairs, width]`.
        places: place of each pair, int64 `[pairs]`.
        ends: the place behind the last one of each expert, int32 `[experts]`.
    """

    rows: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


@dataclass(frozen=True)
class ClampedGate:
    """The activation of gpt_oss, where each element lies behind its gate.

    Attributes:
        alpha: factor of a gate inside its sigmoid.
        limit: bound of gates, and of elements on both sides.
    """

    alpha: float
    limit: float


class ExpertKernels:
    """Launches of the kernels. All tensors are contiguous, and none is empty.

    Args:
        kernels: the module of the kernels, `triton_experts`, or what stands for it.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def sort_rows(
        self,
        rows: torch.Tensor,
        experts: torch.Tensor,
        order: torch.Tensor,
        number_of_experts: int,
    ) -> SortedRows:
        """Copies each row to the places of its pairs.

        Args:
            rows: rows, `[rows, width]`.
            experts: expert of each place, ascending, int64 `[pairs]`.
            order: pair that each place is for, int64 `[pairs]`; row `i` has the pairs from
                `i * pairs / rows` on.
            number_of_experts: all experts.
        """
        (total, width), pairs = rows.shape, len(order)
        found = SortedRows(
            rows.new_empty((pairs, width)),
            torch.empty_like(order),
            torch.empty(number_of_experts, dtype=torch.int32, device=rows.device),
        )
        self._kernels.sort_rows[(pairs,)](
            *(rows, experts, order, *found, encoded((pairs,))),
            *(pairs // total, number_of_experts, width, min(power_of_2(width), _TILE)),
        )
        return found

    def gate_rows(
        self,
        rows: torch.Tensor,
        gate: ClampedGate | None = None,
        experts: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiplies elements by the activation of their gates.

        Args:
            rows: `[pairs, 2 * width]`, all gates of a row before all others; with `gate` each
                element behind its gate.
            gate: the activation; None: SiLU.
            experts: expert of each row, int64 `[pairs]`; None: there is no bias.
            bias: is added to an expert's rows first, `[experts, 2 * width]`.

        Returns:
            The results, `[pairs, width]`.
        """
        pairs, width = rows.shape[0], rows.shape[1] // 2
        into = rows.new_empty((pairs, width))
        columns = min(power_of_2(width), _TILE)
        at_once = _TILE // columns
        self._kernels.gate_rows[-(-pairs // at_once), -(-width // columns)](
            *(rows, experts, bias, into, encoded((pairs,))),
            *((0.0, 0.0) if gate is None else (gate.alpha, gate.limit)),
            *(gate is not None, width, at_once, columns),
            # Else a product that is rounded may not be.
            enable_fp_fusion=False,
        )
        return into

    def combine_rows(
        self,
        rows: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sums what the experts of each row made of it.

        Args:
            rows: the row of each place, `[pairs, width]`.
            places: place of each pair, int64 `[pairs]`.
            weights: factor of each pair, `[rows, experts of a row]`.
            experts: expert of each pair, int64, likewise; None: there is no bias.
            bias: is added to an expert's rows first, `[experts, width]`.

        Returns:
            The sums, `[rows, width]`.
        """
        (total, chosen), width = weights.shape, rows.shape[1]
        into = rows.new_empty((total, width))
        columns = min(power_of_2(width), _TILE)
        self._kernels.combine_rows[total, -(-width // columns)](
            *(rows, places, weights, experts, bias, into, chosen, width, columns),
            enable_fp_fusion=False,
        )
        return into

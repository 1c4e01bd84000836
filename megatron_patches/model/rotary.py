"""Rotary embedding by each token's own position.

Megatron numbers the tokens of a sequence (or of each packed document) from zero. A document that
continues from another rank starts elsewhere, so the model gets every token's position.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel


class TokenRotaryEmbedding(torch.nn.Module):
    """Stands in for megatron-core's `RotaryEmbedding` and uses its frequencies.

    Args:
        rotary: megatron-core's embedding.
        local_base: rotary base of layers with a window; None: that of all layers.

    Attributes:
        positions: position of each token in its document, int64 `[tokens]`; set before each
            forward pass of the model (see `rotate_by_position_ids`).
    """

    def __init__(self, rotary: Any, local_base: int | None = None) -> None:
        super().__init__()
        self._rotary, self._local_base = rotary, local_base
        self.positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return int(self._rotary.get_rotary_seq_len(*args, **kwargs))

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor | Any:
        """Returns the angles of each token, float32 `[tokens, 1, 1, rotary_dim]`.

        With YaRN the factor of sines and cosines comes second, as megatron-core has it. With two
        bases those of layers with a window come behind the others, in `2 * rotary_dim` elements.
        """
        if self.positions is None:
            raise RuntimeError("the model was called without position_ids")
        factor = None
        frequencies = self._rotary.inv_freq
        if isinstance(self._rotary, YarnRotaryEmbedding):
            # It computes the frequencies anew in each call; they are the angles of position 1.
            angles, factor = self._rotary.get_emb(2)
            frequencies = angles[1, 0, 0]
        inv_freq = frequencies.to(self.positions.device)
        positions = self.positions.to(inv_freq.dtype)
        if factor is not None:
            return (positions[:, None] * inv_freq)[:, None, None, :], factor
        if self._rotary.seq_len_interpolation_factor is not None:
            # Multiplied rather than divided, to round as megatron-core does.
            positions = positions * (1 / self._rotary.seq_len_interpolation_factor)
        angles = self._of_all_elements(torch.outer(positions, inv_freq))
        if self._local_base is not None:
            pairs = torch.arange(len(inv_freq), device=inv_freq.device) / len(inv_freq)
            # Layers with a window have no interpolated positions.
            local = torch.outer(self.positions.to(inv_freq.dtype), self._local_base**-pairs)
            angles = torch.cat((angles, self._of_all_elements(local)), dim=-1)
        return angles[:, None, None, :]

    def _of_all_elements(self, angles: torch.Tensor) -> torch.Tensor:
        """Returns the angles of a head's elements, by those of its pairs."""
        if self._rotary.rotary_interleaved:
            return angles.repeat_interleave(2, dim=-1)
        return torch.cat((angles, angles), dim=-1)


def rotate_by_position_ids(model: GPTModel, local_base: int | None = None) -> None:
    """Makes a GPT model's rotary embedding follow the `position_ids` of each call.

    The `cu_seqlens_*_padded` of the call's `PackedSeqParams` must describe one sequence, so that
    megatron-core applies the angles token by token.

    Args:
        model: the model.
        local_base: rotary base of layers with a window; None: that of all layers.
    """
    rotary = TokenRotaryEmbedding(model.rotary_pos_emb, local_base)
    model.rotary_pos_emb = rotary

    def remember_positions(module: Any, args: Any, kwargs: Any) -> None:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        rotary.positions = position_ids.reshape(-1)

    model.register_forward_pre_hook(remember_positions, with_kwargs=True)


def split_rows(rows: torch.Tensor, sizes: list[int], shards: int) -> list[torch.Tensor]:
    """Divides rows in the order of `batches.planned.nano_order` into those of each nano-batch."""
    pieces = torch.split(rows, [size // shards for size in sizes] * shards)
    return [torch.cat(pieces[number :: len(sizes)]) for number in range(len(sizes))]

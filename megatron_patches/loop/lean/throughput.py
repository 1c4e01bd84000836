"""Floating-point operations of a rank's model, counted as it runs."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.flags.distca import masks_from_args
from megatron_patches.flags.latent_attention import head_sizes
from megatron_patches.flags.sizes import layer_parameters


class Throughput:
    """Counts the operations of training's forward and backward passes.

    Linear layers count by tokens, core attention by the pairs of tokens that see each other, which
    depend on the documents. Nothing recomputed counts. With `--distca` pairs count where their
    queries lie, which is the same in the mean of all ranks.

    Args:
        args: flags.
        model: model chunks of this rank, wrapped or not.
    """

    def __init__(self, args: Namespace, model: list[Any]) -> None:
        self._args = args
        self._tokens_times_parameters = 0
        self._pairs: Any = 0
        masks = masks_from_args(args)

        def count(chunk: Any, inputs: Any) -> None:
            if not chunk.training:
                return
            positions = inputs[1]
            bare = _bare(chunk)
            layers = [masks.of_layer(layer.layer_number - 1) for layer in bare.decoder.layers]
            parameters = len(layers) * layer_parameters(args)
            if bare.post_process:
                parameters += args.hidden_size * args.padded_vocab_size
            self._tokens_times_parameters += positions.numel() * parameters
            for mask in masks.masks:
                left = mask.window_left
                seen = positions if left is None else positions.clamp(max=left)
                self._pairs = self._pairs + layers.count(mask) * (seen + 1).sum()

        for chunk in model:
            chunk.register_forward_pre_hook(count)

    def per_gpu(self, seconds: float) -> float:
        """Returns the mean rank's operations in a second since the last call. Collective.

        Args:
            seconds: seconds since the last call.
        """
        args = self._args
        # Two operations for each multiplication and addition; QK and PV; twice more backwards.
        forward = 2 * self._tokens_times_parameters
        forward += 2 * int(self._pairs) * args.num_attention_heads * sum(head_sizes(args))
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(3.0 * forward, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        self._tokens_times_parameters, self._pairs = 0, 0
        return total.item() / args.tensor_model_parallel_size / dist.get_world_size() / seconds


def _bare(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk

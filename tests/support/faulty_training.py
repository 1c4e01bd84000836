"""`megatron_patches.pretrain` on a GPU whose attention kernel gives keys no gradients.

Plain Megatron's attention is other operators, so it trains as it should.
"""

from __future__ import annotations

from typing import Any

from distca.attention import flash
from megatron_patches import pretrain

_backward = flash.TorchFlashKernel._call_backward


def _without_keys(self: Any, *given: Any) -> None:
    _backward(self, *given)
    *_, (_, dk, _), _ = given
    dk.zero_()


if __name__ == "__main__":
    flash.TorchFlashKernel._call_backward = _without_keys  # type: ignore[method-assign]
    pretrain.main()

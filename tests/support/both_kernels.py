"""Launches of fused kernels that their stand-ins do, too, on copies: both must write the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.simgpu import fused


def both_of(kernels: Any, stands: Any = fused) -> Any:
    """A module's kernels, each beside its stand-in.

    Args:
        kernels: the module.
        stands: module with its stand-ins.
    """
    launch = lambda name, reads, writes, call: call(*reads, *writes)  # noqa: E731
    module = stands.stand_ins(launch, lambda each: each)
    names = [name for name, each in vars(module).items() if isinstance(each, fused.Kernel)]
    both = {name: _Both(getattr(kernels, name), getattr(module, name)) for name in names}
    return type("Kernels", (), both)


class _Both:
    """Launches a kernel, and its stand-in on copies of all memory; both must write the same."""

    def __init__(self, kernel: Any, stand_in: Any) -> None:
        self._kernel, self._stand_in, self.launches = kernel, stand_in, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def call(*arguments: Any, **options: bool) -> None:
            memory: dict[int, torch.UntypedStorage] = {}

            def copied(value: Any) -> Any:
                if isinstance(value, tuple):
                    return tuple(map(copied, value))
                if not isinstance(value, torch.Tensor):
                    return value
                storage = value.untyped_storage()
                if storage.data_ptr() not in memory:
                    memory[storage.data_ptr()] = storage.clone()
                    kept.append(storage)
                other = torch.empty(0, dtype=value.dtype)
                place = value.storage_offset(), value.shape, value.stride()
                return other.set_(memory[storage.data_ptr()], *place)

            kept: list[torch.UntypedStorage] = []
            copies = copied(arguments)
            self._stand_in[grid](*copies, **options)
            self._kernel[grid](*arguments, **options)
            self.launches += 1
            _assert_same(arguments, copies)

        return call


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(found, tuple):
        for pair in zip(found, expected, strict=True):
            _assert_same(*pair)
    elif isinstance(found, torch.Tensor):
        rounding = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(found.dtype, 1e-5)
        torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-6, equal_nan=True)

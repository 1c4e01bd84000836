"""What torch keeps for each thread, which coroutines of one thread have to keep for themselves.

A context that a layer enters (`torch.autocast`, `torch.no_grad`, `saved_tensors_hooks`, a mode, a
default device) would otherwise hold for the coroutine that goes on while this one waits inside it,
and the one that leaves its context first would end the other's. Not kept, since no layer waits
inside of them: CUDA's current stream, inference mode, and random states (Megatron forks them around
both nano-batches). Transformer Engine's recipe belongs to the process: see
`ping_pong.NanoBatchCoroutines.inside`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import _C
from torch._C import _autograd as hooks
from torch.utils import _device


class ThreadState(NamedTuple):
    """State of a thread in torch; stacks are listed from the bottom.

    Attributes:
        gradients: whether gradients are recorded.
        on_cpu: whether autocast is on for the CPU, and its dtype.
        on_gpu: the same for GPUs.
        keeps_casts: whether autocast keeps what it has cast.
        default_device: device of `with torch.device(...)`; its mode is among the function modes.
        function_modes: modes that see calls of torch's functions.
        dispatch_modes: modes that see calls of operators.
        saving: pairs of functions that pack and unpack tensors saved for the backward pass.
    """

    gradients: bool
    on_cpu: tuple[bool, torch.dtype]
    on_gpu: tuple[bool, torch.dtype]
    keeps_casts: bool
    default_device: torch.device | None
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    saving: tuple[tuple[Any, Any], ...]

    @classmethod
    def present(cls) -> ThreadState:
        # Written out without loops, and stacks that are empty are not read: this runs several
        # times a layer.
        functions, operators = _C._len_torch_function_stack(), _C._len_torch_dispatch_stack()
        return cls(
            torch.is_grad_enabled(),
            (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
            torch.is_autocast_cache_enabled(),
            _device.CURRENT_DEVICE,
            tuple(map(_C._get_function_stack_at, range(functions))) if functions else (),
            tuple(map(_C._get_dispatch_stack_at, range(operators))) if operators else (),
            _saving() if hooks._top_saved_tensors_default_hooks(True) is not None else (),
        )

    def restore(self) -> None:
        """Makes this the state of the thread."""
        present = ThreadState.present()
        if present == self:
            return
        # The modes first, since they would see the calls that follow.
        for _ in present.function_modes:
            _C._pop_torch_function_stack()
        for _ in present.dispatch_modes:
            _C._pop_torch_dispatch_stack(None)
        _C._set_grad_enabled(self.gradients)
        for device, (enabled, dtype) in (("cpu", self.on_cpu), ("cuda", self.on_gpu)):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.keeps_casts)
        _device.CURRENT_DEVICE = self.default_device
        for _ in present.saving:
            hooks._pop_saved_tensors_default_hooks()
        for pack, unpack in self.saving:
            hooks._push_saved_tensors_default_hooks(pack, unpack)
        for mode in self.dispatch_modes:
            _C._push_on_torch_dispatch_stack(mode)
        for mode in self.function_modes:
            _C._push_on_torch_function_stack(mode)


def _saving() -> tuple[tuple[Any, Any], ...]:
    """Returns the hooks of saved tensors; torch itself shows only the top one."""
    found = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        hooks._pop_saved_tensors_default_hooks()
    found.reverse()
    for pack, unpack in found:
        hooks._push_saved_tensors_default_hooks(pack, unpack)
    return tuple(found)

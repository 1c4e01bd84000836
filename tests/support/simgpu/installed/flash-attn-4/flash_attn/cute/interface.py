"""The module of `flash-attn-4` that has its functions, here those of the simulated GPUs."""

from support.simgpu.flash4 import backward as _flash_attn_bwd
from support.simgpu.flash4 import forward as _flash_attn_fwd

__all__ = ["_flash_attn_bwd", "_flash_attn_fwd"]

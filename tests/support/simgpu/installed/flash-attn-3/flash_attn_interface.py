"""The module of `flash-attn-3` that registers its operators, here those of the simulated GPUs."""

from support.simgpu import cuda, flash3

flash3.install(cuda.native)

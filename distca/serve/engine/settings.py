"""The settings of an engine and its workers."""

from __future__ import annotations

from dataclasses import dataclass

from distca.plan import Mask
from distca.schedule.serving import Strategy
from distca.schedule.serving.scheduler import Limits


@dataclass(frozen=True)
class EngineSettings:
    """What an engine and its workers are told before they start.

    Attributes:
        model: folder of the model, or its name on the Hugging Face hub.
        dtype: name of the dtype of weights and rows.
        windows: for each layer how many earlier tokens a query sees; None: all.
        salt: what keys and values depend on beside tokens: the model.
        positions: most tokens of a sequence.
        world_size: ranks that share a sequence's keys and values.
        tensor_parallel_size: processes of each rank, which share its layers.
        strategy: what travels in chunks of prompts.
        limits: bounds and rules of the scheduler.
        block_size: rows of a block.
        cache_bytes: bytes of a rank's pool; None: what a GPU has left.
        gpu_utilization: part of a GPU's memory that weights, pool and buffers may fill.
        prefix_caching: whether full blocks are kept for other sequences.
        step_timeout: seconds after which an iteration has failed.
        enforce_eager: whether GPUs decode without CUDA graphs.
    """

    model: str
    dtype: str
    windows: tuple[int | None, ...]
    salt: bytes
    positions: int
    world_size: int
    tensor_parallel_size: int
    strategy: Strategy
    limits: Limits
    block_size: int
    cache_bytes: int | None
    gpu_utilization: float
    prefix_caching: bool
    step_timeout: float
    enforce_eager: bool = False

    @property
    def processes(self) -> int:
        """Processes of all ranks; those of a rank are neighbours."""
        return self.world_size * self.tensor_parallel_size

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The different masks of the layers."""
        return tuple(Mask(window) for window in dict.fromkeys(self.windows))

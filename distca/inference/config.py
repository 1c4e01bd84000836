"""The configuration of an engine and its workers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from distca.inference.transports import TransportName
from distca.plan import Mask
from distca.schedule.serving.csps.layouts import SplitModel
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.layer_plans import PrefillStrategy
from distca.schedule.serving.limits import SchedulerConfig


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine and its workers.

    Attributes:
        model: folder of the model, or its name on the Hugging Face hub.
        dtype: name of the dtype of weights and rows.
        windows: for each layer how many earlier tokens a query sees; None: all.
        salt: what keys and values depend on beside tokens: the model.
        positions: most tokens of a sequence.
        world_size: ranks that share a sequence's keys and values, of which the last may have no
            weights: see `SchedulerConfig.servers`.
        tensor_parallel_size: processes of each rank, which share its layers.
        strategy: what travels in chunks of prompts, or who chooses it.
        limits: bounds and rules of the scheduler.
        block_size: rows of a block.
        cache_bytes: bytes of a rank's pool; None: what a GPU has left.
        gpu_utilization: part of a GPU's memory that weights, pool and buffers may fill.
        prefix_caching: whether full blocks are kept for other sequences.
        step_timeout: seconds after which an iteration has failed.
        enforce_eager: whether GPUs decode without CUDA graphs.
        transport: what moves rows; None: gloo on CPUs, NCCL on GPUs.
        trust_remote_code: whether code of the model's folder may run.
        head_groups: groups of heads that sp-ntp scatters.
        split: layers whose weights processes split, if they share the rows of prefills.
        keeps_logits: whether the first process keeps the logits of all tokens that are chosen.
        counts_bytes: whether the bytes that each sequence moves are counted by the plans.
    """

    model: str
    dtype: str
    windows: tuple[int | None, ...]
    salt: bytes
    positions: int
    world_size: int
    tensor_parallel_size: int
    strategy: PrefillStrategy
    limits: SchedulerConfig
    block_size: int
    cache_bytes: int | None
    gpu_utilization: float
    prefix_caching: bool
    step_timeout: float
    enforce_eager: bool = False
    transport: TransportName | None = None
    trust_remote_code: bool = False
    head_groups: int = 1
    split: SplitModel | None = None
    keeps_logits: bool = False
    counts_bytes: bool = False

    @property
    def sparse_salt(self) -> bytes:
        """What keys and values of sequences depend on whose chunks drop rows: the salt itself, and
        how they are dropped."""
        if not isinstance(self.strategy, NearToFar) or not self.strategy.sparsity.drops:
            return self.salt
        return hashlib.sha256(self.salt + repr(self.strategy).encode()).digest()

    @property
    def processes(self) -> int:
        """Processes of all ranks; those of a rank are neighbours."""
        return self.world_size * self.tensor_parallel_size

    @property
    def members_only(self) -> bool:
        """Whether a step's members alone exchange rows: other transports' buffers grow on all ranks
        at once, those that a plan does not name, too."""
        return self.transport in (None, "gloo", "nccl") or self.world_size == 1

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks change their ranks."""
        limits = self.limits
        return limits.servers > 0 or limits.evens_out or limits.growing is not None

    @property
    def masks(self) -> tuple[Mask, ...]:
        """The different masks of the layers."""
        return tuple(Mask(window) for window in dict.fromkeys(self.windows))

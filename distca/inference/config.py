"""The configuration of an engine and its workers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from distca.inference.transports import TransportName
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.batches import PrefillStrategy
from distca.schedule.serving.csps.layouts import SplitModel
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.limits import SchedulerConfig


@dataclass(frozen=True)
class ModelConfig:
    """What an engine knows of its model.

    Attributes:
        path: folder of the model, or its name on the Hugging Face hub.
        dtype: name of the dtype of weights, keys and values.
        windows: for each layer how many earlier tokens a query sees; None: all.
        positions: most tokens of a sequence.
        vocab_size: tokens of the vocabulary.
        salt: what keys and values depend on beside tokens: the model.
        trust_remote_code: whether code of the model's folder may run.
        stops: tokens that end an answer, unless a request has its own.
    """

    path: str
    dtype: str
    windows: tuple[int | None, ...]
    positions: int
    vocab_size: int
    salt: bytes = b""
    trust_remote_code: bool = False
    stops: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share sequences, and processes a rank's layers.

    Attributes:
        world_size: ranks that share a sequence's keys and values; the last ones may have no
            weights: see `SchedulerConfig.servers`.
        tensor_parallel_size: processes of each rank, which share its layers.
        strategy: what travels in chunks of prompts, or who chooses it.
        head_groups: groups of heads that sp-ntp scatters.
        split: layers whose weights processes split, if they share the rows of prefills.
        transport: what moves rows; None: gloo on CPUs, NCCL on GPUs.
        step_timeout: seconds after which an exchange has failed.
    """

    world_size: int = 1
    tensor_parallel_size: int = 1
    strategy: PrefillStrategy = "pass-kv"
    head_groups: int = 1
    split: SplitModel | None = None
    transport: TransportName | None = None
    step_timeout: float = 600.0


@dataclass(frozen=True)
class CacheConfig:
    """Memory for keys and values.

    Attributes:
        block_size: tokens of a block.
        nbytes: bytes of each rank's blocks; None: what a GPU has left.
        gpu_utilization: part of a GPU's memory that weights and blocks may fill.
    """

    block_size: int = 16
    nbytes: int | None = 1 << 30
    gpu_utilization: float = 0.9


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine and its workers.

    Attributes:
        model: the model.
        scheduler: bounds and rules of the scheduler.
        parallel: ranks and processes, and what travels between them.
        cache: memory for keys and values.
        enforce_eager: whether GPUs decode without CUDA graphs.
        keeps_logits: whether the first process keeps the logits of all tokens that are chosen.
        counts_bytes: whether the bytes that each sequence moves are counted by the plans.
    """

    model: ModelConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    enforce_eager: bool = False
    keeps_logits: bool = False
    counts_bytes: bool = False

    @property
    def sparse_salt(self) -> bytes:
        """Salt of sequences that drop rows: it includes how they are dropped."""
        strategy, salt = self.parallel.strategy, self.model.salt
        if not isinstance(strategy, NearToFar) or not strategy.sparsity.drops:
            return salt
        return hashlib.sha256(salt + repr(strategy).encode()).digest()

    @property
    def processes(self) -> int:
        """Processes of all ranks; those of a rank are neighbours."""
        return self.parallel.world_size * self.parallel.tensor_parallel_size

    @property
    def members_only(self) -> bool:
        """Whether an iteration's members alone exchange rows.

        Other transports' buffers grow on all ranks at once, those that a plan does not name, too.
        """
        parallel = self.parallel
        return parallel.transport in (None, "gloo", "nccl") or parallel.world_size == 1

    @property
    def shares_attention(self) -> bool:
        """Whether a rank may compute attention of prompts whose keys other ranks hold."""
        return isinstance(self.parallel.strategy, BalancedTiles)

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks change their ranks."""
        scheduler = self.scheduler
        return scheduler.servers > 0 or scheduler.evens_out or scheduler.growing is not None

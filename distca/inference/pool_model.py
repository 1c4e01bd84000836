"""A model on one rank, whose keys and values lie in a pool of blocks that the engine gives out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from distca.inference.attention_runner import AttentionRunner
from distca.inference.config import EngineConfig
from distca.inference.cuda_graphs import Capture
from distca.inference.messages import Moved
from distca.inference.model_runner import ModelRunner, OnLogits
from distca.inference.models import ServedModel
from distca.inference.step import Step
from distca.inference.tensor_parallel import TensorRanks
from distca.runtime import CoreAttention
from distca.runtime.serving.kv_moves import BlockMove, KvMoves
from distca.schedule.serving.blocks import block_bytes
from distca.schedule.serving.csps.layouts import SplitModel
from distca.schedule.serving.iteration import BatchPlan
from distca.transport import Transport


class PoolModel:
    """A rank's part of the iterations: its tokens' layers, and the attention that ranks share.

    Args:
        model: model to load.
        core: core attention of this rank.
        device: device of weights and pool.
        block_size: rows of a block.
        tensor_ranks: processes that share each layer with this one.
        capture: what captures graphs of iterations that only decode; None: they run without.
        mover: transport of blocks that change their ranks; None: none does.
        computes: whether this rank has weights.
        split: layers whose weights processes split, if they share the rows of prefills.
    """

    def __init__(
        self,
        model: ServedModel,
        core: CoreAttention,
        device: torch.device,
        block_size: int,
        tensor_ranks: TensorRanks,
        capture: Capture | None = None,
        mover: Transport | None = None,
        computes: bool = True,
        split: SplitModel | None = None,
    ) -> None:
        self._split, self._tensor_ranks = split, tensor_ranks
        self._rank, self._layers = core.transport.rank, range(len(model.windows))
        self._transport, self._mover = core.transport, mover
        # The pool gets its size once it is known what weights leave of a device's memory.
        self._run = ModelRunner(model, core, device, 1, block_size, tensor_ranks, capture, computes)
        self.block_bytes = block_bytes(model.shape, len(model.windows), block_size)
        self._new: dict[int, list[int]] = {}
        self._served = model
        self._last: tuple[Step, Mapping[int, Sequence[int]]] | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._run.weight_bytes

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others."""
        transports = (self._transport, self._mover)
        of_all = (sum(each.bytes_sent.values()) for each in transports if each is not None)
        return sum(of_all) + self._tensor_ranks.bytes_sent

    @property
    def steps(self) -> AttentionRunner:
        """Pool and exchanges beside the model."""
        return self._run.steps

    def room(self, config: EngineConfig) -> int:
        """Returns the blocks that this rank has room for beside the weights."""
        nbytes = config.cache.nbytes
        if nbytes is None:
            free, total = torch.cuda.mem_get_info(self.steps.pool.keys.device)
            nbytes = max(free - int((1 - config.cache.gpu_utilization) * total), 0)
        return nbytes // self.block_bytes

    def begin(self, blocks: int) -> None:
        """Makes the pool."""
        self._run.resize_pool(blocks)

    def add_blocks(self, sequence: int, blocks: Sequence[int]) -> None:
        """Adds blocks of this rank behind those that a sequence has here."""
        self._new.setdefault(sequence, []).extend(blocks)

    def set_blocks(self, sequence: int, blocks: Sequence[int]) -> None:
        """Replaces the blocks of this rank that a sequence has."""
        self.drop(sequence)
        self.add_blocks(sequence, blocks)

    def move(self, moves: Sequence[Moved]) -> None:
        """Moves blocks of all layers between ranks."""
        if not moves:
            return
        assert self._mover is not None, "no blocks move without ranks that hold alone"
        blocks = [BlockMove(each.source, each.number, each.to, each.becomes) for each in moves]
        under_way = KvMoves(self._run.pool, self._mover, blocks)
        for layer in self._layers:
            under_way.begins(layer)

    def drop(self, sequence: int) -> None:
        """Forgets the blocks of a sequence."""
        self._new.pop(sequence, None)
        self._run.drop(sequence)

    def run(
        self,
        plan: BatchPlan,
        tokens: Mapping[int, Sequence[int]],
        scoring: Mapping[int, OnLogits] = MappingProxyType({}),
    ) -> dict[int, torch.Tensor]:
        """Runs an iteration; ranks that are no members may be left out.

        Args:
            plan: the plans.
            tokens: tokens that are fed, by sequence.
            scoring: functions that are given all of a sequence's logits on this rank.

        Returns:
            Logits of the token that follows each sequence whose last token is of this rank,
            float32 `[vocabulary]`, by sequence.
        """
        parts, shared = [], None
        if plan.chunks is not None:
            if self._split is not None:
                shared = self._split.share(int(plan.new_tokens.sum()))
            parts.append(plan.chunks)
        new, self._new = self._new, {}
        blocks = {(sequence, self._rank): tuple(each) for sequence, each in new.items()}
        decodes = () if plan.decode is None else (plan.decode,)
        step = Step((*parts, *decodes), blocks, shared)
        self._last = step, tokens
        return self._run.run(step, tokens, scoring)

    def bytes_by_sequence(self) -> dict[int, int]:
        """Returns the bytes that the last iteration moved for each sequence, by its plans."""
        assert self._last is not None, "no iteration has run"
        step, _ = self._last
        moved = step.bytes_by_sequence(self._served)
        return dict(zip(step.sequences, moved, strict=True))

    def where_not_finite(self, ran: bool) -> str:
        """Says where the model stopped being finite in the last iteration. Collective; see
        `ModelRunner.where_not_finite`.

        Args:
            ran: whether this rank had a part in it.
        """
        return self._run.where_not_finite(self._last if ran else None)

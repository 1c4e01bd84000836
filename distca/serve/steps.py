"""A rank's part of a model's steps: its tokens' layers, and the attention that all ranks share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from distca.cost.memory import plan_memory
from distca.cost.volume import PlanBytes, plan_bytes
from distca.plan import Mask, Placement, Plan
from distca.runtime import CoreAttention, Exchange, ProgramRun, build_exchange
from distca.runtime.kept_keys import KeptKeys
from distca.schedule.program import LayerGroup, Program, tick_program
from distca.schedule.serving import (
    Strategy,
    held_after,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.serve.models import IMPLEMENTATION, ServedModel, need_transformers
from distca.serve.tensor_parallel import ALONE, TensorRanks

# A call of core attention by itself: the model decides which layer is next.
_ONE_CALL: Program = tick_program("forward", (LayerGroup(range(1), False),), 1, False, False)


@dataclass(frozen=True)
class Step:
    """What all ranks know of a step before it runs.

    Attributes:
        sequences: sequences that the step feeds, by number.
        plans: plan of the layers of each mask, over these sequences in their order.
        new: owners of the new tokens.
    """

    sequences: tuple[int, ...]
    plans: Mapping[Mask, Plan]
    new: Placement

    def bytes_by_sequence(self, model: ServedModel) -> list[int]:
        """Bytes that the step moves for each sequence, in all layers, by its plans."""
        total = np.zeros(len(self.sequences), dtype=np.int64)
        for window, layers in Counter(model.windows).items():
            plan = self.plans[Mask(window)]
            for number in range(len(self.sequences)):
                total[number] += layers * _bytes_of(plan, number, model).total
        return [int(each) * model.tensor_parallel_size for each in total]


def _bytes_of(plan: Plan, number: int, model: ServedModel) -> PlanBytes:
    alone = replace(plan, tasks=plan.tasks[plan.tasks.document == number])
    return plan_bytes(alone, model.shape).forward()


class Holdings:
    """Who holds the keys and values of which tokens, the same on every rank.

    Args:
        world_size: ranks.
        masks: masks of the model's layers.
        stripe: consecutive positions of a sequence that one rank owns in decoding.
    """

    def __init__(self, world_size: int, masks: Sequence[Mask], stripe: int) -> None:
        self._world_size, self._masks, self._stripe = world_size, tuple(masks), stripe
        self._held: dict[int, Placement] = {}

    def length(self, sequence: int) -> int:
        """Tokens of a sequence whose keys and values are held."""
        held = self._held.get(sequence)
        return int(held.end.max(initial=0)) if held is not None else 0

    def rows_per_rank(self, sequence: int) -> list[int]:
        """Rows of a sequence that each rank holds."""
        return [int(each) for each in self._held[sequence].tokens_per_rank()]

    def plan(self, counts: Mapping[int, int], strategy: Strategy, decodes: bool) -> Step:
        """Plans the step that feeds so many new tokens of each sequence.

        Args:
            counts: new tokens by sequence, at least 1 each.
            strategy: what travels.
            decodes: whether tokens are owned in stripes, as decoded ones are.
        """
        sequences = tuple(counts)
        starts = np.array([self.length(each) for each in sequences], dtype=np.int64)
        ends = starts + np.array([counts[each] for each in sequences], dtype=np.int64)
        if decodes:
            numbers = np.array(sequences, dtype=np.int64)
            new = shard_in_stripes(starts, ends, numbers, self._stripe, self._world_size)
        else:
            new = shard_evenly(starts, ends, self._world_size)
        tables = [nobody_holds(self._world_size)]
        for number, sequence in enumerate(sequences):
            held = self._held.get(sequence)
            if held is not None:
                columns = np.full_like(held.document, number), held.start, held.end, held.rank
                tables.append(Placement(*columns, self._world_size))
        held = Placement.concatenate(tables)
        plans = {mask: step_plan(held, new, strategy, mask) for mask in self._masks}
        after = held_after(held, new)
        for number, sequence in enumerate(sequences):
            self._held[sequence] = after.select(after.document == number)
        return Step(sequences, plans, new)

    def drop(self, sequence: int) -> None:
        """Forgets a sequence."""
        self._held.pop(sequence, None)


class ModelRank:
    """A model on one of the ranks that answer together.

    Args:
        model: model to load.
        core: core attention of this rank.
        device: device of the weights.
        tensor_ranks: ranks that share each layer with this one.
    """

    def __init__(
        self,
        model: ServedModel,
        core: CoreAttention,
        device: torch.device,
        tensor_ranks: TensorRanks = ALONE,
    ) -> None:
        # Without a function for masks of this name transformers makes none: the plan has it.
        need_transformers().AttentionInterface.register(IMPLEMENTATION, _attend)
        self._served, self._core, self._device = model, core, device
        self._model = model.load(device, ranks=tensor_ranks)
        self._speaks = tensor_ranks.rank == 0
        self._kept = [KeptKeys() for _ in model.windows]
        self._scales = {
            int(module.layer_idx): float(module.scaling)
            for module in self._model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "scaling")
        }
        assert sorted(self._scales) == list(range(len(model.windows))), "layers of another kind"

    @torch.no_grad()
    def run(self, step: Step, tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Runs a step. Collective.

        Args:
            step: plan of the step.
            tokens: new tokens of each sequence.

        Returns:
            Logits of the token that follows each sequence whose last token is of this rank,
            float32 `[vocabulary]`, by sequence; of ranks that share layers the first has them.
        """
        mine = step.new.of_rank(self._core.transport.rank)
        mine = mine.select(np.lexsort((mine.start, mine.document)))
        shape = self._served.shape
        needed = None
        for plan in step.plans.values():
            memory = plan_memory(plan, shape)
            needed = memory if needed is None else needed.union(memory)
        assert needed is not None
        self._core.reserve(needed)
        ids, positions, last = self._rows(step, mine, tokens)
        counts = np.bincount(
            mine.document, weights=mine.end - mine.start, minlength=len(step.sequences)
        )
        exchanges = self._core.buffers.place(
            [build_exchange(plan, self._core.transport.rank) for plan in step.plans.values()]
        )
        run = _StepRun(
            self._core,
            self._kept,
            self._served.windows,
            step.sequences,
            [int(each) for each in counts],
            dict(zip(step.plans, exchanges, strict=True)),
        )
        if not len(ids):
            # A model of transformers does not run without tokens.
            for layer in range(len(self._kept)):
                self._serve(run, layer)
            return {}
        out = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor([*last.values()], dtype=torch.int64, device=self._device),
            distca_run=run,
        )
        assert run.layers_run == len(self._kept), "a layer did not ask for its attention"
        return dict(zip(last, out.logits[0].float(), strict=True)) if self._speaks else {}

    def _serve(self, run: _StepRun, layer: int) -> None:
        """Takes part in a layer's attention as a server alone."""
        shape, dtype = self._served.shape, self._served.dtype
        q, kv = (
            torch.empty((0, heads, shape.head_dim), dtype=dtype, device=self._device)
            for heads in (shape.heads, shape.kv_heads)
        )
        run.attend(layer, q, kv, kv, self._scales[layer])

    def drop(self, sequence: int) -> None:
        """Frees the keys and values of a sequence."""
        for kept in self._kept:
            kept.drop(sequence)

    def _rows(
        self, step: Step, mine: Placement, tokens: Mapping[int, Sequence[int]]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, int]]:
        """Returns this rank's token ids, their positions, and the row of each sequence's last."""
        ids: list[int] = []
        positions: list[int] = []
        last: dict[int, int] = {}
        begins = np.full(len(step.sequences), np.iinfo(np.int64).max)
        ends = np.zeros(len(step.sequences), dtype=np.int64)
        np.minimum.at(begins, step.new.document, step.new.start)
        np.maximum.at(ends, step.new.document, step.new.end)
        for number, start, end in zip(mine.document, mine.start, mine.end, strict=True):
            sequence, first = step.sequences[number], int(begins[number])
            ids += tokens[sequence][start - first : end - first]
            positions += range(start, end)
            if end == ends[number]:
                last[sequence] = len(ids) - 1
        on_device = [torch.tensor(each, dtype=torch.int64) for each in (ids, positions)]
        return on_device[0].to(self._device), on_device[1].to(self._device), last


@dataclass
class _StepRun:
    """What the layers of a step need; a layer knows its number.

    Attributes:
        layers_run: layers whose attention has run.
    """

    core: CoreAttention
    kept: Sequence[KeptKeys]
    windows: Sequence[int | None]
    sequences: tuple[int, ...]
    counts: list[int]
    exchanges: Mapping[Mask, Exchange]
    layers_run: int = 0

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Core attention of a layer: `q` and its result are `[rows, heads, head_dim]`."""
        self.kept[layer].append(self.sequences, self.counts, k, v)
        all_k, all_v = self.kept[layer].of(self.sequences)
        run = ProgramRun((self.exchanges[Mask(self.windows[layer])],), _ONE_CALL)
        self.layers_run += 1
        return self.core(q, all_k, all_v, run, scale)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    *,
    distca_run: _StepRun,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `[1, heads, rows, dim]` -> `[1, rows, heads, dim]`."""
    layer = int(module.layer_idx)
    window = distca_run.windows[layer]
    assert sliding_window is None or window == sliding_window - 1, "a layer has another window"
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    return distca_run.attend(layer, q, k, v, scaling)[None], None

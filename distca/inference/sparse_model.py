"""A model in one process whose attention drops far rows as ranks of given levels would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from distca.attention.importance import most_important
from distca.inference.models import ServedModel, need_transformers
from distca.inference.transformers_model import layer_of
from distca.plan import Mask, SteppedPlan
from distca.plan.span import Floats
from distca.runtime.serving.importance import OBSERVERS
from distca.schedule.serving import nobody_holds
from distca.schedule.serving.csps import Levels, Sparsity, kept_count
from distca.schedule.serving.csps.degradation import GRID
from distca.schedule.serving.csps.pipeline import NearToFar

_NAME = "distca-sparse"
"""Name under which transformers knows this attention."""


class SparseModel:
    """A model whose prompts are shared out over virtual ranks.

    Args:
        model: model to load; all its layers see all earlier tokens.
        levels: levels of the virtual ranks, and their tokens.
        device: device of the weights.
        partitions: micro-partitions; the same share of each is kept.

    Raises:
        ValueError: layers have windows.
    """

    def __init__(
        self, model: ServedModel, levels: Levels, device: torch.device, partitions: int = 1
    ) -> None:
        if any(window is not None for window in model.windows):
            raise ValueError(
                f"{model.path} has layers with windows, which see only near keys: choose a model "
                "without windows"
            )
        need_transformers().AttentionInterface.register(_NAME, _attend)
        self._levels, self._device, self._partitions = levels, device, partitions
        self._dense = Sparsity.nothing_dropped(len(model.windows), model.shape.kv_heads)
        self._model = model.load(device, _NAME)

    @torch.no_grad()
    def run(
        self, tokens: Sequence[int], sparsity: Sparsity | None, last: int
    ) -> tuple[torch.Tensor, Floats]:
        """Runs a prompt.

        Args:
            tokens: token ids.
            sparsity: kept ratios; None: all is kept, and dropped masses are measured.
            last: tokens at the end whose logits, and whose dropped masses, are asked for.

        Returns:
            Logits, float32 `[last, vocabulary]`, and dropped masses, float64 `[layers, kv_heads,
            far levels, GRID]`, or none.
        """
        kept = self._dense if sparsity is None else sparsity
        strategy = NearToFar(self._levels, kept, (None,) * kept.layers, (self._partitions,))
        run = _Run(strategy, len(tokens), sparsity is None, last)
        logits = self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            use_cache=False,
            logits_to_keep=last,
            distca_sparse=run,
        ).logits[0]
        return logits.float().cpu(), np.array(run.masses)


class _Run:
    """A prompt on its way through the layers: each says which keys are important in the next."""

    def __init__(self, strategy: NearToFar, tokens: int, measures: bool, last: int) -> None:
        new = strategy.shard(np.array([0]), np.array([tokens]))
        self._pieces = new.select(np.argsort(new.start))
        dense = strategy.plan(nobody_holds(new.world_size), self._pieces, Mask())
        self._sparse = strategy.sparse_plans(dense)
        self._levels, self._measures, self._last = strategy.levels, measures, last
        self._importance: torch.Tensor | None = None
        self.masses: list[Floats] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of a layer, `[heads, rows, dim]`, of `k` and `v` `[kv_heads, rows, dim]`."""
        kv_heads, rows, _ = k.shape
        grouped = q.reshape(kv_heads, -1, *q.shape[1:])
        outputs, importance = torch.empty_like(grouped), torch.zeros(rows, kv_heads)
        pieces, last = self._pieces, len(self._pieces.rank) - 1
        unseen = np.full(pieces.world_size, OBSERVERS)
        # A rank's last queries observe, so its last piece comes first.
        for number in range(last, -1, -1):
            start, end = int(pieces.start[number]), int(pieces.end[number])
            scores = (grouped[:, :, start:end] @ k[:, None, :end].transpose(-1, -2)).float()
            hidden = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
            if layer in self._sparse:
                hidden = hidden | self._dropped(self._sparse[layer], start, end)[:, None]
            scores = (scores * scaling).masked_fill_(hidden.to(k.device), float("-inf"))
            shares = scores.softmax(-1)
            outputs[:, :, start:end] = shares.to(v.dtype) @ v[:, None, :end]
            if self._measures and number == last:
                self.masses.append(self._mass(shares[:, :, -self._last :].mean((1, 2)).cpu()))
            rank = pieces.rank[number]
            observers = min(int(unseen[rank]), end - start)
            unseen[rank] -= observers
            observed = shares[:, :, end - start - observers :].sum((1, 2)).T.cpu()
            for own in np.flatnonzero(pieces.rank[: number + 1] == rank).tolist():
                span = slice(int(pieces.start[own]), int(pieces.end[own]))
                importance[span] += observed[span]
        self._importance = importance
        return outputs.flatten(0, 1)

    def _dropped(self, stepped: SteppedPlan, start: int, end: int) -> torch.Tensor:
        """The keys that the queries from `start` to `end` don't see: `[kv_heads, queries, end]`."""
        t, kept = stepped.plan.tasks, stepped.kept
        assert self._importance is not None
        assert kept is not None
        heads = self._importance.shape[1]
        dropped = torch.zeros((heads, end - start, end), dtype=torch.bool)
        of_queries = self._importance[start:end].clone()
        if end == len(self._importance):
            of_queries[-1] = float("inf")
        for task in np.flatnonzero((t.q_start == start) & ~t.ends_on_diagonal).tolist():
            span = slice(int(t.kv_start[task]), int(t.kv_end[task]))
            keys = most_important(self._importance[span], kept.kv[task].tolist())
            queries = most_important(of_queries, kept.q[task].tolist())
            for head in range(heads):
                seen = torch.zeros(end - start, span.stop - span.start, dtype=torch.bool)
                seen[queries[head][:, None], keys[head]] = True
                dropped[head, :, span] = ~seen
        return dropped

    def _mass(self, shares: torch.Tensor) -> Floats:
        """What ratios would drop of the last queries' shares, `[kv_heads, rows]`, by level."""
        mass = np.zeros((len(shares), self._levels.count - 1, len(GRID)))
        if self._importance is None:
            return mass
        pieces = self._pieces
        levels = self._levels.of(pieces.rank, pieces.rank[-1:])
        for number in np.flatnonzero(levels).tolist():
            span = slice(int(pieces.start[number]), int(pieces.end[number]))
            rows = span.stop - span.start
            for ratio, kept in enumerate(kept_count(np.array(GRID), np.array(rows)).tolist()):
                chosen = most_important(self._importance[span], [kept] * len(shares))
                for head, best in enumerate(chosen):
                    of_kept = shares[head, span.start + best].sum()
                    rest = float(shares[head, span].sum() - of_kept)
                    mass[head, levels[number] - 1, ratio] += max(rest, 0.0)
        return mass


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    dropout: float = 0.0,
    *,
    distca_sparse: _Run,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: `[1, heads, rows, dim]` -> `[1, rows, heads, dim]`."""
    run = distca_sparse
    outputs = run.attend(layer_of(module), query[0], key[0], value[0], scaling)
    return outputs.transpose(0, 1)[None], None

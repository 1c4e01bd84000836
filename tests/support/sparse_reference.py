"""Attention that drops rows, by its definition: which pairs a plan keeps, and a model with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distca.attention.reference import attend, document_visibility
from distca.plan import Mask, Plan, SteppedPlan
from distca.runtime.serving.importance import OBSERVERS
from distca.schedule.serving.batches import LayerPlans
from support.stepped import rows_of

NAME = "sparse_reference"


def kept_pairs(stepped: SteppedPlan, importance: torch.Tensor) -> torch.Tensor:
    """The pairs that a plan keeps: bool `[kv_heads, tokens, tokens]`.

    Args:
        stepped: plan that drops rows.
        importance: importance of all tokens, `[tokens, kv_heads]`.
    """
    plan, t, kept_rows = stepped.plan, stepped.plan.tasks, stepped.kept
    tokens, heads = int(plan.lengths.sum()), importance.shape[1]
    assert kept_rows is not None
    seen = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    last = {int(end) - 1 for end in np.cumsum(plan.lengths)}
    for task in range(len(t)):
        offset = int(plan.document_offsets[t.document[task]])
        q = range(offset + t.q_start[task], offset + t.q_end[task])
        kv = range(offset + t.kv_start[task], offset + t.kv_end[task])
        for head in range(heads):
            of = importance[:, head].tolist()
            queries = sorted((token in last, of[token], token) for token in q)
            keys = sorted((of[token], token) for token in kv)
            kept = [token for _, token in keys[len(keys) - kept_rows.kv[task, head] :]]
            for _, _, query in queries[len(queries) - kept_rows.q[task, head] :]:
                seen[head, query, kept] = True
    return seen & torch.ones(tokens, tokens, dtype=torch.bool).tril()


def importance_of(
    plan: Plan,
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    lse_TH: torch.Tensor,
    scale: float,
    ranks: int,
) -> torch.Tensor:
    """Importance of all tokens after a layer, `[tokens, kv_heads]`."""
    tokens, kv_heads = k_THD.shape[:2]
    group = q_THD.shape[1] // kv_heads
    scores = torch.einsum("qhd,khd->hqk", q_THD, k_THD.repeat_interleave(group, 1)) * scale
    weights = torch.exp(scores - lse_TH.T[..., None])
    weights = weights * document_visibility(plan.lengths.tolist())
    document = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
    found = torch.zeros(tokens, q_THD.shape[1], dtype=weights.dtype)
    for rank in range(ranks):
        queries, keys = rows_of(plan, rank)
        for each in np.unique(document[queries]):
            own = keys[document[keys] == each]
            last = queries[document[queries] == each][-OBSERVERS:]
            found[own] = weights[:, last][:, :, own].sum(1).T
    return found.unflatten(1, (kv_heads, group)).sum(2)


@torch.no_grad()
def sparse_logits(
    model: Any, plans: LayerPlans, ids: list[int], ranks: int, answer: Sequence[int] = ()
) -> torch.Tensor:
    """Logits of one process in float64 that keeps the pairs that plans keep: behind a prompt, and
    behind each token of an answer, which sees all, `[1 + tokens, vocabulary]`."""
    from transformers import AttentionInterface

    importance: list[torch.Tensor] = []

    def attend_to_kept(
        module: Any, query: Any, key: Any, value: Any, _: Any, scaling: float, **__: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (each[0].transpose(0, 1).double() for each in (query, key, value))
        plan = plans.of(int(module.layer_idx), Mask())
        visible = document_visibility([len(q)])
        if plan.drops:
            visible = visible.repeat(k.shape[1], 1, 1)
            visible[:, : len(ids), : len(ids)] = kept_pairs(plan, importance[-1])
        out, lse = attend(q, k, v, visible, scaling)
        of_prompt = (each[: len(ids)] for each in (q, k, lse))
        importance.append(importance_of(plan.plan, *of_prompt, scaling, ranks))
        return out[None].to(query.dtype), None

    AttentionInterface.register(NAME, attend_to_kept)
    loaded = model.load(torch.device("cpu"), "eager").double()
    loaded.set_attn_implementation(NAME)
    fed = torch.tensor([[*ids, *answer]])
    logits: torch.Tensor = loaded(input_ids=fed, use_cache=False).logits[0, len(ids) - 1 :]
    return logits

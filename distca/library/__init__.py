"""Disaggregated core attention in a training loop of your own.

Three calls are enough:

    planner = Planner(shape)                          # once, on every rank
    batch = planner.place(documents)                  # tokens, positions and labels of this rank
    out = core_attention(q_THD, k_THD, v_THD, batch)  # in every layer; differentiable

`distca.library.hugging_face` makes the third call for models of transformers. The names that this
module exports, and those of `hugging_face`, keep to semantic versions.
"""

from distca.cost.volume import AttentionShape
from distca.library.batch import Batch, Predictions, RolloutTokens
from distca.library.documents import IGNORED, Document, split_rows
from distca.library.operation import core_attention
from distca.library.planner import Planner
from distca.library.plans import PlannedDocuments
from distca.library.share import share_documents, split_packed
from distca.library.trees import Rollout, Tree, share_prefixes
from distca.plan import Mask

__all__ = [
    "IGNORED",
    "AttentionShape",
    "Batch",
    "Document",
    "Mask",
    "PlannedDocuments",
    "Planner",
    "Predictions",
    "Rollout",
    "RolloutTokens",
    "Tree",
    "core_attention",
    "share_documents",
    "share_prefixes",
    "split_packed",
    "split_rows",
]

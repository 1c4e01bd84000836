"""Small jobs that simulator tests have in common, and their documents."""

from __future__ import annotations

from dataclasses import replace

from distca.cost.model_sizes import Experts, ModelSize
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.plan.span import Int64s
from distca.simulate import CLUSTERS, PUBLISHED, UNCHARGED, Workload, pack_sequences

CONTEXT = 16_384
MODEL = ModelSize(4, 512, 8, 4, 64, 1024, 1000)
JOB = Workload(
    MODEL,
    replace(CLUSTERS["dgx-a100"], gpus_per_node=4, charges=PUBLISHED),
    gpus=8,
    context=CONTEXT,
    sequences=4,
    tolerance=0.05,
)
JOBS = {
    "charged": JOB,
    "uncharged": replace(JOB, cluster=replace(JOB.cluster, charges=UNCHARGED)),
    "recomputed": replace(JOB, recompute="full"),
    "windows": replace(JOB, model=replace(MODEL, window_left=500, window_attn_skip_freq=2)),
    "experts": replace(
        JOB, model=replace(MODEL, experts=Experts(8, 2, 256)), expert_parallel=4, recompute="mlp"
    ),
    # Hops and gathers are longer than kernels.
    "slow links": replace(
        JOB, cluster=replace(JOB.cluster, node_gb_per_s=5.0, network_gb_per_s=1.0)
    ),
}


def batch(seed: int, name: str = "pretrain", sequences: int = JOB.sequences) -> list[Int64s]:
    """Returns documents of sequences, of lengths from a distribution."""
    lengths = draw(DISTRIBUTIONS[name], sequences * CONTEXT, seed)
    return pack_sequences(lengths, sequences, CONTEXT)

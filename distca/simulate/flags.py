"""Flags of `pretrain_gpt.py`, and of Megatron-LM, for a simulated configuration.

With `--distca` a sample is `--seq-length` tokens of a rank, and `--micro-batch-size` of them are a
rank's part of a micro-batch. A window is a sample of each data-parallel rank; documents are cut
where the window ends. So a window with one simulated sequence cuts documents where the simulation
did. A sequence that does not give each rank whole attention blocks shares a window with others.
Without `--distca` a sample is a simulated sequence.
"""

from __future__ import annotations

import math

from distca.plan import BLOCK
from distca.simulate.baselines import MEGATRON
from distca.simulate.hybrid import HYBRID
from distca.simulate.workload import (
    DISTCA_SYSTEMS,
    Candidate,
    Workload,
    hybrid_refusal,
    options_of,
    token_pairs,
)
from distca.wording import counted

_COUNTED = (
    *("--bf16", "--use-distributed-optimizer"),
    *("--overlap-grad-reduce", "--overlap-param-gather"),
)
"""Flags with which `ModelCosts` counts memory and the reduction of gradients."""


def training_flags(candidate: Candidate, workload: Workload) -> list[str]:
    """Makes the flags of `pretrain_gpt.py` beside those of model, data and learning rate.

    Args:
        candidate: a configuration with `--distca`.
        workload: model, cluster and sizes that were simulated.

    Returns:
        Flags, each with its value.

    Raises:
        ValueError: training cannot cut the sequences so that each rank has whole attention blocks,
            or the configuration is one without `--distca`.
    """
    if candidate.system not in DISTCA_SYSTEMS:
        raise ValueError(
            f"{candidate.system} is simulated without --distca: give one of "
            f"{', '.join(DISTCA_SYSTEMS)}"
        )
    options, chain = options_of(candidate), candidate.chain
    if (uneven := uneven_seq_length(candidate, workload)) is not None:
        samples, seq_length = 1, uneven
    else:
        sequences = sequences_of_a_window(candidate, workload)
        samples = workload.sequences * chain // candidate.micro_batches // sequences
        seq_length = sequences * workload.context // candidate.data // chain
    links = workload.planned_links(candidate)
    tolerance = workload.tolerance if candidate.tolerance is None else candidate.tolerance
    flags = [
        f"--tensor-model-parallel-size {candidate.tensor}",
        *(["--sequence-parallel"] if candidate.tensor > 1 else []),
        f"--pipeline-model-parallel-size {candidate.stages}",
        *_expert_flags(workload),
        f"--seq-length {seq_length}",
        f"--micro-batch-size {samples}",
        f"--global-batch-size {samples * candidate.data * candidate.micro_batches}",
        f"--max-position-embeddings {max(workload.context, seq_length)}",
        *_COUNTED,
        "--distca",
        # Megatron's default is more, which core attention cannot apply.
        "--attention-dropout 0",
        f"--distca-scheduler {candidate.system}",
        *([] if options.free_placement else ["--distca-placement sequential"]),
        f"--distca-tolerance {tolerance}",
        f"--distca-max-document-length {workload.context}",
        f"--distca-gpus-per-node {workload.cluster.gpus_per_node}",
        f"--distca-node-gb-per-s {links.node_gb_per_s}",
        f"--distca-network-gb-per-s {links.network_gb_per_s}",
    ]
    flags += _recompute_flags(workload)
    if candidate.max_in_flight is not None:
        flags.append(f"--distca-max-in-flight {candidate.max_in_flight}")
    if chain > 1:
        flags.append(f"--distca-chain {chain}")
    if not candidate.ping_pong:
        flags.append("--no-distca-ping-pong")
    if candidate.pool_size is not None:
        pairs = token_pairs(workload.costs_of(candidate))
        flags.append(f"--distca-pool-size {candidate.pool_size} --distca-token-pairs {pairs:.0f}")
        # Other batches may need more and smaller micro-batches than those that were simulated.
        flags.append(f"--distca-memory-gb {workload.cluster.usable_bytes / 1e9:g}")
    if candidate.wide_documents is not None:
        flags.append(f"--distca-wide-documents {candidate.wide_documents}")
    if candidate.head_parallel > 1:
        flags.append(f"--distca-head-parallel-size {candidate.head_parallel}")
    if candidate.max_buffer_bytes is not None:
        flags.append(f"--distca-max-buffer-bytes {candidate.max_buffer_bytes}")
    if workload.cluster.charges.copy_engines:
        flags.append("--distca-transport nvshmem --distca-nvshmem-mode copy-engine")
    if candidate.keeps_inputs:
        flags.append("--distca-backward keep")
    if workload.model.latents is not None:
        rows = "on" if workload.costs_of(candidate).sends_latents else "off"
        flags.append(f"--distca-latent-rows {rows}")
    return flags


def megatron_flags(candidate: Candidate, workload: Workload) -> list[str]:
    """Makes the flags of Megatron-LM beside those of model, data and learning rate.

    Args:
        candidate: a configuration of one of `MEGATRON`.
        workload: model, cluster and sizes that were simulated.

    Returns:
        Flags, each with its value.

    Raises:
        ValueError: Megatron-LM has no such system, or refuses this configuration of it.
    """
    if candidate.system not in MEGATRON:
        raise ValueError(f"{candidate.system} is not Megatron's: give one of {', '.join(MEGATRON)}")
    if candidate.system == HYBRID:
        refusal = hybrid_refusal(candidate.data * candidate.context, workload)
        if refusal is not None:
            raise ValueError(refusal)
    samples = workload.sequences // candidate.data // candidate.micro_batches
    flags = [
        f"--tensor-model-parallel-size {candidate.tensor}",
        *(["--sequence-parallel"] if candidate.tensor > 1 else []),
        f"--pipeline-model-parallel-size {candidate.stages}",
        *_expert_flags(workload),
        *_context_parallel_flags(candidate, workload),
        f"--seq-length {workload.context}",
        f"--micro-batch-size {1 if candidate.system == HYBRID else samples}",
        f"--global-batch-size {workload.sequences}",
        f"--max-position-embeddings {workload.context}",
        *_COUNTED,
        *_recompute_flags(workload),
    ]
    return flags


def _context_parallel_flags(candidate: Candidate, workload: Workload) -> list[str]:
    """Flags of the context-parallel groups of a baseline."""
    size, apart = candidate.context, candidate.all_to_all
    if candidate.system == HYBRID:
        return [
            # Megatron-LM's default, but not that of this repository's pretrain_gpt.py.
            "--hybrid-context-parallel --calculate-per-token-loss --dataloader-type single",
            f"--max-seqlen-per-dp-cp-rank {-(-workload.context // size)}",
        ]
    if size == 1:
        return []
    ways = {"cp-p2p": "p2p", "cp-a2a": "a2a", "cp-a2a+p2p": "a2a+p2p"}
    flags = [
        f"--context-parallel-size {size}",
        f"--cp-comm-type {ways.get(candidate.system, 'all_gather')}",
    ]
    if candidate.system == "cp-a2a+p2p":
        flags.append(f"--hierarchical-context-parallel-sizes {apart} {size // apart}")
    return flags


def _recompute_flags(workload: Workload) -> list[str]:
    """Flags of what runs forward again."""
    if workload.recompute == "mlp":
        module = "moe" if workload.model.experts else "mlp"
        return [f"--recompute-granularity selective --recompute-modules {module}"]
    if workload.recompute == "full":
        return [
            "--recompute-granularity full --recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    return []


def _expert_flags(workload: Workload) -> list[str]:
    """Flags that share out experts."""
    if workload.model.experts is None:
        return []
    return [
        f"--expert-model-parallel-size {workload.expert_parallel}",
        "--expert-tensor-parallel-size 1",
    ]


def uneven_seq_length(candidate: Candidate, workload: Workload) -> int | None:
    """Returns the mean tokens of a rank's micro-batches where their number does not divide the
    sequences; None: it does.

    It is a multiple of whole blocks, so that a global batch has a few tokens more.
    """
    if candidate.pool_size is None or workload.sequences % candidate.micro_batches == 0:
        return None
    multiple = math.lcm(BLOCK, 2 * candidate.tensor)
    parts = candidate.data * candidate.micro_batches * multiple
    return -(-workload.sequences * workload.context // parts) * multiple


def sequences_of_a_window(candidate: Candidate, workload: Workload) -> int:
    """Returns the smallest number of sequences that gives each rank whole blocks.

    Args:
        candidate: a configuration with `--distca`; the windows of a chain together have as many.
        workload: model, cluster and sizes that were simulated.

    Raises:
        ValueError: none does; the message says what to simulate instead.
    """
    chain = candidate.chain
    each = workload.sequences * chain // candidate.micro_batches
    blocks = chain * candidate.data * BLOCK

    def fits(number: int, context: int) -> bool:
        # Two nano-batches, each divided by sequence parallelism.
        even = each * context // candidate.data // chain % (2 * candidate.tensor) == 0
        return even and number * context % blocks == 0

    for number in range(1, each + 1):
        if each % number == 0 and fits(number, workload.context):
            return number
    # Multiples of these fit.
    multiple = chain * candidate.data * math.lcm(BLOCK, 2 * candidate.tensor)
    fewer = range(workload.context - 1, max(workload.context - multiple - 1, 0), -1)
    more = range(workload.context + 1, workload.context + multiple + 1)
    near = [
        str(context)
        for contexts in (fewer, more)
        if (context := next((c for c in contexts if fits(each, c)), None)) is not None
    ]
    raise ValueError(
        f"pretrain_gpt.py gives each rank a multiple of {BLOCK} tokens, but "
        f"{counted(each, 'sequence')} of {workload.context:,} tokens cannot be divided so over "
        f"{counted(candidate.data, 'data-parallel rank')}: simulate with --context "
        f"{' or '.join(near)}"
    )

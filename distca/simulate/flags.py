"""Flags of `pretrain_gpt.py` for a simulated configuration.

A sample of Megatron is `--seq-length` tokens of a rank, and `--micro-batch-size` of them are a
rank's part of a micro-batch. A window is a sample of each data-parallel rank; documents are cut
where the window ends. So a window with one simulated sequence cuts documents where the simulation
did. A sequence that does not give each rank whole attention blocks shares a window with
others.
"""

from __future__ import annotations

import math

from distca.plan import BLOCK
from distca.simulate.workload import DISTCA_SYSTEMS, Candidate, Workload, options_of


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
    sequences = _sequences_of_a_window(candidate, workload)
    samples = workload.sequences * chain // candidate.micro_batches // sequences
    seq_length = sequences * workload.context // candidate.data // chain
    links = workload.cluster.links(candidate.tensor)
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
        # `ModelCosts` counts memory and the reduction of gradients with these.
        *("--bf16", "--use-distributed-optimizer"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
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
    if workload.recompute == "mlp":
        module = "moe" if workload.model.experts else "mlp"
        flags.append(f"--recompute-granularity selective --recompute-modules {module}")
    if workload.recompute == "full":
        flags.append("--recompute-granularity full --recompute-method uniform")
        flags.append("--recompute-num-layers 1")
    if candidate.max_in_flight is not None:
        flags.append(f"--distca-max-in-flight {candidate.max_in_flight}")
    if chain > 1:
        flags.append(f"--distca-chain {chain}")
    if candidate.max_buffer_bytes is not None:
        flags.append(f"--distca-max-buffer-bytes {candidate.max_buffer_bytes}")
    if candidate.keeps_inputs:
        flags.append("--distca-backward keep")
    if workload.model.latents is not None:
        rows = "on" if workload.costs_of(candidate).sends_latents else "off"
        flags.append(f"--distca-latent-rows {rows}")
    return flags


def _expert_flags(workload: Workload) -> list[str]:
    """Flags that share out experts."""
    if workload.model.experts is None:
        return []
    return [
        f"--expert-model-parallel-size {workload.expert_parallel}",
        "--expert-tensor-parallel-size 1",
    ]


def _sequences_of_a_window(candidate: Candidate, workload: Workload) -> int:
    """Returns the smallest number of sequences that gives each rank whole blocks."""
    chain = candidate.chain
    each = workload.sequences * chain // candidate.micro_batches
    # Two nano-batches, each divided by sequence parallelism.
    if each * workload.context // candidate.data // chain % (2 * candidate.tensor) == 0:
        for number in range(1, each + 1):
            blocks = chain * candidate.data * BLOCK
            if each % number == 0 and number * workload.context % blocks == 0:
                return number
    multiple = chain * candidate.data * math.lcm(BLOCK, 2 * candidate.tensor)
    raise ValueError(
        f"pretrain_gpt.py gives each rank a multiple of {BLOCK} tokens, which {each} sequence(s) "
        f"of {workload.context:,} tokens on {candidate.data} data-parallel ranks are not: simulate "
        f"with --context {max(workload.context // multiple, 1) * multiple}"
    )

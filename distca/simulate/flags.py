"""A simulated configuration as flags of `pretrain_gpt.py`.

A sample of Megatron is `--seq-length` tokens of a rank, and `--micro-batch-size` of them are a
rank's part of a micro-batch. A window is a sample of each data-parallel rank; documents are cut
where it ends. So where it holds one simulated sequence, training cuts documents where the
simulation did. A sequence that does not give each rank whole attention blocks shares a window with
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distca.plan import BLOCK
from distca.simulate.advice import TITLES, Choice
from distca.simulate.search import WAYS, Candidate, Job


def training_flags(candidate: Candidate, job: Job) -> list[str]:
    """What `pretrain_gpt.py` needs beside the flags of the model, the data and the learning rate.

    Args:
        candidate: a configuration with `--distca`.
        job: what was simulated.

    Returns:
        Flags, each with its value.

    Raises:
        ValueError: training cannot cut the sequences so that each rank has whole attention blocks,
            or the configuration is one without `--distca`.
    """
    c, cluster = candidate, job.cluster
    if c.system not in WAYS:
        raise ValueError(f"{c.system} is simulated without --distca: give one of {', '.join(WAYS)}")
    way = WAYS[c.system](max_in_flight=c.max_in_flight)
    sequences = _sequences_of_a_window(c, job)
    samples = job.sequences // c.micro_batches // sequences
    seq_length = sequences * job.context // c.data
    tolerance = job.tolerance if c.tolerance is None else c.tolerance
    flags = [
        f"--tensor-model-parallel-size {c.tensor}",
        *(["--sequence-parallel"] if c.tensor > 1 else []),
        f"--pipeline-model-parallel-size {c.stages}",
        f"--seq-length {seq_length}",
        f"--micro-batch-size {samples}",
        f"--global-batch-size {samples * c.data * c.micro_batches}",
        f"--max-position-embeddings {max(job.context, seq_length)}",
        # What memory and the reduction of gradients were counted with: see `ModelCosts`.
        *("--bf16", "--use-distributed-optimizer"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
        "--distca",
        f"--distca-scheduler {c.system}",
        *([] if way.free_placement else ["--distca-placement sequential"]),
        f"--distca-tolerance {tolerance}",
        f"--distca-max-document-length {job.context}",
        f"--distca-gpus-per-node {cluster.gpus_per_node}",
        f"--distca-node-gb-per-s {cluster.node_gb_per_s}",
        f"--distca-network-gb-per-s {cluster.network_gb_per_s}",
    ]
    if c.max_in_flight is not None:
        flags.append(f"--distca-max-in-flight {c.max_in_flight}")
    if c.head_groups > 1:
        flags.append(f"--distca-head-groups {c.head_groups}")
    return flags


def _sequences_of_a_window(candidate: Candidate, job: Job) -> int:
    """The fewest that give each rank whole blocks."""
    c = candidate
    each = job.sequences // c.micro_batches
    # Two nano-batches, each divided by sequence parallelism.
    if each * job.context // c.data % (2 * c.tensor) == 0:
        for number in range(1, each + 1):
            if each % number == 0 and number * job.context % (c.data * BLOCK) == 0:
                return number
    multiple = c.data * math.lcm(BLOCK, 2 * c.tensor)
    raise ValueError(
        f"pretrain_gpt.py gives each rank a multiple of {BLOCK} tokens, which {each} sequence(s) "
        f"of {job.context:,} tokens on {c.data} data-parallel ranks are not: simulate with "
        f"--context {max(job.context // multiple, 1) * multiple}"
    )


def best_of_distca(choices: Sequence[Choice]) -> Candidate | None:
    """The fastest configuration with `--distca`; None: nothing fits, or none was asked for."""
    chosen = [c for c in choices if c.system in WAYS and c.candidate is not None]
    best = max(chosen, key=lambda choice: choice.tokens_per_second, default=None)
    return None if best is None else best.candidate


def how_to_train(choices: Sequence[Choice], job: Job) -> list[str]:
    """Lines with the flags of DistCA's best configuration; none where there is no such."""
    best = best_of_distca(choices)
    if best is None:
        return []
    what = f"{TITLES[best.system]}, on {job.gpus} GPUs"
    try:
        flags = training_flags(best, job)
    except ValueError as error:
        return [f"No flags of pretrain_gpt.py for {what}: {error}"]
    return [
        f"Flags of pretrain_gpt.py for {what}, beside those of the model, the data and the "
        "learning rate:",
        format_flags(flags),
    ]


def format_flags(flags: Sequence[str], width: int = 96) -> str:
    """Flags as a shell reads them: indented lines, which go on after a backslash."""
    lines = [""]
    for flag in flags:
        if lines[-1] and len(lines[-1]) + 1 + len(flag) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {flag}".strip()
    return " \\\n".join(f"    {line}" for line in lines)

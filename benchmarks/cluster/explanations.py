"""What pages of simulated tables and figures say of how they were found, and of their columns."""

from __future__ import annotations

SEARCHED = (
    "`distca simulate`'s search finds each system's best configuration for each job "
    "(`distca/simulate/advice.py`)."
)
NOT_COMPARABLE = (
    "A cell has the smallest and the largest gain of a row's jobs. A job is not comparable if one "
    "of the two systems does not run: it is out of memory, does not divide the job, or Megatron "
    "refuses it. A dash: no job is comparable."
)
EXPLANATION = [
    "All systems have the same charges (`distca/simulate/charges.py`; with `--baseline-ideal` no "
    "system has any): links and copies run below peak, exchanges slow down compute, each GEMM's "
    "last wave is half full on average, gradient reduction and exchanges share network ports, and "
    "CP pays for the copies and saved tensors of Transformer Engine.",
    "",
    "*Idle*: the share of time in which compute is not busy, mean of a row's jobs. *Exposed*: the "
    "part of it that is spent waiting for exchanges or late peers. *Perfect balance*: 1 / (1 - "
    "WLB-LLM's idle share), the gain over WLB-LLM of a system that is never idle and does the same "
    "work. With the same parallel sizes, no gain can be much larger. Our WLB-LLM is idealised: it "
    "packs by the simulator's own times, forward and backward, and runs bins in the best order. "
    "Bins range from 1/16 sequence to what fits in memory. We give it the best configuration for "
    "every job.",
    "",
    "A configuration is out of memory if any batch does not fit. DistCA's buffers are as large as "
    "the busiest server of any plan needs. If nothing fits, we also try tolerance 0.2 and bounded "
    "buffers (`--distca-max-buffer-bytes`).",
]
PAPERS_WAY = [
    "",
    "*WLB-LLM, the paper's way* (`wlb-llm-paper`) packs by a formula of forward work, ignores "
    "memory, makes at most as many bins as sequences and does not order them. It keeps gathered "
    "keys twice. Without a pipeline it tries only the two largest CP sizes, with one micro-batch. "
    "*As the paper ran both*: speed of the paper's scheduler (`greedy`) over that, both with "
    "`--recompute-modules mlp`, as in the authors' public experiments. We do not simulate the "
    "slowdowns that the paper reports for 34B in 4D (memory fragmentation, late launches). A "
    "rank's two nano-batches share links, but unlike on one NCCL stream their exchanges do not "
    "queue.",
]
FIGURE_3 = (
    "*All-gather share*: the time in which ranks wait for keys and values to be gathered, and "
    "for their gradients to be reduced. *Kept*: each rank keeps the gathered keys and values "
    "of all layers until the backward pass. This comes close to the paper's memory share. "
    "*Gathered again*: each rank keeps only its own keys and values, as Transformer Engine does, "
    "and gathers the rest again in the backward pass. This doubles the communication of the "
    "backward pass. *GB*: the GPU with most memory in use, mean of the batches. *Fits*: "
    "batches in which no GPU runs out of memory."
)


def rule(batches: int | None) -> str:
    """Says how each system's configuration was found, and what a gain is.

    Args:
        batches: batches that were given; None: enough for each job.
    """
    first = (
        "every baseline configuration that could still win by its lower bound, and DistCA's most "
        "promising ones"
    )
    if batches == 1:
        text = (
            f"{SEARCHED} It has one batch of each job. It runs {first}. A gain is a ratio of "
            "speeds in that batch."
        )
    else:
        text = (
            f"{SEARCHED} It runs the first batches with {first}, also with server pools. The "
            "fastest then run batches of 96 sequences in total. The winner runs all batches. A "
            "job's gain is the ratio of speeds over all its batches. ±: the largest half-width of "
            "a row's 95% confidence intervals."
        )
    return f"{text} {NOT_COMPARABLE}"


def columns(limit: float) -> str:
    """Explains the columns of the table of all jobs.

    Args:
        limit: gigabytes of a GPU that training may fill.
    """
    return (
        "Columns of systems: speed over WLB-LLM's, and in parentheses the job's 95% confidence "
        "interval where it ran several batches. OOM: no configuration fits in memory. A dash: none "
        "divides the job, or Megatron refuses them all. *Best*: the fastest configuration; where "
        f"it names no tolerance, DistCA's is 0.1. *GB*: peak of a GPU; the limit is {limit:.0f}. "
        "*Simulated, OOM, all*: sizes that ran, sizes known not to fit (they ran or not), and all "
        "sizes that divide the job. A size is a choice of tensor, pipeline, data and context "
        "parallelism and of the number of micro-batches. Its variants, such as server pools and "
        "tolerances, are not counted."
    )

"""The space that a search for the best parallel configuration goes through.

`divisions` lists the configurations that divide a workload, `candidates` those of them that may fit
in memory, and the functions named `with...` the variants of a configuration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distca.plan import BLOCK, Mask
from distca.plan.span import Int64s
from distca.schedule import document_loads, most_in_flight_of_1f1b
from distca.simulate.baselines import BASELINES, WITHOUT_WINDOWS
from distca.simulate.bins import GATHERED, PACKED_BY_WORK, keeps
from distca.simulate.hybrid import HYBRID
from distca.simulate.layer_mean import LayerMean
from distca.simulate.workload import (
    DISTCA_SYSTEMS,
    SYSTEMS,
    Candidate,
    Workload,
    hybrid_refusal,
    options_of,
)

_CHAINS = (2, 4)
"""Lengths of the chains of micro-batches that are tried."""
_BUFFERS = (4.0, 3.0, 2.5, 2.0)
"""Bounds of what a server receives that are tried: times the bytes of the rows that it owns."""
_UNEVEN, _MOST_UNEVEN = 1.125, 4
"""Step between numbers of micro-batches smaller than a sequence, and their bound, for each sequence
of a global batch."""
_OTHER_NUMBERS = (0.5, 0.75, 1.25, 1.5)
"""Numbers of micro-batches of server pools that are tried, times the number of the fastest."""
_LAST_RESORTS = 4
"""Configurations, those that need least memory, that are tried with less where none fits."""
_SLOWEST_NETWORK = 12.5
"""Network speed in GB/s down to which plans are tried: the same for all clusters, so that a faster
network has all plans of a slower one."""
_MOST_BINS = 16
"""Bound on WLB-LLM's bins for each sequence of a global batch: the work of the longest documents is
many times that of smaller bins."""


def divisions(
    system: str,
    workload: Workload,
    tensor: Sequence[int],
    stages: Sequence[int],
    most_micro_batches: int = 256,
) -> list[Candidate]:
    """Lists all configurations that divide the workload, whether they fit in memory or not.

    Args:
        system: one of `SYSTEMS`.
        workload: model, cluster and sizes.
        tensor: tensor-parallel sizes.
        stages: pipeline sizes.
        most_micro_batches: bound on the micro-batches of a replica.

    Raises:
        ValueError: there is no such system.
    """
    if system not in SYSTEMS:
        raise ValueError(f"no system {system!r}: choose from {', '.join(SYSTEMS)}")
    found = []
    for tp in tensor:
        servers = workload.gpus // tp
        for pp in stages:
            if not _divides(tp, workload) or servers % pp or workload.model.layers % pp:
                continue
            if servers // pp * tp % workload.expert_parallel:
                continue
            if pp > 1 and workload.model.layers // pp % len(workload.model.masks.pattern):
                # The stages' layers would have different masks.
                continue
            if system in WITHOUT_WINDOWS and not workload.model.sees_all:
                continue
            if system == HYBRID and (pp > 1 or hybrid_refusal(servers, workload)):
                continue
            groups = _divisors(servers // pp) if system in BASELINES[1:] else [1]
            # WLB-LLM's bins hold documents of any sequence, so they may be smaller than one.
            most = workload.sequences * (_MOST_BINS if system in PACKED_BY_WORK else 1)
            heads = workload.model.kv_heads // tp
            found += [
                Candidate(system, tp, pp, servers // pp // cp, cp, number, all_to_all=apart)
                for cp in groups
                for apart in _all_to_alls(system, cp, heads)
                for number in _divisors(most)
                # Fewer micro-batches than stages leave most of a pipeline idle.
                if number <= most_micro_batches and (pp == 1 or number >= pp)
                if _fills(system, workload, pp, servers // pp // cp, cp, number)
            ]
    if system == "wlb-llm-paper" and tuple(stages) == (1,):
        # The authors' sweeps without pipelines go down from 32 ranks, and stop after two sizes.
        sizes = sorted({c.context for c in found if c.context <= 32})[-2:]
        found = [c for c in found if c.context in sizes]
    return found


def _all_to_alls(system: str, context: int, heads: int) -> list[int]:
    """Sizes of all-to-alls in a group of `context` ranks; none where the system has no such group.

    Args:
        system: one of `SYSTEMS`.
        context: ranks of the group.
        heads: key-value heads of a GPU, which the size must divide.
    """
    sizes = [n for n in _divisors(context) if heads % n == 0]
    if system == "cp-a2a":
        return [n for n in sizes if n == context]
    if system == "cp-a2a+p2p":
        return [n for n in sizes if 1 < n < context]
    return [1]


def _fills(
    system: str, workload: Workload, stages: int, data: int, context: int, micro_batches: int
) -> bool:
    """Returns whether the batch's sequences fill the micro-batches of all ranks evenly."""
    if system in DISTCA_SYSTEMS:
        return workload.sequences // micro_batches * workload.context % (2 * data) == 0
    if workload.sequences * workload.context % (data * context * micro_batches):
        return False
    if system == HYBRID:
        # `context` is how many ranks the longest document has: a power of two.
        return micro_batches == 1 and context & (context - 1) == 0
    if system == "wlb-llm-paper":
        # At most one bin a sequence, and one micro-batch without a pipeline.
        return data * micro_batches <= workload.sequences and (stages > 1 or micro_batches == 1)
    if system in PACKED_BY_WORK:
        return data * micro_batches <= _MOST_BINS * workload.sequences
    return workload.sequences % (data * micro_batches) == 0


def candidates(
    system: str,
    workload: Workload,
    tensor: Sequence[int],
    stages: Sequence[int],
    most_micro_batches: int = 256,
) -> list[Candidate]:
    """Lists the configurations of `divisions` that may fit in memory.

    A configuration with `--distca` that does not fit is tried with 1F1B's bound of micro-batches in
    flight, and with micro-batches smaller than a sequence.
    """
    found = []
    for candidate in divisions(system, workload, tensor, stages, most_micro_batches):
        tried = [
            candidate,
            *with_fewer_in_flight(candidate),
            *with_uneven_micro_batches(candidate, workload),
        ]
        usable = workload.cluster.usable_bytes
        found += [each for each in tried if least_memory(each, workload) <= usable][:1]
    return found


def with_uneven_micro_batches(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with micro-batches smaller than a sequence, which take less memory,
    the largest first.

    Only server pools have them, be it one pool of all ranks: their micro-batches differ in tokens.
    A document that is longer has one alone, so that the longest decides what fits.
    """
    least = max(candidate.micro_batches, workload.sequences)
    size = candidate.pool_size or candidate.data
    if candidate.system != "tiles" or candidate.chain > 1 or workload.model.experts is not None:
        return []
    if candidate.micro_batches < workload.sequences:
        return []
    numbers, most = [], _MOST_UNEVEN * workload.sequences
    while (least := math.ceil(_UNEVEN * least + 0.5)) <= most:
        numbers.append(least)
    return [replace(candidate, micro_batches=n, pool_size=size) for n in numbers]


def with_fewer_in_flight(candidate: Candidate) -> list[Candidate]:
    """Returns the configuration with 1F1B's bound of micro-batches in flight; none if that is no
    change."""
    if (
        candidate.system not in DISTCA_SYSTEMS
        or candidate.stages == 1
        or candidate.max_in_flight is not None
    ):
        return []
    return [replace(candidate, max_in_flight=max(candidate.stages, candidate.chain))]


def without_latents(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with keys and values that travel, if latents do and need not.

    Latents are fewer bytes, so that plans send them to more servers, which expand them: in all that
    takes more products and memory.
    """
    if candidate.system not in DISTCA_SYSTEMS or workload.latent_rows != "auto":
        return []
    if not workload.costs_of(candidate).sends_latents:
        return []
    return [replace(candidate, may_send_latents=False)]


def with_less_memory(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Substitutes for a configuration that does not fit."""
    shared = [] if candidate.head_parallel > 1 else with_most_shared_heads(candidate, workload)
    uneven = with_uneven_micro_batches(candidate, workload)[:1]
    return [
        *without_latents(candidate, workload),
        *with_fewer_in_flight(candidate),
        *shared,
        *uneven,
    ]


def with_smaller_buffers(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with bounds of what a server receives, the largest first.

    Only `tiles` keeps to a bound. It costs time, since fewer tasks can move.
    """
    if candidate.system != "tiles" or candidate.max_buffer_bytes is not None:
        return []
    shape = workload.costs_of(candidate).comm_shape
    tokens = workload.sequences * workload.context // candidate.micro_batches // candidate.data
    # A nano-batch has half of a micro-batch's rows.
    own = tokens // 2 * (shape.q_row_bytes + shape.moved_kv_row_bytes)
    return [replace(candidate, max_buffer_bytes=int(times * own)) for times in _BUFFERS]


def with_chains(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with smaller micro-batches that share documents, longest chains
    last.

    Without a pipeline they are no use, and as in training each rank has whole attention blocks. A
    chain lies on all ranks, and in no server pool.
    """
    tokens = workload.sequences * workload.context // candidate.micro_batches // candidate.data
    if candidate.stages == 1 or candidate.chain > 1 or candidate.pool_size is not None:
        return []
    return [
        replace(
            candidate,
            chain=chain,
            micro_batches=candidate.micro_batches * chain,
            max_in_flight=None,
        )
        for chain in _CHAINS
        if tokens % (chain * math.lcm(BLOCK, 2 * candidate.tensor)) == 0
    ]


def with_kept_inputs(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with servers that keep the kernels' inputs for the backward pass.

    Training can in one stage without chains. Layers that run forward again would take them twice,
    and latents are expanded again at any rate.
    """
    alone = candidate.stages == candidate.chain == 1 and workload.recompute != "full"
    if candidate.system not in DISTCA_SYSTEMS or not alone:
        return []
    if workload.costs_of(candidate).sends_latents:
        return []
    return [replace(candidate, keeps_inputs=True)]


def with_slower_links(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with plans for networks that are slower than the cluster's.

    The scheduler judges bytes by the links, and not by the simulated time: with a faster network it
    moves more bytes, and sometimes loses more than it gains.
    """
    servers = candidate.pool_size or candidate.stages * candidate.data
    one_node = servers <= workload.cluster.servers_per_node(candidate.tensor)
    if candidate.system not in DISTCA_SYSTEMS or one_node:
        return []
    times = workload.cluster.network_gb_per_s / _SLOWEST_NETWORK
    halvings = math.floor(math.log2(times)) if times > 1 else 0
    return [replace(candidate, network_divisor=2**n) for n in range(1, halvings + 1)]


def with_pools(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with server pools: of a node's ranks, of two nodes' and of four's.

    Training has them without chains and experts. A pool has the same ranks of all stages.
    """
    alone = candidate.chain == 1 and workload.model.experts is None
    if candidate.system != "tiles" or not alone:
        return []
    if candidate.pool_size not in (None, candidate.data):
        return []
    node = workload.cluster.servers_per_node(candidate.tensor)
    sizes = [
        size
        for size in (node, 2 * node, 4 * node)
        if size < candidate.data and candidate.data % size == 0
    ]
    return [replace(candidate, pool_size=size) for size in sizes]


def without_ping_pong(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration without ping-pong, if tasks stay inside nodes, or ranks share
    heads.

    There exchanges take less time than twice as many launches, and interfere with less. Tasks
    travel among the ranks of a server pool, and not between ranks that share heads.
    """
    ranks = candidate.pool_size or candidate.data
    inside = ranks <= workload.cluster.servers_per_node(candidate.tensor)
    if candidate.system != "tiles" or (candidate.stages > 1 and candidate.pool_size is None):
        return []
    if not candidate.ping_pong or not (inside or candidate.head_parallel > 1):
        return []
    return [replace(candidate, ping_pong=False)]


def with_shared_heads(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with other numbers of ranks that share heads, which rise: ranks of
    a node, or of several nodes."""
    if candidate.system != "tiles" or workload.latent_rows == "on":
        return []
    ranks = math.gcd(candidate.data, candidate.pool_size or candidate.data)
    heads = workload.model.kv_heads // candidate.tensor
    node = workload.cluster.servers_per_node(candidate.tensor)
    sizes = [n for n in _divisors(math.gcd(ranks, heads)) if node % n == 0 or n % node == 0]
    return [replace(candidate, head_parallel=n) for n in sizes if n != candidate.head_parallel]


def with_most_shared_heads(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with heads that as many ranks of a node share as can, and, where
    there are so many heads, ranks of several nodes."""
    node = workload.cluster.servers_per_node(candidate.tensor)
    every = with_shared_heads(candidate, workload)
    inside = [each for each in every if each.head_parallel <= node]
    beyond = [each for each in every if each.head_parallel > node]
    return [*inside[-1:], *beyond[-1:]]


def with_pools_or_shared_heads(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with server pools, and with as many ranks as can that share heads,
    in one pool and in pools of a node."""
    pools = with_pools(candidate, workload)
    return [
        *pools,
        *with_most_shared_heads(candidate, workload),
        *(o for each in pools[:1] for o in with_most_shared_heads(each, workload)),
    ]


def with_more_micro_batches(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with twice the micro-batches, where server pools need more memory.

    A pool with short documents alone has more tokens than the mean.
    """
    more = 2 * candidate.micro_batches
    if candidate.pool_size is None or more > _MOST_UNEVEN * workload.sequences:
        return []
    return [replace(candidate, micro_batches=more)]


def with_other_micro_batches(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with other numbers of micro-batches, which server pools allow: they
    need not divide the sequences."""
    if candidate.pool_size is None:
        return []
    numbers = {max(round(each * candidate.micro_batches), 1) for each in _OTHER_NUMBERS}
    most = _MOST_UNEVEN * workload.sequences
    return [
        replace(candidate, micro_batches=n)
        for n in sorted(numbers)
        if n != candidate.micro_batches and candidate.stages <= n <= max(most, candidate.stages)
    ]


def last_resorts(
    failed: Sequence[Candidate], workload: Workload, last_tolerance: float | None
) -> list[Candidate]:
    """Returns configurations for a workload in which none fits: with another tolerance, and with
    smaller buffers, which cost time.

    Args:
        failed: configurations that do not fit, those first that need least memory.
        workload: model, cluster and sizes.
        last_tolerance: value of `Candidate.tolerance` to try; None: none.
    """
    sizes = list(dict.fromkeys(map(sizes_of, failed)))[:_LAST_RESORTS]
    least = [next(c for c in failed if sizes_of(c) == each) for each in sizes]
    # Variants that only ran a batch may need more memory in others.
    plain = [
        replace(each, pool_size=None, ping_pong=True, keeps_inputs=False, network_divisor=1)
        for each in least
    ]
    tolerances = dict.fromkeys((None, last_tolerance))
    tolerant = [replace(each, tolerance=t) for each in plain for t in tolerances]
    return tolerant + [o for each in tolerant for o in with_smaller_buffers(each, workload)]


def only_divides_further(candidate: Candidate, other: Candidate) -> bool:
    """Returns whether a configuration with `--distca` is another but for more micro-batches, and
    has no pipeline that these would fill."""
    if candidate.system not in DISTCA_SYSTEMS or candidate.stages > 1:
        return False
    more = candidate.micro_batches > other.micro_batches
    return more and replace(candidate, micro_batches=other.micro_batches) == other


def sizes_of(candidate: Candidate) -> Candidate:
    """Returns the configuration that `divisions` gave, without bounds, chains, tolerance, and
    choices of latents, inputs, planned links, server pools, ping-pong and shared heads."""
    micro_batches = candidate.micro_batches // candidate.chain
    return replace(
        candidate,
        micro_batches=micro_batches,
        chain=1,
        max_in_flight=None,
        may_send_latents=True,
        keeps_inputs=False,
        tolerance=None,
        max_buffer_bytes=None,
        network_divisor=1,
        pool_size=None,
        ping_pong=True,
        head_parallel=1,
    )


def _divides(tp: int, workload: Workload) -> bool:
    """Returns whether a tensor-parallel size divides nodes, heads and GPUs."""
    return not (
        workload.cluster.gpus_per_node % tp
        or workload.gpus % tp
        or workload.model.heads % tp
        or workload.model.kv_heads % tp
    )


def _divisors(number: int) -> list[int]:
    """Lists the divisors of a number, rising."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small)]
    return small + large[small[-1] == large[0] :] if small else []


def least_memory(candidate: Candidate, workload: Workload) -> float:
    """Lower bound of a first-stage GPU's memory in bytes: without buffers and imbalance."""
    costs = workload.costs(candidate.tensor)
    in_flight = most_in_flight_of_1f1b(candidate.micro_batches, candidate.stages)[0]
    if candidate.system in DISTCA_SYSTEMS:
        options = options_of(candidate)
        in_flight = options.tick_schedule(candidate.micro_batches, candidate.stages).most_in_flight[
            0
        ]
    tokens = (
        workload.sequences
        * workload.context
        / (candidate.data * candidate.context * candidate.micro_batches)
    )
    kept = tokens * costs.activation_bytes()
    if candidate.system in GATHERED:
        others = max(keeps(candidate.system, costs) * candidate.context - 1, 0)
        kept += tokens * others * costs.shape.kv_row_bytes
    if candidate.system == HYBRID:
        # Rounds keep one document, of which the batch may have none as long as a sequence.
        kept = 0.0
    layers = workload.model.layers // candidate.stages
    return in_flight * layers * kept + costs.state_bytes(
        0, candidate.stages, candidate.data * candidate.context
    )


def estimate(
    candidate: Candidate,
    workload: Workload,
    sequences: Sequence[Int64s],
    ticks: int | None = None,
) -> float:
    """Returns the seconds of an iteration if core attention were perfectly shared out and exchanges
    free.

    Args:
        candidate: a configuration with `--distca`.
        workload: model, cluster and sizes.
        sequences: lengths of the documents in each sequence of a global batch.
        ticks: number of ticks, forward and backward ones; None: those of the configuration.
    """
    assert candidate.system not in BASELINES, candidate.system
    costs = workload.costs(candidate.tensor)
    kernels = LayerMean.of(costs.cluster.attention_cost(costs.shape), workload.model)
    attention = document_loads(np.concatenate(sequences), Mask(), kernels).sum()
    both_ways = float(costs.passes @ [1, costs.cluster.backward_over_forward])
    shared = (
        workload.model.layers * both_ways * float(attention) / (candidate.stages * candidate.data)
    )
    tokens = workload.sequences * workload.context / (candidate.data * candidate.micro_batches)
    linear = float(costs.passes @ costs.layer_seconds())
    layers = workload.model.layers // candidate.stages
    tick = tokens * (layers * linear + sum(costs.head_seconds()))
    # Layers run once for each nano-batch, the output layer once for both.
    launches = np.add(costs.pre_launch_seconds(), costs.post_launch_seconds())
    tick += (1 + candidate.ping_pong) * layers * float(costs.passes @ launches) + sum(
        costs.head_launch_seconds()
    )
    if ticks is None:
        schedule = options_of(candidate).tick_schedule(candidate.micro_batches, candidate.stages)
        ticks = len(schedule.ticks)
    return shared + tick * ticks / 2

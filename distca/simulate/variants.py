"""Variants of a configuration: with other numbers, and with what takes less memory or time.

Each function takes a configuration and the workload, and returns the variants that training can
have; none where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distca.plan import BLOCK
from distca.simulate.workload import DISTCA_SYSTEMS, Candidate, Workload

_CHAINS = (2, 4)
"""Lengths of the chains of micro-batches that are tried."""
_BUFFERS = (4.0, 3.0, 2.5, 2.0)
"""Bounds of what a server receives that are tried: times the bytes of the rows that it owns."""
_UNEVEN = 1.2
"""Step between numbers of micro-batches smaller than a sequence."""
_MOST_UNEVEN, _MOST_PARTS = 2, 16
"""Bounds of these numbers for each sequence of a global batch: micro-batches, and micro-batches
times ranks. Few ranks may have more micro-batches, each with as many documents."""
_OTHER_NUMBERS, _NEAR_NUMBERS = (0.5, 0.7, 1.4), (0.85, 0.92, 1.15)
"""Numbers of micro-batches of server pools that are tried, times the number of the fastest; and
then of the fastest of these."""
_LARGER_NUMBERS = (1.08, 1.17)
"""The same, where all of an iteration needs more memory than its parts."""
_WIDE = (2, 4)
"""Parts of a sequence from which on documents are tried as wide ones."""
_LESS = 0.99
"""Share of the memory down to which a configuration counts as one that needs as much as another."""
_LAST_RESORTS = 4
"""Configurations, those that need least memory, that are tried with less where none fits."""
_SLOWEST_NETWORK = 12.5
"""Network speed in GB/s down to which plans are tried: the same for all clusters, so that a faster
network has all plans of a slower one."""


def with_uneven_micro_batches(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with micro-batches smaller than a sequence, which take less memory,
    the largest first.

    Only server pools have them, be it one pool of all ranks: their micro-batches differ in tokens.
    A document that is longer has one alone, so that the longest decides what fits. Pipelines have
    chains of micro-batches instead.
    """
    least = max(candidate.micro_batches, workload.sequences)
    size = candidate.pool_size or candidate.data
    if candidate.system != "tiles" or candidate.stages > 1:
        return []
    if candidate.micro_batches < workload.sequences:
        return []
    numbers, most = [], _most_micro_batches(candidate, workload)
    while (least := max(math.ceil(_UNEVEN * least), least + 1)) <= most:
        numbers.append(least)
    return [replace(candidate, micro_batches=n, pool_size=size) for n in numbers]


def in_one_pool(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns a pipeline whose ranks are one server pool, with sequences as micro-batches and with
    smaller ones, the largest first.

    They fill a pipeline better than sequences do, and take less memory, as chains do. Here tasks
    of a document do not wait for those of its earlier micro-batches.
    """
    experts = workload.model.experts is not None
    if candidate.system != "tiles" or candidate.stages == 1 or candidate.data == 1 or experts:
        return []
    numbers, most = [workload.sequences], _most_micro_batches(candidate, workload)
    while numbers[-1] < most:
        numbers.append(min(max(math.ceil(_UNEVEN * numbers[-1]), numbers[-1] + 1), most))
    numbers = [n for n in numbers if n >= candidate.stages]
    return [replace(candidate, micro_batches=n, pool_size=candidate.data) for n in numbers]


def _most_micro_batches(candidate: Candidate, workload: Workload) -> int:
    """Returns the most micro-batches of server pools that are tried."""
    times = max(_MOST_UNEVEN, _MOST_PARTS // candidate.data)
    return max(times * workload.sequences, candidate.micro_batches)


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
    alone = candidate.stages == 1 or candidate.pool_size is not None
    if candidate.system not in DISTCA_SYSTEMS or alone or candidate.chain > 1:
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
    """Returns the configuration with server pools: of a node's ranks, of two nodes', of four's, and
    of one rank; of eight nodes' where each has one rank.

    Training has them without chains. A pool has the same ranks of all stages. With experts there is
    one pool of all ranks, whose micro-batches may be any number.
    """
    if candidate.system != "tiles" or candidate.chain > 1:
        return []
    if candidate.pool_size not in (None, candidate.data) or candidate.wide_documents is not None:
        return []
    if workload.model.experts is not None:
        whole = candidate.stages == 1 and candidate.pool_size is None
        return [replace(candidate, pool_size=candidate.data)] if whole else []
    node = workload.cluster.servers_per_node(candidate.tensor)
    sizes = [
        size
        for size in (node, 2 * node, 4 * node, 1 if node > 1 else 8)
        if size < candidate.data and candidate.data % size == size % candidate.head_parallel == 0
    ]
    return [replace(candidate, pool_size=size) for size in sizes]


def with_wide_documents(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with server pools, whose long documents all ranks share.

    Documents are long from a half of a sequence on, or from a quarter. Pools are those of
    `with_pools`, or those that the configuration has. Training has no wide documents in a pipeline.
    """
    if candidate.stages > 1 or candidate.data < 2 or candidate.wide_documents is not None:
        return []
    smallest = with_pools(replace(candidate, pool_size=None), workload)[:2]
    sizes = dict.fromkeys([candidate.pool_size, *(each.pool_size for each in smallest)])
    return [
        replace(candidate, pool_size=size, wide_documents=workload.context // part)
        for size in sizes
        if size not in (None, candidate.data) and size % candidate.head_parallel == 0
        for part in _WIDE
    ]


def with_or_without_ping_pong(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration without ping-pong, or with it if it has none.

    Where tasks stay inside nodes, ranks share heads or little travels, exchanges take less time
    than twice as many launches, and interfere with less.
    """
    if candidate.system != "tiles" or (candidate.stages > 1 and candidate.pool_size is None):
        return []
    return [replace(candidate, ping_pong=not candidate.ping_pong)]


def with_shared_heads(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with other numbers of ranks that share heads, which rise: ranks of
    a node, or of several nodes.

    Several nodes share heads where each query head has keys of its own: such keys are too many to
    send them to other servers.
    """
    if candidate.system != "tiles" or workload.latent_rows == "on":
        return []
    ranks = math.gcd(candidate.data, candidate.pool_size or candidate.data)
    heads = workload.model.kv_heads // candidate.tensor
    node = workload.cluster.servers_per_node(candidate.tensor)
    own_keys = workload.model.heads == workload.model.kv_heads
    sizes = [
        n for n in divisors(math.gcd(ranks, heads)) if node % n == 0 or (own_keys and n % node == 0)
    ]
    return [replace(candidate, head_parallel=n) for n in sizes if n != candidate.head_parallel]


def with_most_shared_heads(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with heads shared by as many ranks of a node as possible, and by as
    many ranks of several nodes as possible."""
    node = workload.cluster.servers_per_node(candidate.tensor)
    every = with_shared_heads(candidate, workload)
    inside = [each for each in every if each.head_parallel <= node]
    beyond = [each for each in every if each.head_parallel > node]
    return [*inside[-1:], *beyond[-1:]]


def with_pools_or_shared_heads(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration without ping-pong, with server pools, and with as many ranks as can
    that share heads, in one pool and in pools of a node: without ping-pong where training can.

    Where little travels, ping-pong costs one layout more time than another, so that with it alone
    the slower one may come first.
    """
    pools = with_pools(candidate, workload)
    shared = [o for each in (candidate, *pools[:1]) for o in with_most_shared_heads(each, workload)]
    whole = (o for each in shared for o in with_or_without_ping_pong(each, workload) or [each])
    return [*with_or_without_ping_pong(candidate, workload), *pools, *whole]


def with_more_micro_batches(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with twice the micro-batches, where server pools need more memory.

    A pool with short documents alone has more tokens than the mean.
    """
    more = 2 * candidate.micro_batches
    if candidate.pool_size is None or more > _most_micro_batches(candidate, workload):
        return []
    return [replace(candidate, micro_batches=more)]


def may_fit_in_halves(
    candidate: Candidate, workload: Workload, memory: Mapping[Candidate, float]
) -> bool:
    """Returns whether a configuration that does not fit may with twice the micro-batches.

    They save half of what is not the model's state, and nothing where a long document decides.

    Args:
        candidate: a configuration.
        workload: model, cluster and sizes.
        memory: bytes that configurations needed which ran.
    """
    if (after := memory.get(candidate)) is None:
        return True
    state = workload.costs(candidate.tensor).state_bytes(0, candidate.stages, candidate.data)
    if state + (after - state) / 2 > workload.cluster.usable_bytes:
        return False
    half = memory.get(replace(candidate, micro_batches=candidate.micro_batches // 2))
    return half is None or after < _LESS * half


def with_other_micro_batches(
    candidate: Candidate, workload: Workload, times: Sequence[float] = _OTHER_NUMBERS
) -> list[Candidate]:
    """Returns the configuration with other numbers of micro-batches, which server pools allow: they
    need not divide the sequences.

    Args:
        candidate: a configuration.
        workload: model, cluster and sizes.
        times: the numbers, times that of the configuration.
    """
    if candidate.pool_size is None:
        return []
    numbers = {max(round(each * candidate.micro_batches), 1) for each in times}
    most = max(_most_micro_batches(candidate, workload), candidate.stages)
    return [
        replace(candidate, micro_batches=n)
        for n in sorted(numbers)
        if n != candidate.micro_batches and candidate.stages <= n <= most
    ]


def with_near_micro_batches(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with numbers of micro-batches that are a little smaller or larger,
    as `with_other_micro_batches`."""
    return with_other_micro_batches(candidate, workload, _NEAR_NUMBERS)


def with_a_few_more_micro_batches(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Returns the configuration with numbers of micro-batches that are a little larger, which take
    less memory, as `with_other_micro_batches`."""
    return with_other_micro_batches(candidate, workload, _LARGER_NUMBERS)


def last_resorts(
    failed: Sequence[Candidate], workload: Workload, last_tolerance: float | None
) -> list[Candidate]:
    """Returns configurations for a workload in which none fits: with another tolerance, in chains,
    and with smaller buffers, which cost time.

    Args:
        failed: configurations that do not fit, those first that need least memory.
        workload: model, cluster and sizes.
        last_tolerance: value of `Candidate.tolerance` to try, or None.
    """
    kinds: dict[object, Candidate] = {}
    for each in failed:
        kinds.setdefault((each.tensor, each.stages, each.context, _is_uneven(each, workload)), each)
    least = [*kinds.values()][:_LAST_RESORTS]
    # Variants that only ran a batch may need more memory in others.
    plain = [
        replace(
            each,
            # Server pools alone have any number of micro-batches; peers have no pools.
            pool_size=each.data if each.pool_size and _is_uneven(each, workload) else None,
            wide_documents=None,
            ping_pong=True,
            keeps_inputs=False,
            network_divisor=1,
        )
        for each in least
    ]
    tolerances = dict.fromkeys((None, last_tolerance))
    tolerant = [replace(each, tolerance=t) for each in plain for t in tolerances]
    # Plans of longer chains take minutes.
    chains = [o for each in plain for o in with_chains(each, workload)[:1]]
    # The loosest tolerance moves the fewest bytes.
    loose = [each for each in tolerant if each.tolerance == last_tolerance]
    return [
        *tolerant,
        *chains,
        *(o for each in loose for o in with_smaller_buffers(each, workload)),
    ]


def is_simple(candidate: Candidate) -> bool:
    """Whether a configuration has neither chains nor server pools, whose whole plans in a pipeline
    take minutes."""
    return candidate.chain == 1 and candidate.pool_size is None


def _is_uneven(candidate: Candidate, workload: Workload) -> bool:
    """Whether sequences do not divide evenly into the micro-batches."""
    return workload.sequences * candidate.chain % candidate.micro_batches != 0


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
        wide_documents=None,
        ping_pong=True,
        head_parallel=1,
    )


def divisors(number: int) -> list[int]:
    """Lists the divisors of a number, rising."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    large = [number // n for n in reversed(small)]
    return small + large[small[-1] == large[0] :] if small else []

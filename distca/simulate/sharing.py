"""What a context-parallel group's exchanges cost in a layer: seconds, bytes, copies and memory.

* **all-gather** (`--cp-comm-type all_gather`, Llama 3, WLB-LLM): keys and values of all ranks are
  gathered, which nothing hides, and their gradients reduced and scattered.
* **ring** (`p2p`, the default of Megatron): in each of R steps a rank computes its queries over the
  keys of one rank, while those of the next come from its neighbour. In the backward pass gradients
  of keys travel one step behind the keys. A rank holds the head and the tail of every document, so
  a step is a square on the diagonal, all queries over heads (keys of an earlier rank), or tails
  over all keys: equal work. A step's keys are sent once they are there and the kernel two steps
  before has run (two streams take turns); in the backward pass once the step before has run.
* **all-to-all** (`a2a`, Ulysses): rows of all heads of a rank become all rows of some heads, and
  back; R is 1. Nothing hides it. Key-value heads must be at least as many as ranks.
* **both** (`a2a+p2p`): all-to-all among A neighbouring ranks, rings of R over every Ath rank.

Where a cluster charges `baseline_copies`, exchanges also copy and keep what Transformer Engine does
(2.5, `context_parallel.py`): an all-gather moves keys and values apart, reorders them by document
position, runs heads and tails as two calls, keeps nothing for the backward pass but gathers again,
and sums the gradients of keys in zeros before it reorders them. A ring keeps the outputs of all its
steps until they are merged, and every step's keys. An all-to-all transposes rows before and after.
WLB-LLM keeps the gathered keys (DistCA paper, Section 3.2). What is left out, to the baselines'
advantage: padding of each document to a multiple of 2 R tokens in all other layers, and merges of
LSE. (All-gather and all-to-all refuse packed documents in that version: they are taken to be able
to.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeAlias, TypeVar

import numpy as np

from distca.cost.kernel_memory import kernel_token_bytes
from distca.cost.kernel_time import CostModel
from distca.plan.span import Floats, Int64s
from distca.simulate.charges import end_of_compute
from distca.simulate.costs import ModelCosts

Index: TypeAlias = "Int64s | tuple[slice | Int64s, Int64s]"
"""What selects bins: numpy's index of their first axes."""
_Tokens = TypeVar("_Tokens", int, Int64s)


@dataclass(frozen=True)
class Group:
    """A context-parallel group.

    Attributes:
        size: ranks of a group.
        all_to_all: how many neighbouring ranks share heads; the others form rings.
        servers: ranks of all groups, of all stages.
    """

    size: int
    all_to_all: int
    servers: int

    @property
    def ring(self) -> int:
        """Ranks of a ring."""
        return self.size // self.all_to_all


@dataclass(frozen=True)
class Shared:
    """Core attention of bins in a layer; "both": forward and backward, the last axis.

    Attributes:
        attention: forward seconds of each rank's kernels, `[bins, ranks]`.
        exposed: seconds of exchanges that nothing hides, beyond the slowest rank's kernels,
            `[bins, both]`.
        held: seconds that exchanges hold a rank's links, hidden or not, `[bins, both]`.
        sent: bytes that each rank sends, `[bins, both]`.
        copied: bytes of memory traffic of copies on each rank, `[bins, ranks, both]`.
        kept: bytes of gathered keys that each rank keeps for the backward pass, `[bins, ranks]`.
        transient: most bytes that each rank needs for a while, kernels of the backward pass among
            them, `[bins, ranks, both]`.
        calls: kernel calls of each rank, `[bins]`.
    """

    attention: Floats
    exposed: Floats
    held: Floats
    sent: Int64s
    copied: Floats
    kept: Floats
    transient: Floats
    calls: Int64s

    def select(self, index: Index) -> Shared:
        """Returns the bins that a numpy index selects."""
        return Shared(*(getattr(self, field.name)[index] for field in fields(self)))


def alone(tokens: Int64s, attention: Floats, costs: ModelCosts) -> Shared:
    """Core attention of ranks that share nothing.

    Args:
        tokens: tokens of each rank, `[bins, ranks]`.
        attention: forward seconds of each rank's kernels, `[bins, ranks]`.
        costs: costs of the model on the cluster.
    """
    bins, ranks = tokens.shape
    transient = np.zeros((bins, ranks, 2))
    transient[:, :, 1] = tokens * kernel_token_bytes(costs.shape)
    return Shared(
        attention,
        np.zeros((bins, 2)),
        np.zeros((bins, 2)),
        np.zeros((bins, 2), dtype=np.int64),
        np.zeros((bins, ranks, 2)),
        np.zeros((bins, ranks)),
        transient,
        np.ones(bins, dtype=np.int64),
    )


def gather_copies(size: int, costs: ModelCosts, keeps: int) -> tuple[float, float]:
    """Returns the bytes of memory traffic for each of a rank's tokens around an all-gather, there
    and back.

    Args:
        size: ranks of a group, equal in tokens.
        costs: costs of the model on the cluster.
        keeps: how often gathered keys are kept; 0: they are gathered anew.
    """
    if not costs.cluster.charges.baseline_copies:
        return 0.0, 0.0
    all_kv = size * costs.shape.kv_row_bytes
    reorder, put = 2.0 * all_kv, 2.0 * costs.shape.out_row_bytes
    # Heads and tails see all keys and half a chunk twice; sums are written as zeros.
    added = 3.0 * all_kv * (2 * size + 1) / (2 * size)
    again = 0.0 if keeps else reorder
    return reorder + put, again + all_kv + added + reorder + put


def all_gather(
    tokens: Int64s, attention: Floats, group: Group, costs: ModelCosts, keeps: int
) -> Shared:
    """Core attention of groups that gather all keys and values.

    Args:
        tokens, attention, costs: the same as of `alone`.
        group: sizes of the groups.
        keeps: how often gathered keys are kept for the backward pass; 0: they are gathered anew.
    """
    if group.size == 1:
        return alone(tokens, attention, costs)
    shape, size = costs.shape, group.size
    charged = costs.cluster.charges.baseline_copies
    whole = tokens.sum(axis=1)
    nbytes = whole * shape.kv_row_bytes * (size - 1) // size
    back = 1 if keeps else 2
    all_kv = whole[:, None] * float(shape.kv_row_bytes)
    own_kv = tokens * float(shape.kv_row_bytes)
    copied = tokens[:, :, None] * np.array(gather_copies(size, costs, keeps))
    transient = np.zeros((*tokens.shape, 2))
    transient[:, :, 1] = tokens * kernel_token_bytes(shape, size)
    if charged:
        # Gathered and reordered keys; sums of their gradients.
        transient[:, :, 0] += (1 if keeps else 2) * all_kv
        transient[:, :, 1] += (1 if keeps else 2) * all_kv
    both = gather_seconds(whole, group, costs, keeps)
    return Shared(
        attention,
        both,
        both,
        np.stack([nbytes, back * nbytes], axis=1),
        copied,
        np.maximum(keeps * all_kv - own_kv, 0.0),
        transient,
        np.full(len(tokens), gather_calls(costs)),
    )


def gather_calls(costs: ModelCosts) -> int:
    """Returns the kernel calls of a rank that has gathered keys, and the collectives of that."""
    return 2 if costs.cluster.charges.baseline_copies else 1


def gather_seconds(whole: Int64s | Floats, group: Group, costs: ModelCosts, keeps: int) -> Floats:
    """Returns the seconds in which groups gather keys, and reduce their gradients, `[bins, both]`.

    Args:
        whole: tokens of each group, `[bins]`.
        group: sizes of the groups.
        costs: costs of the model on the cluster.
        keeps: how often gathered keys are kept; 0: they are gathered anew.
    """
    cluster, size = costs.cluster, group.size
    speed, latency = cluster.ring(size, group.servers, costs.tensor_parallel)
    seconds = whole * costs.shape.kv_row_bytes * ((size - 1) / size) / (speed * 1e9)
    seconds = seconds + gather_calls(costs) * (latency * (size - 1) + cluster.launch_seconds)
    return np.stack([seconds, (1 if keeps else 2) * seconds], axis=1)


def ring_bytes(
    own: _Tokens, ring: int, all_to_all: int, q_row: int, kv_row: int, out_row: int
) -> tuple[_Tokens, _Tokens]:
    """Returns the bytes that a rank sends in a layer, forward and backward, by rings and
    all-to-alls.

    Args:
        own: tokens of a rank.
        ring, all_to_all: sizes as in `Group`.
        q_row, kv_row, out_row: bytes of a query row, of a key and a value row, of an output row.
    """
    others = all_to_all - 1
    # Query, key, value and output change places; then output and its gradient, and all gradients.
    there, back = (own * (q_row + kv_row + n * out_row) * others // all_to_all for n in (1, 2))
    passed = own * kv_row * (ring - 1)
    return there + passed, back + 2 * passed


def ring(
    lengths: list[Int64s],
    tokens: Int64s,
    attention: CostModel,
    group: Group,
    costs: ModelCosts,
) -> Shared:
    """Core attention of groups of rings, all-to-alls, or both.

    Args:
        lengths: tokens of the documents in each bin.
        tokens: tokens of each rank, `[bins, ranks]`.
        attention: forward seconds of tasks with all heads of a GPU.
        group: sizes of the groups.
        costs: costs of the model on the cluster.
    """
    cluster, shape = costs.cluster, costs.shape
    steps = group.ring
    kernels = _step_seconds(lengths, attention, group)
    own = tokens.max(axis=1)
    hop = hop_seconds(own, group, costs)
    # Where a step over heads takes as long as one of tails, all ranks take equally long.
    alike = bool((kernels[:, 1] == kernels[:, 2]).all())
    forward = _of_rank(kernels, 1 if alike else steps, steps)
    # A backward pass takes the steps in the opposite order.
    backward = cluster.backward_over_forward * forward[:, :, ::-1]
    launch, interference = cluster.launch_seconds, cluster.charges.interference
    exposed = np.stack(
        [
            run(each + launch, hop, interference) - (each + launch).sum(axis=2).max(axis=1)
            for run, each in ((ring_forward, forward), (ring_backward, backward))
        ],
        axis=1,
    )
    apart = own[:, None] * np.array(all_to_all_seconds(group, costs))
    exposed += apart + all_to_all_launches(group) * launch
    rows = shape.q_row_bytes, shape.kv_row_bytes, shape.out_row_bytes
    sent = ring_bytes(own, steps, group.all_to_all, *rows)
    copied, transient = ring_copies(tokens, group, costs)
    attention_seconds = np.broadcast_to(forward.sum(axis=2), (len(own), steps))
    return Shared(
        np.repeat(attention_seconds, group.all_to_all, axis=1),
        exposed,
        apart + hop[:, None] * (steps - 1) * np.array([1, 2]),
        np.stack(sent, axis=1),
        copied,
        np.zeros(tokens.shape),
        transient,
        np.full(len(tokens), steps),
    )


def _step_seconds(lengths: list[Int64s], attention: CostModel, group: Group) -> Floats:
    """Forward seconds of a step on the diagonal, over heads, and of tails, `[bins, 3]`."""
    document = np.concatenate(lengths)
    bins = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths])
    # A document is padded to whole chunks.
    chunk = -(-document // (2 * group.ring))
    both = 2 * chunk
    kinds = [(both, both, both * (both + 1) // 2)]
    kinds += [(both, chunk, both * chunk), (chunk, both, chunk * both)]
    if group.ring == 1:
        kinds[0] = (document, document, document * (document + 1) // 2)
    found = [
        np.bincount(bins, attention.seconds(q, kv, pairs), minlength=len(lengths))
        for q, kv, pairs in kinds
    ]
    return np.stack(found, axis=1) / group.all_to_all


def _of_rank(kernels: Floats, ranks: int, steps: int) -> Floats:
    """Returns the seconds of the first ranks' steps in the forward pass, `[bins, ranks, steps]`."""
    rank, step = np.arange(ranks)[:, None], np.arange(steps)
    return kernels[:, np.where(step == 0, 0, np.where(step <= rank, 1, 2))]


def ring_forward(kernels: Floats, hop: Floats, interference: float) -> Floats:
    """Returns the seconds of rings that all ranks enter at once, until the last one has ended,
    `[bins]`.

    Args:
        kernels: seconds of each rank's steps, `[bins, ranks, steps]`.
        hop: seconds of a message of keys and values, `[bins]`.
        interference: share of compute that messages take.
    """
    bins, ranks, steps = kernels.shape
    arrives, end = np.zeros((bins, ranks)), np.zeros((bins, ranks))
    # When the kernels one and two steps before have run.
    before = end
    for step in range(steps):
        start, next_one = np.maximum(end, arrives), arrives
        if step < steps - 1:
            ready = np.maximum(arrives, before)
            next_one = np.maximum(ready, np.roll(ready, 1, axis=1)) + hop[:, None]
        before = end
        end = end_of_compute(start, kernels[:, :, step], next_one, interference)
        arrives = next_one
    return np.asarray(end.max(axis=1))


def ring_backward(kernels: Floats, hop: Floats, interference: float) -> Floats:
    """Returns the same as `ring_forward` of a backward pass, whose gradients follow the keys.

    The first message has keys and values, the last one their gradients, all others both.
    """
    bins, ranks, steps = kernels.shape
    arrives, end = np.zeros((bins, ranks)), np.zeros((bins, ranks))
    for step in range(steps):
        start = np.maximum(end, arrives)
        sent = (step < steps - 1) + (step > 0) if steps > 1 else 0
        if sent:
            arrives = np.maximum(start, np.roll(start, 1, axis=1)) + sent * hop[:, None]
        end = end_of_compute(start, kernels[:, :, step], arrives, interference)
    return np.asarray(np.maximum(end, arrives).max(axis=1))


def hop_seconds(own: Int64s | Floats, group: Group, costs: ModelCosts) -> Floats:
    """Returns the seconds of a ring's slowest message: that between nodes, if there is one.

    Rings of several all-to-all groups pass on side by side, each rank over a link of its own.

    Args:
        own: tokens of a rank.
        group: sizes of the groups.
        costs: costs of the model on the cluster.
    """
    cluster = costs.cluster
    of_node = cluster.servers_per_node(costs.tensor_parallel)
    speed, latency = cluster.network_bytes_per_second, cluster.network_latency
    if group.servers <= of_node or of_node % group.size == 0:
        speed, latency = cluster.node_bytes_per_second, cluster.node_latency
    return own * costs.shape.kv_row_bytes / speed + latency + cluster.launch_seconds


def all_to_all_launches(group: Group) -> Int64s:
    """Returns the collectives of a layer's all-to-alls, `[both]`: three tensors go there and one
    comes back; two and three in the backward pass."""
    return np.array([4, 5]) * (group.all_to_all > 1)


def all_to_all_seconds(group: Group, costs: ModelCosts) -> tuple[float, float]:
    """Returns the seconds of all-to-alls for each of a rank's tokens, forward and backward."""
    cluster, shape, size = costs.cluster, costs.shape, group.all_to_all
    of_node = cluster.servers_per_node(costs.tensor_parallel)
    inside = size if group.servers <= of_node or of_node % size == 0 else math.gcd(size, of_node)
    seconds = []
    for outputs in (1, 2):
        rows = shape.q_row_bytes + shape.kv_row_bytes + outputs * shape.out_row_bytes
        nbytes = rows / size
        near, far = (inside - 1) * nbytes, (size - inside) * nbytes
        seconds.append(
            max(near / cluster.node_bytes_per_second, far / cluster.network_bytes_per_second)
        )
    return seconds[0], seconds[1]


def ring_copies(tokens: Int64s, group: Group, costs: ModelCosts) -> tuple[Floats, Floats]:
    """Returns the bytes of `copied` and `transient` of `Shared`."""
    shape, steps = costs.shape, group.ring
    q, out = float(shape.q_row_bytes), float(shape.out_row_bytes)
    kv = float(shape.kv_row_bytes)
    own = tokens[:, :, None].astype(np.float64)
    transient = own * np.array([0.0, kernel_token_bytes(shape)])
    if not costs.cluster.charges.baseline_copies:
        return np.zeros((*tokens.shape, 2)), transient
    earlier = np.arange(group.size) // group.all_to_all
    later = steps - 1 - earlier
    # Steps over heads copy half of the keys, steps of tails half of the queries, and backward of
    # outputs and their gradients. Each step's output and all gradients are read, and added.
    rows = (1 + earlier + later / 2) if steps > 1 else 0.0 * earlier
    keys = (1 + earlier / 2 + later) if steps > 1 else 0.0 * earlier
    forward = earlier * kv + later * q + 3 * rows * out
    backward = earlier * kv + later * (q + 2 * out) + 3 * (rows * q + keys * kv)
    if group.all_to_all > 1:
        # Two or three copies, before or after; each reads and writes.
        forward, backward = forward + 6 * (q + out + kv), backward + 6 * (q + 2 * out + kv)
    copied = own * np.stack([forward, backward], axis=1)
    # All steps' outputs and keys; keys and gradients that come and go.
    if steps > 1:
        transient = transient + own * np.stack(
            [rows * out + steps * kv, np.full(group.size, 4 * kv)], axis=1
        )
    return copied, transient

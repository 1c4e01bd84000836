"""A serving cluster: its prefill and decode ranks, what they hold, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass

from distca.cost.model_sizes import ModelSize
from distca.schedule.serving.cdsp import PrefillModel
from distca.simulate.cluster import Cluster
from distca.simulate.requests.costs import DecodeTimes
from distca.simulate.serving.overheads import NO_OVERHEADS, Overheads

BYTES = 2
"""Bytes of a number: weights, keys and values are in 16 bits."""


@dataclass(frozen=True)
class ServingCluster:
    """Prefill ranks in nodes, and decode ranks, each of which may be several GPUs.

    Attributes:
        times: seconds of a prefill.
        decode_times: seconds of a decode iteration.
        prefill_ranks: ranks that prefill.
        ranks_per_node: those of a node.
        decode_ranks: ranks that decode.
        prefill_tokens: tokens whose keys and values a prefill rank holds.
        decode_tokens: tokens whose keys and values a decode rank holds.
        sent_per_second: tokens whose keys and values a prefill rank's link sends in a second.
        links_of_decode_rank: such links that a decode rank receives by.
        layers: layers; all but the last are sent during computing.
        backends: requests that a decode rank receives at a time.
        block_size: rows of a block.
        max_num_batched_tokens: most tokens that an iteration of the prefill ranks feeds.
        max_num_seqs: most prompts that they compute at a time.

    Raises:
        ValueError: a number is not positive.
    """

    times: PrefillModel
    decode_times: DecodeTimes
    prefill_ranks: int = 16
    ranks_per_node: int = 8
    decode_ranks: int = 2
    prefill_tokens: int = 400_000
    decode_tokens: int = 4_000_000
    sent_per_second: float = 190_000.0
    links_of_decode_rank: int = 8
    layers: int = 32
    backends: int = 4
    block_size: int = 128
    max_num_batched_tokens: int = 131_072
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"{name} is {value}: give a positive number")

    def send_seconds(self, tokens: int, ranks: int) -> float:
        """Returns the seconds that a chunk's keys and values are under way from that many ranks."""
        return tokens / (self.sent_per_second * min(ranks, self.links_of_decode_rank))


def describe_cluster(
    times: PrefillModel,
    cluster: Cluster,
    model: ModelSize,
    prefill_ranks: int,
    decode_ranks: int,
    decode_tensor_parallel: int,
    backends: int = 4,
    block_size: int = 128,
    max_num_batched_tokens: int = 131_072,
    decode_overheads: Overheads = NO_OVERHEADS,
) -> ServingCluster:
    """Derives what ranks hold and how long decoding takes; a prefill rank is one GPU.

    A decode iteration reads all weights and cached rows, and has two all-reduces a layer, each of
    two collectives. Answers end at their length, so what is sampled costs nothing more. Prefills
    take their fitted times.

    Raises:
        ValueError: the weights don't fit, or the tensor-parallel size doesn't divide the heads.
    """
    model.attention_shape(decode_tensor_parallel)
    cluster.servers_per_node(decode_tensor_parallel)
    weights = BYTES * (
        model.layers * model.total_layer_parameters + 2 * model.vocabulary_parameters
    )
    row = BYTES * 2 * model.layers * model.kv_heads * model.head_dim
    room = [cluster.usable_bytes * gpus - weights for gpus in (1, decode_tensor_parallel)]
    if min(room) < row * block_size:
        raise ValueError(
            f"{weights / 1e9:.0f} GB of weights leave no room for keys and values on "
            f"{'one GPU' if room[0] < row * block_size else f'{decode_tensor_parallel} GPUs'} of "
            f"{cluster.name}: give a smaller model, or more memory"
        )
    speed = cluster.copied_bytes_per_second * decode_tensor_parallel
    of, layers = decode_overheads, model.layers
    together = decode_tensor_parallel > 1
    collectives = 4 * of.of_collective(1) * together
    latency = 2 * cluster.node_latency * together + cluster.launch_seconds + of.layer_seconds
    work = weights / (speed * of.weight_efficiency) + layers * latency
    step = max(work, layers * of.host_layer_seconds) + layers * collectives + of.iteration_seconds
    return ServingCluster(
        times,
        DecodeTimes(step, row / (speed * of.cache_efficiency)),
        prefill_ranks,
        cluster.gpus_per_node,
        decode_ranks,
        int(room[0] / row),
        int(room[1] / row),
        cluster.network_bytes_per_second / row,
        decode_tensor_parallel,
        model.layers,
        backends,
        block_size,
        max_num_batched_tokens,
    )

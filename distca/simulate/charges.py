"""Charges: what keeps a cluster's links, memory and GPUs from their data sheets' rates.

DistCA and the baselines have the same charges: they call the same functions. `UNCHARGED`
is the bound in which all rates are reached and a baseline's exchanges copy nothing; `PUBLISHED` has
figures that others measured:

* links: DeepEP's all-to-all between nodes carries 43 of the 50 GB/s of a 400 Gb/s InfiniBand
  adapter (its README, "normal kernels", 16 ranks). Within a node NCCL and DeepEP reach about as
  large a share of NVLink, or a larger one;
* memory: a copying kernel that is tuned by hand moves 3.01 of an H100's 3.35 TB/s (QuACK, 2025);
* interference: NCCL's all-gather holds 24 of an H100's 132 multiprocessors while it runs (NVIDIA
  developer forum, 2025, thread 337991; DeepSeek-V3 keeps 20 of them for exchanges).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from distca.plan.span import Floats

_Seconds = TypeVar("_Seconds", float, Floats)
_TILE = 128 * 256
"""Elements of the largest tile that a thread block of a matrix product computes."""


@dataclass(frozen=True)
class Charges:
    """Charges on both sides; by default there are none.

    Attributes:
        link_efficiency: share of a link's speed that messages and collectives reach.
        copy_efficiency: share of the memory's speed that copies reach.
        interference: share of a GPU's compute that an exchange takes while it is under way.
        half_waves: a matrix product ends with half a wave of tiles on average, so that its rate
            falls with fewer tokens and with more tensor parallelism.
        shared_ports: reduced gradients and other exchanges take turns on a rank's ports.
        copy_engines: attention servers exchange rows by copy engines inside a node and network
            cards between nodes, by puts that the host starts (`--distca-nvshmem-mode copy-engine`):
            these take no compute, but a launch for each message, one after the other. Measured
            nowhere; the figure is that of kernels.
        baseline_copies: exchanges of context parallelism copy rows, take memory and gather keys
            anew as Transformer Engine does; see `distca.simulate.sharing`.

    Raises:
        ValueError: a share is out of range.
    """

    link_efficiency: float = 1.0
    copy_efficiency: float = 1.0
    interference: float = 0.0
    half_waves: bool = False
    shared_ports: bool = False
    baseline_copies: bool = False
    copy_engines: bool = False

    def __post_init__(self) -> None:
        for name in ("link_efficiency", "copy_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: give a share above 0, at most 1"
                )
        if not 0 <= self.interference < 1:
            raise ValueError(
                f"interference is {self.interference}: give the share of compute that exchanges "
                "take, from 0 to below 1"
            )


UNCHARGED = Charges()
PUBLISHED = Charges(
    link_efficiency=0.86,
    copy_efficiency=0.9,
    interference=24 / 132,
    half_waves=True,
    shared_ports=True,
    baseline_copies=True,
)


def end_of_compute(
    start: _Seconds, seconds: _Seconds, busy_until: _Seconds, interference: float
) -> _Seconds:
    """Moment at which work ends that exchanges slow down until some moment.

    Args:
        start: moment at which the work begins.
        seconds: time of the work when nothing interferes.
        busy_until: moment until which exchanges are under way; may be before `start`.
        interference: share of compute that they take.
    """
    if not interference:
        return start + seconds
    left = 1 - interference
    overlap = np.maximum(busy_until - start, 0.0)
    slowed: _Seconds = np.where(  # type: ignore[assignment]
        seconds <= left * overlap, seconds / left, seconds + interference * overlap
    )
    return start + slowed


def exposed_reduction(hidden: float, needed: float, other: float, charges: Charges) -> float:
    """Returns the seconds by which the reduction of gradients delays the end of an iteration.

    Args:
        hidden: seconds of the backward pass behind which gradients are reduced; what other
            exchanges take of its compute is in them.
        needed: seconds of the reduction on free links.
        other: seconds in which other exchanges of that pass hold the links.
        charges: charges of the cluster.
    """
    end = float(end_of_compute(0.0, hidden, needed, charges.interference))
    busy = needed + other * charges.shared_ports
    return max(busy, end) - hidden


def half_wave_seconds(inner: float, multiprocessors: int, flops_per_second: float) -> float:
    """Returns the seconds of half a wave of tiles, which a matrix product's last wave wastes on
    average.

    Args:
        inner: length of the products' sums; that of several matrix products together.
        multiprocessors: multiprocessors of the GPU, each of which computes a tile at a time.
        flops_per_second: rate of the GPU on large matrices.
    """
    return 0.5 * multiprocessors * _TILE * 2 * inner / flops_per_second

"""The runtime of core attention and its transport, by a run's flags."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from distca.attention import select_kernel_of_heads
from distca.runtime import AttentionTimes, Buffers, CoreAttention, TimedKernel, Trace
from distca.schedule.program import NANO_BATCHES
from distca.transport import CollectiveTransport, Signal, SingleStream, Transport, TransportError
from megatron_patches.flags.config import DistcaConfig, TransportConfig

logger = logging.getLogger(__name__)


def build_core_attention(
    config: DistcaConfig,
    heads: tuple[int, int],
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    softcap: float | None = None,
) -> CoreAttention:
    """Makes what runs the plans on the ranks of a group. Collective.

    Args:
        config: our flags.
        heads: elements of a key's head, and of a value's.
        group: process group of the ranks, which nothing else uses.
        device: device of the rows.
        timeout: time limit of an exchange.
        softcap: bound of the scores, or None.

    Raises:
        ValueError: see `make_transport`.
        TransportError: see `make_transport`.
    """
    times = AttentionTimes(device)
    return CoreAttention(
        make_transport(config.transport, group, device, timeout),
        TimedKernel(select_kernel_of_heads(device.type, *heads, config.sm_margin, softcap), times),
        Buffers(device, len(NANO_BATCHES) if config.ping_pong else 1),
        config.backward,
        Trace(device),
        times,
    )


def make_transport(
    config: TransportConfig, group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Transport:
    """Makes the transport between the ranks of a group. Collective.

    Args:
        config: kind of transport.
        group: process group of the ranks, which nothing else uses.
        device: device of the rows.
        timeout: time limit of an exchange.

    Raises:
        ValueError: the transport cannot connect these ranks.
        TransportError: the transport cannot be started, and `--distca-transport` is not auto.
    """
    transport = _make(config, group, device, timeout)
    if config.ablation == "single-stream":
        return SingleStream(transport)
    if config.ablation == "signal":
        logger.warning("--distca-ablation signal moves no data: LOSSES ARE NOT MEANINGFUL")
        return Signal(transport)
    return transport


def _make(
    config: TransportConfig, group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Transport:
    wanted = config.kind
    if wanted == "shm":
        from distca.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(group, timeout)
    if wanted == "collective":
        return CollectiveTransport(group, device)
    if device.type != "cuda":
        logger.info("transport: collective (gloo), since there is no GPU")
        return CollectiveTransport(group, device)
    from distca.transport.nvshmem import NvshmemTransport

    try:
        transport = NvshmemTransport(group, device, timeout, config.nvshmem_mode)
    except TransportError as error:
        if wanted == "nvshmem":
            raise
        # All ranks fall back, since every rank has the same error.
        logger.warning("transport: collective (NCCL), since nvshmem does not start: %s", error)
        return CollectiveTransport(group, device)
    logger.info(
        "transport: nvshmem, which starts here; it copies by %s; %s",
        config.nvshmem_mode,
        transport.network,
    )
    return transport

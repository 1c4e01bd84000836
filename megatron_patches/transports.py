"""Which transport a run's flags ask for."""

from __future__ import annotations

import logging
from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist

from distca.transport import CollectiveTransport, Signal, SingleStream, Transport

logger = logging.getLogger(__name__)


def make_transport(args: Namespace, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport between the ranks of a group. Collective.

    Args:
        args: Megatron-LM's arguments.
        group: the ranks; nothing else uses it.
        device: where the rows are.

    Raises:
        ValueError: the transport is not one for these ranks.
        TransportError: it cannot be started, and `--distca-transport` is not auto.
    """
    transport = _make(args, group, device)
    if args.distca_ablation == "single-stream":
        return SingleStream(transport)
    if args.distca_ablation == "signal":
        logger.warning("--distca-ablation signal moves no data: LOSSES ARE NOT MEANINGFUL")
        return Signal(transport)
    return transport


def _make(args: Namespace, group: dist.ProcessGroup, device: torch.device) -> Transport:
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if args.distca_transport == "shm":
        from distca.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(group, timeout)
    return CollectiveTransport(group, device)

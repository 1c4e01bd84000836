"""Processes by their roles: their groups, their part of the model, and each other's inboxes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from distca.inference.models import DTYPES, ServedModel, read_model
from distca.inference.pool_model import PoolModel
from distca.inference.tensor_parallel import ALONE, TensorRanks
from distca.serve.engine.settings import ServerConfig
from distca.serve.handoff.decode_worker import DecodeWorker
from distca.serve.handoff.prefill_worker import PrefillWorker
from distca.serve.handoff.settings import Roles
from distca.transport import CollectiveTransport, new_exchange_group


def make_worker(
    settings: ServerConfig, roles: Roles, device: torch.device, folder: Path
) -> PrefillWorker | DecodeWorker:
    """Makes the worker of this process. Collective.

    Args:
        settings: settings of the engine.
        roles: which ranks prefill and decode.
        device: device of the weights.
        folder: folder for sockets, which only this user may enter.
    """
    timeout, me = timedelta(seconds=settings.step_timeout), dist.get_rank()
    prefill = list(range(roles.prefill))
    attention, moving = (new_exchange_group(prefill, timeout) for _ in range(2))
    alone, tensor = None, ALONE
    for process in range(roles.prefill, roles.processes):
        group = new_exchange_group([process], timeout)
        alone = group if process == me else alone
    for rank in range(roles.decode if roles.decode_tensor > 1 else 0):
        first = roles.leader(rank)
        ranks = range(first, first + roles.decode_tensor)
        group = dist.new_group(list(ranks), timeout=timeout)
        if me in ranks:
            tensor = TensorRanks(me - first, roles.decode_tensor, group)

    def inbox(process: int) -> str:
        return f"ipc://{folder}/inbox-{process}"

    if me < roles.prefill:
        assert attention is not None
        assert moving is not None
        model = _model(settings, 1)
        transport = CollectiveTransport(attention, device, members_only=True)
        return PrefillWorker(
            settings,
            roles,
            _pool_model(settings, model, transport, device, ALONE),
            transport,
            CollectiveTransport(moving, device, members_only=True),
            kv_heads_of(model.shape.kv_heads, roles.decode_tensor),
            inbox,
        )
    assert alone is not None
    model = _model(settings, roles.decode_tensor)
    transport = CollectiveTransport(alone, device, members_only=True)
    first = roles.leader(roles.decode_rank(me))
    return DecodeWorker(
        settings,
        roles,
        me,
        _pool_model(settings, model, transport, device, tensor),
        [inbox(first + place) for place in range(roles.decode_tensor)],
    )


def kv_heads_of(kv_heads: int, size: int) -> list[tuple[int, int]]:
    """For each of `size` tensor-parallel processes the first of its heads of keys, and how many.

    Where there are more processes than heads, some have the same one.
    """
    cuts = min(kv_heads, size)
    return [
        (process * cuts // size * (kv_heads // cuts), kv_heads // cuts) for process in range(size)
    ]


def _model(settings: ServerConfig, tensor_parallel_size: int) -> ServedModel:
    dtype = DTYPES[settings.dtype]
    return read_model(settings.model, dtype, tensor_parallel_size, checks_weights=False)


def _pool_model(
    settings: ServerConfig,
    model: ServedModel,
    transport: CollectiveTransport,
    device: torch.device,
    tensor: TensorRanks,
) -> PoolModel:
    from distca.attention import select_kernel
    from distca.cost.step_memory import STEP_SLOTS
    from distca.runtime import Buffers, CoreAttention

    kernel = select_kernel(device.type, model.shape.head_dim, model.softcap is not None)
    buffers = Buffers(device, max(STEP_SLOTS, len(model.masks)))
    core = CoreAttention(transport, kernel, buffers)
    return PoolModel(model, core, device, settings.block_size, tensor)

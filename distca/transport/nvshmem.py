"""The transport between GPUs: puts by our own kernel, or by copy engines, over NVSHMEM's memory.

This transport has not been run on a GPU yet. The protocol is `protocol/exchange.h`, which
shared_memory.py runs on CPUs; the kernels are `protocol/device.cu`.

Kernels that wait cannot deadlock: all ranks start, wait and release in the same order, so whatever
a kernel waits for was issued before it, even with one hardware queue
(`CUDA_DEVICE_MAX_CONNECTIONS=1`, which Megatron asks for).
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from types import ModuleType
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from distca.transport.agreement import on_all_ranks
from distca.transport.base import (
    Channel,
    ChannelBytes,
    MessageSizes,
    Pending,
    Transport,
    TransportError,
    first_bytes,
)
from distca.transport.channels import CHANNELS, arena_offsets, describe_abort
from distca.transport.compiled_cuda import kernels_of_mapped_peers, kernels_with_nvshmem
from distca.transport.device import DeviceRank, Kernels, control_bytes
from distca.transport.shared_segments import machine_id
from distca.transport.symmetric_bytes import ALIGNMENT, SymmetricBytes
from distca.wording import install

logger = logging.getLogger(__name__)

Mode = Literal["kernel", "copy-engine"]
NVSHMEM_MODES: tuple[Mode, ...] = ("kernel", "copy-engine")

# NVSHMEM can allocate from this status on; 3.4.5 "succeeds" with 1 where there is no GPU.
_CAN_ALLOCATE = 2
# NVSHMEM's heap grows by multiples of that many bytes: NVSHMEM_CUMEM_GRANULARITY's default.
_GRANULE = 1 << 29
# Lets GPUs start transfers between machines (IBGDA), rather than a thread of the host for which
# every message waits. NVSHMEM has it off, takes it from the environment alone when it is first
# called, and goes on without where network cards or driver cannot do it. A 0 that is there stays.
_GPU_INITIATED = "NVSHMEM_IB_ENABLE_IBGDA"
# Interval at which `check` looks at the GPU.
_POLL_SECONDS = 1e-4


def _nvshmem() -> tuple[ModuleType, ModuleType]:
    """Imports `nvshmem.core` and `nvshmem.bindings`.

    Raises:
        RuntimeError: NVSHMEM for Python is not installed, or not for this CUDA.
    """
    try:
        import nvshmem.bindings as bindings
        import nvshmem.core as core
    except (ImportError, OSError, RuntimeError) as error:
        cuda = (torch.version.cuda or "13").split(".")[0]
        raise RuntimeError(
            f"NVSHMEM for Python cannot be imported ({error}): {install(f'nvshmem-cu{cuda}')}; "
            "`distca doctor` shows what there is"
        ) from error
    return core, bindings


class NvshmemTransport(Transport):
    """One-sided puts between GPUs, on a stream for each channel.

    Args:
        group: ranks that exchange; used to set up, and in `reserve`. NVSHMEM is initialised for
            these ranks, so a process can be in one such group only.
        device: this rank's GPU.
        timeout: time limit of a kernel's wait for another rank.
        mode: "kernel": our kernel copies, on few SMs; "copy-engine": copies take no SM. Copy
            engines cannot be held back: after a failed wait for room they overwrite what a healthy
            receiver may be reading. The failure is announced to the receiver before, so its `check`
            raises, too; what it received must not be used before that.

    Raises:
        TransportError: NVSHMEM is missing or does not start, machines have different numbers of
            ranks, or the kernels cannot be compiled. Every rank raises the same.

    Attributes:
        network: description of what starts transfers between machines.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta = timedelta(minutes=10),
        mode: Mode = "kernel",
    ) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._device, self._mode = group, device, mode
        self._timeout = timeout.total_seconds()
        on_all_ranks(group, self._import)
        ranks_of = Counter(on_all_ranks(group, machine_id))
        if len(set(ranks_of.values())) > 1:
            numbers = ", ".join(map(str, ranks_of.values()))
            raise TransportError(
                f"ranks on each machine: {numbers}, but NVSHMEM needs as many on each: give "
                "--distca-transport collective, or start as many everywhere"
            )
        if len(ranks_of) > 1:
            os.environ.setdefault(_GPU_INITIATED, "1")
        if self.rank == 0:
            # Logged before NVSHMEM starts: ranks that cannot reach each other hang there.
            logger.info(
                "NVSHMEM starts on %d ranks of %d machines; if it stops here, name the network "
                "interface (export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=ib0), or let a thread of the "
                "host start transfers (export %s=0)",
                self.world_size,
                len(ranks_of),
                _GPU_INITIATED,
            )
        unique_ids = on_all_ranks(group, self._unique_id)
        self._open = False
        self._linked: object = None
        try:
            on_all_ranks(group, lambda: self._initialise(unique_ids[0]))
            ways = set(on_all_ranks(group, self._load))
            self.network = " elsewhere, ".join(sorted(ways))
        except TransportError:
            self._shut()
            raise
        self._epochs = [0] * CHANNELS
        self._streams = [_stream(device) for _ in range(CHANNELS)]
        self._memory: SymmetricBytes | None = None
        # Bytes that NVSHMEM's heap holds for it, at least.
        self._heap = 0
        self._arenas: dict[Channel, torch.Tensor] = {}
        self._staging: dict[Channel, torch.Tensor] = {}
        self._begins: dict[Channel, int] = {}

    def _import(self) -> None:
        self._core, self._bindings = _nvshmem()

    def _unique_id(self) -> bytes | None:
        """Returns the token by which ranks find each other: made by rank 0, None elsewhere."""
        return bytes(self._core.get_unique_id()._data.tobytes()) if self.rank == 0 else None

    def _initialise(self, unique_id: bytes | None) -> None:
        from cuda.core import Device

        assert unique_id is not None
        device = Device(self._device.index)
        device.set_current()
        uid = self._core.get_unique_id(empty=True)
        uid._data[...] = np.frombuffer(unique_id, dtype=uid._data.dtype).reshape(uid._data.shape)
        self._core.init(
            device=device,
            uid=uid,
            rank=self.rank,
            nranks=self.world_size,
            initializer_method="uid",
        )
        status = int(self._core.init_status())
        if status < _CAN_ALLOCATE:
            raise RuntimeError(
                f"NVSHMEM started with status {status}, which cannot allocate: the GPU or its "
                "driver does not suit it; NVSHMEM_DEBUG=INFO says more"
            )
        self._open = True

    def _load(self) -> str:
        """Loads the kernels, and tells what starts transfers between machines."""
        self._control = SymmetricBytes(
            self._bindings, self.world_size, control_bytes(self.world_size), self._device
        )
        major, minor = torch.cuda.get_device_capability(self._device)
        all_mapped = all(self._control.peers)
        compile_kernels = kernels_of_mapped_peers if all_mapped else kernels_with_nvshmem
        kernels = Kernels(compile_kernels(10 * major + minor))
        if not all_mapped:
            linked = self._core.NvshmemKernelObject.from_obj(kernels.code)
            self._core.library_init(linked)
            self._linked = linked
        self._endpoint = DeviceRank(
            kernels, self.rank, self._control.peers, self._device, self._timeout
        )
        # The control memory must be zero before any rank goes on.
        torch.cuda.synchronize(self._device)
        if all_mapped:
            return "all memory is mapped"
        if self._endpoint.gpu_initiated():
            return "GPUs start transfers between machines (IBGDA)"
        return "a thread of the host starts transfers between machines: see `distca doctor`"

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`.

        Raises:
            TransportError: memory is short, or an exchange has failed; every rank raises the same.
        """
        torch.cuda.synchronize(self._device)
        on_all_ranks(self._group, self._raise_failure)
        self._arenas.clear()
        self._staging.clear()
        begins, end = arena_offsets(sizes)
        # Network cards read from symmetric memory alone, so staging lies there, too.
        nbytes = end + sum(-(-room.send // ALIGNMENT) * ALIGNMENT for room in sizes.values())
        on_all_ranks(self._group, self._free)
        # Checked on all ranks first: in `_allocate`, ranks wait for ever for one that cannot.
        growth = on_all_ranks(self._group, lambda: self._growth(nbytes))[self.rank]
        on_all_ranks(self._group, lambda: self._allocate(nbytes))
        self._heap += growth
        assert self._memory is not None
        self._begins = begins
        for channel, room in sizes.items():
            begin = begins[channel]
            self._arenas[channel] = self._memory.own[begin : begin + room.receive]
            self._staging[channel] = self._memory.own[end : end + room.send]
            end += -(-room.send // ALIGNMENT) * ALIGNMENT

    def _free(self) -> None:
        if self._memory is not None:
            self._memory.free()
            self._memory = None

    def _growth(self, nbytes: int) -> int:
        """Returns the bytes that NVSHMEM's heap takes from the GPU to allocate `nbytes`.

        The heap keeps freed memory, and grows in granules by an allocation that does not fit there.

        Raises:
            RuntimeError: the GPU has less free memory, also once torch's cache is emptied.
        """
        needed = nbytes + 2 * ALIGNMENT
        if needed <= self._heap:
            return 0
        growth = -(-needed // _GRANULE) * _GRANULE
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        if growth > free:
            raise RuntimeError(
                f"core attention's buffers need {growth / 1e6:.0f} MB more for NVSHMEM, but the "
                f"GPU has {free / 1e6:.0f} MB free: bound them with --distca-max-buffer-bytes, or "
                "give the model less"
            )
        return growth

    def _allocate(self, nbytes: int) -> None:
        self._memory = SymmetricBytes(self._bindings, self.world_size, nbytes, self._device)
        torch.cuda.synchronize(self._device)
        self._endpoint.set_arenas(self._memory.peers)

    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """See `Transport.staging`."""
        return first_bytes(self._staging[channel], nbytes)

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        self._raise_failure()
        number = channel.number
        self._epochs[number] += 1
        epoch, stream = self._epochs[number], self._streams[number]
        received = first_bytes(self._arenas[channel], sizes.received)
        staging = first_bytes(self._staging[channel], sizes.sent)
        begin = self._begins[channel]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._mode == "kernel":
            self._endpoint.send(number, epoch, staging, sizes.words, begin, stream)
        else:
            self._send_by_copy_engines(number, epoch, staging, sizes, begin)
        return _OnStream(self, number, epoch, received)

    def _send_by_copy_engines(
        self,
        number: int,
        epoch: int,
        staging: torch.Tensor,
        sizes: MessageSizes,
        begin: int,
    ) -> None:
        """Does the kernel's steps as entries of the stream; peers on other machines come first."""
        memory, stream = self._memory, self._streams[number]
        assert memory is not None
        self._endpoint.wait_for_room(number, epoch, stream)
        copy = self._bindings.putmem_on_stream
        # NVSHMEM's first releases for Python lack the call that does not block.
        start = getattr(self._bindings, "putmem_nbi_on_stream", copy)
        # Each rank begins with its successor.
        after = [message for message in sizes.outgoing if message.rank > self.rank]
        peers = [*after, *sizes.outgoing[: len(sizes.outgoing) - len(after)]]
        for peer, first, end in sorted(peers, key=lambda message: memory.peers[message.rank] != 0):
            put = copy if memory.peers[peer] else start
            to = memory.address + begin + sizes.put_at[peer]
            put(to, staging.data_ptr() + first, end - first, peer, stream.cuda_stream)
        self._bindings.quiet_on_stream(stream.cuda_stream)
        self._endpoint.set_ready(number, epoch, stream)

    def wait_for(self, number: int, epoch: int, received: torch.Tensor) -> None:
        """Lets the current stream wait for an exchange of a channel.

        Raises:
            TransportError: an earlier exchange has failed.
        """
        self._raise_failure()
        stream = self._streams[number]
        self._endpoint.wait(number, epoch, received, stream)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def release(self, number: int, epoch: int) -> None:
        """Releases an exchange of a channel once the current stream's work so far is done."""
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        self._endpoint.release(number, epoch, stream)

    def _raise_failure(self) -> None:
        failure = self._endpoint.failure()
        if failure is not None:
            raise TransportError(failure)

    def check(self, finished: bool) -> None:
        """See `Transport.check`.

        A rank raises for another rank's failure, too, since it may have read wrong bytes.
        """
        if finished:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._device))
            # Polls rather than synchronises: in NCCL the GPU may wait for a rank that never comes.
            while not done.query():  # type: ignore[no-untyped-call]
                self._raise_failure()
                time.sleep(_POLL_SECONDS)
        self._raise_failure()
        if finished:
            abort = int(self._control.own[:8].view(torch.int64).item())
            if abort:
                raise TransportError(f"rank {self.rank}: {describe_abort(abort, self._timeout)}")

    def close(self) -> None:
        """See `Transport.close`. Collective, as is the end of NVSHMEM.

        Where a rank has died, the group's timeout ends the wait; NVSHMEM's calls have no timeout.

        Raises:
            TransportError: an exchange has failed; every rank raises the same.
        """
        if not self._open:
            return
        torch.cuda.synchronize(self._device)
        on_all_ranks(self._group, self._raise_failure)
        self._arenas.clear()
        self._staging.clear()
        self._shut()

    def _shut(self) -> None:
        """Ends NVSHMEM and frees its memory, if NVSHMEM runs on every rank. Collective.

        Otherwise its end would wait for ranks that never started it.
        """
        if not all(on_all_ranks(self._group, lambda: self._open)):
            return
        self._open = False
        self._memory = None
        if self._linked is not None:
            self._core.library_finalize(self._linked)
        self._core.finalize()


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a high-priority stream: its few kernels go before those that compute."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


class _OnStream(Pending):
    def __init__(
        self, transport: NvshmemTransport, number: int, epoch: int, received: torch.Tensor
    ) -> None:
        self._transport, self._received = transport, received
        self._number, self._epoch = number, epoch

    def wait(self) -> torch.Tensor:
        self._transport.wait_for(self._number, self._epoch, self._received)
        return self._received

    def release(self) -> None:
        self._transport.release(self._number, self._epoch)

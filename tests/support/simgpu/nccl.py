"""NCCL between processes with simulated GPUs: gloo moves the bytes, NCCL's streams are logged."""

from __future__ import annotations

import os
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from support.simgpu.order import Call

calls: list[Call] = []
"""What this process has asked for, in order; see `order.out_of_order`."""

_groups: weakref.WeakSet[Any] = weakref.WeakSet()
_TELLING_SECONDS = 5.0
"""Time in which ranks that wait in vain tell each other for what."""

_FRAMES = 3
"""Most frames of a place."""


def _place() -> str:
    """The innermost lines that are not torch's or of this file, with their callers."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        name = frame.f_code.co_filename
        if name != __file__ and f"{os.sep}torch{os.sep}" not in name:
            found.append(f"{os.path.basename(name)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def install(native: Any) -> None:
    """Makes `nccl` the name of simulated process groups."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG

    def cpu(tensor: Any) -> Any:
        return native.as_cpu(tensor) if tensor.is_cuda else tensor

    class Work(c10d.Work):
        """Lets the current stream wait for a collective; the host waits for gloo."""

        def __init__(
            self,
            finish: Callable[[], object],
            event: int,
            keeps: Any,
            stuck: Callable[[], str] = str,
        ) -> None:
            super().__init__()
            self._finish: Callable[[], object] | None = finish
            self._event, self._keeps, self._stuck = event, keeps, stuck

        def wait(self, timeout: Any = None) -> bool:
            device = native.device()
            native.note("wait", device, native.stream(device), self._event)
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except RuntimeError as error:
                    raise RuntimeError(f"NCCL: {self._stuck()}: {error}") from error
            self._keeps = None
            return True

        def is_completed(self) -> bool:
            return True

        is_success = is_completed

        def synchronize(self) -> None:
            self.wait()

        def get_future(self) -> Any:
            self.wait()
            future: Any = torch.futures.Future()
            future.set_result([])
            return future

    class _All(Work):
        """The works of what was started together."""

        def __init__(self, works: Sequence[Work]) -> None:
            super().__init__(lambda: None, native.new_event(), None)
            self._works = works

        def wait(self, timeout: Any = None) -> bool:
            for each in self._works:
                each.wait()
            return True

    class Options:
        """See `ProcessGroupNCCL.Options`, as far as it is used."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(max_ctas=0, min_ctas=0, cga_cluster_size=0)

    class Group(dist.ProcessGroup):
        """See `ProcessGroupNCCL`: tensors lie on the GPU and are contiguous."""

        supports_coalescing, supports_splitting = True, False
        # Where collectives of objects make their tensors.
        _device_types = (torch.device("cuda"),)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(rank, size)
            # Ranks of one machine, so that no name has to be found.
            gloo = c10d.ProcessGroupGloo
            device = gloo.create_device(hostname="127.0.0.1")
            its = gloo._Options()
            its._devices, its._timeout = [device], options._timeout
            self._gloo = gloo(store, rank, size, its)
            self._rank, self._size = rank, size
            self._stream = native.new_stream()
            self._batch, self._batched = 0, list[Work]()
            # The processes, and a name that all of them know.
            store.set(f"simgpu {rank}", str(os.getpid()))
            self._members = tuple(int(store.get(f"simgpu {each}")) for each in range(size))
            if not rank:
                store.set("simgpu", f"{sorted(self._members)} {uuid.uuid4().hex[:6]}")
            self._called = store.get("simgpu").decode()
            self._store = store
            _groups.add(self)
            self._note("create", None, 0)

        def _note(self, kind: str, peer: int | None, size: int) -> None:
            """Notes a call; alone in its group a rank waits for nobody."""
            if self._size > 1:
                other = 0 if peer is None else self._members[peer]
                batch = self._batch if peer is not None else 0
                calls.append(Call(self._called, self._members, kind, other, size, batch, _place()))

        def _told_by_all(self, mine: str) -> str:
            """Tells all peers what this rank waits for, and returns what they wait for."""
            mine += f", waited for at {_place()}"
            for group in list(_groups):
                group._store.set(f"stuck {group._rank}", mine)
            told = [f"rank {self._rank} waits for {mine}"]
            end = time.monotonic() + _TELLING_SECONDS
            for rank in range(self._size):
                key = f"stuck {rank}"
                while rank != self._rank and time.monotonic() < end:
                    if self._store.check([key]):
                        told.append(f"rank {rank} waits for {self._store.get(key).decode()}")
                        break
                    time.sleep(0.05)
            return "; ".join(told)

        def _start_coalescing(self, device: Any) -> None:
            self._batch, self._batched = native.new_event(), []

        def _end_coalescing(self, device: Any) -> Any:
            works, self._batch, self._batched = self._batched, 0, []
            return _All(works)

        def getBackendName(self) -> str:
            return "nccl"

        name = _get_backend_name = getBackendName

        def _get_backend(self, device: Any) -> Any:
            return self

        def rank(self) -> int:
            return self._rank

        def size(self) -> int:
            return self._size

        def _set_sequence_number_for_group(self) -> None:
            pass

        def _get_sequence_number_for_group(self) -> int:
            return 0

        def _start(
            self,
            name: str,
            reads: Sequence[Any],
            writes: Sequence[Any],
            begin: Callable[[], Callable[[], object]],
            peer: int | None = None,
        ) -> Work:
            """Starts a collective on the group's stream, after what the current one has to do.

            Args:
                name: name of the collective.
                reads: tensors that it reads.
                writes: tensors that it writes.
                begin: function that starts it, and returns one that waits for its end.
                peer: rank of the other side of a send or a receive; None: all take part.
            """
            self._note(name, peer, sum(each.nbytes for each in reads or writes))
            for each in (*reads, *writes):
                if not each.is_cuda:
                    raise RuntimeError(f"No backend type associated with device type cpu ({name})")
                if not each.is_contiguous():
                    raise ValueError(f"Tensors must be contiguous ({name}: {each.stride()})")
            device = native.device()
            current = native.stream(device)
            before, after = native.new_event(), native.new_event()
            native.note("record", device, current, before)
            native.note("wait", device, self._stream, before)
            native.set_stream(device, self._stream)
            finishes: list[Callable[[], object]] = []
            try:
                native.launch(
                    f"nccl::{name}", list(reads), list(writes), lambda: finishes.append(begin())
                )
            finally:
                native.set_stream(device, current)
            native.note("record", device, self._stream, after)
            place = _place()
            work = Work(
                finishes[0],
                after,
                (reads, writes),
                lambda: self._told_by_all(f"{name} of {self._called}, started at {place}"),
            )
            if self._batch:
                self._batched.append(work)
            return work

        def allreduce(self, tensors: Any, options: Any = None) -> Work:
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            op = getattr(options, "reduceOp", SUM)

            def begin() -> Callable[[], object]:
                ours = [cpu(each) for each in tensors]
                chosen = c10d.AllreduceOptions()
                chosen.reduceOp = SUM if op == AVG else op
                works = [self._gloo.allreduce([each], chosen) for each in ours]

                def finish() -> None:
                    for work, each in zip(works, ours, strict=True):
                        work.wait()
                        if op == AVG:
                            each.div_(self._size)

                return finish

            return self._start("allreduce", tensors, tensors, begin)

        def allreduce_coalesced(self, tensors: Any, options: Any = None) -> Work:
            return self.allreduce(tensors, options)

        def reduce(self, tensors: Any, options: Any) -> Work:
            return self.allreduce(tensors, options)

        def broadcast(self, tensors: Any, options: Any) -> Work:
            def begin() -> Callable[[], object]:
                return self._gloo.broadcast([cpu(each) for each in tensors], options).wait

            return self._start("broadcast", tensors, tensors, begin)

        def allgather(self, outs: Any, ins: Any, options: Any = None) -> Work:
            def begin() -> Callable[[], object]:
                ours = [[cpu(each) for each in out] for out in outs]
                return self._gloo.allgather(ours, [cpu(each) for each in ins]).wait

            return self._start("allgather", ins, [each for out in outs for each in out], begin)

        def gather(self, outs: Any, ins: Any, options: Any) -> Work:
            def begin() -> Callable[[], object]:
                ours = [[cpu(each) for each in out] for out in outs]
                return self._gloo.gather(ours, [cpu(each) for each in ins], options).wait

            return self._start("gather", ins, [each for out in outs for each in out], begin)

        def scatter(self, outs: Any, ins: Any, options: Any) -> Work:
            def begin() -> Callable[[], object]:
                ours = [[cpu(each) for each in each_rank] for each_rank in ins]
                return self._gloo.scatter([cpu(each) for each in outs], ours, options).wait

            return self._start("scatter", [each for rank in ins for each in rank], outs, begin)

        def _allgather_base(self, out: Any, given: Any, options: Any = None) -> Work:
            def begin() -> Callable[[], object]:
                parts = list(cpu(out).view(self._size, -1).unbind(0))
                return self._gloo.allgather([parts], [cpu(given).reshape(-1)]).wait

            return self._start("allgather_into_tensor", [given], [out], begin)

        def allgather_into_tensor_coalesced(self, outs: Any, ins: Any, options: Any = None) -> Work:
            return [self._allgather_base(*each) for each in zip(outs, ins, strict=True)][-1]

        def _reduce_scatter_base(self, out: Any, given: Any, options: Any = None) -> Work:
            op = getattr(options, "reduceOp", SUM)

            def begin() -> Callable[[], object]:
                whole = cpu(given).clone()
                chosen = c10d.AllreduceOptions()
                chosen.reduceOp = SUM if op == AVG else op
                work = self._gloo.allreduce([whole], chosen)

                def finish() -> None:
                    work.wait()
                    mine = whole.view(self._size, -1)[self._rank]
                    cpu(out).view(-1).copy_(mine / self._size if op == AVG else mine)

                return finish

            return self._start("reduce_scatter_tensor", [given], [out], begin)

        def reduce_scatter(self, outs: Any, ins: Any, options: Any = None) -> Work:
            whole = torch.cat([each.reshape(-1) for each in ins[0]])
            return self._reduce_scatter_base(outs[0], whole, options)

        def reduce_scatter_tensor_coalesced(self, outs: Any, ins: Any, options: Any = None) -> Work:
            return [self._reduce_scatter_base(*e, options) for e in zip(outs, ins, strict=True)][-1]

        # Names that torch gives the same calls from 2.12 on.
        reduce_scatter_single = _reduce_scatter_base
        reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
        all_gather_single = allgather_single = _allgather_base
        all_gather_single_coalesced = allgather_into_tensor_coalesced
        allgather_single_coalesced = allgather_into_tensor_coalesced

        def alltoall_base(
            self, out: Any, given: Any, out_sizes: Any, in_sizes: Any, options: Any = None
        ) -> Work:
            def sizes(given: Any, rows: int) -> list[int]:
                return list(given) or [rows // self._size] * self._size

            def begin() -> Callable[[], object]:
                theirs, ours = cpu(out), cpu(given)
                outs = theirs.split(sizes(out_sizes, len(theirs)))
                ins = ours.split(sizes(in_sizes, len(ours)))
                works = []
                for rank, part in enumerate(outs):
                    if rank == self._rank:
                        part.copy_(ins[rank])
                    elif len(part):
                        works.append(self._gloo.recv([part], rank, 7))
                for rank, part in enumerate(ins):
                    if rank != self._rank and len(part):
                        works.append(self._gloo.send([part], rank, 7))
                return lambda: [work.wait() for work in works] and (outs, ins)

            return self._start("alltoall", [given], [out], begin)

        def all_to_all_single(
            self, out: Any, given: Any, out_sizes: Any = (), in_sizes: Any = (), options: Any = None
        ) -> Work:
            return self.alltoall_base(out, given, list(out_sizes), list(in_sizes), options)

        alltoall_single = all_to_all_single

        def send(self, tensors: Any, rank: int, tag: int = 0) -> Work:
            def begin() -> Callable[[], object]:
                ours = [cpu(each) for each in tensors]
                work = self._gloo.send(ours, rank, 9)
                return lambda: work.wait() and ours

            return self._start("send", tensors, [], begin, rank)

        def recv(self, tensors: Any, rank: int, tag: int = 0) -> Work:
            def begin() -> Callable[[], object]:
                ours = [cpu(each) for each in tensors]
                work = self._gloo.recv(ours, rank, 9)
                return lambda: work.wait() and ours

            return self._start("recv", [], tensors, begin, rank)

        def barrier(self, opts: Any = None) -> Work:
            native.synchronize("nccl barrier", native.device(), 0, 0)
            return Work(self._gloo.barrier().wait, native.new_event(), None)

    Group.Options = Options  # type: ignore[attr-defined]
    for module in (dist, c10d):
        module.ProcessGroupNCCL = Group
        module.is_nccl_available = lambda: True
    torch._C._nccl_version = lambda: (2 << 32) | (29 << 16) | 7
    torch._C._nccl_version_suffix = lambda: b""

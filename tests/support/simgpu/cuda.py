"""`torch.cuda` on the simulated devices."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.simgpu import machine

HOPPER, BLACKWELL = (9, 0), (10, 0)
NAMES = {HOPPER: "Simulated H100", BLACKWELL: "Simulated B200"}
capability = HOPPER
"""Compute capability of the devices."""
native: Any = None


def install() -> None:
    """Makes torch take the simulated devices for GPUs. torch must not be imported yet."""
    global native
    assert "torch" not in sys.modules, "the simulated GPU comes before torch"
    library = os.environ[machine.LIBRARY]
    # Its hooks are to be found before those of torch.
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch

    loader = importlib.machinery.ExtensionFileLoader(machine.NAME, library)
    spec = importlib.util.spec_from_loader(machine.NAME, loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    native.configure(int(os.environ[machine.DEVICES]), int(os.environ[machine.CAPACITY]))
    with _quiet_errors():
        native.take_over()
    native.locate_syncs(_where)
    for name, value in _REPLACED.items():
        setattr(torch.cuda, name, value)
    for name, value in _memory_functions().items():
        setattr(torch.cuda, name, value)
        setattr(torch.cuda.memory, name, value)
    torch.cuda.default_generators = (torch.default_generator,) * native.devices()
    torch._C._cuda_setDevice = native.set_device
    torch._C._cuda_getDevice = native.device
    torch._C._cuda_isCurrentStreamCapturing = native.is_capturing
    torch._C._host_emptyCache = lambda: None
    torch.Tensor.record_stream = _record_stream  # type: ignore[assignment]
    torch.accelerator.current_stream = current_stream
    torch.accelerator.synchronize = synchronize
    from support.simgpu import flash2, fused, lacking, nccl

    lacking.install(native)
    flash2.install(native)
    fused.install(native)
    nccl.install(native)


@contextlib.contextmanager
def _quiet_errors() -> Iterator[None]:
    """Holds back what C++ writes to standard error: torch warns of kernels that are replaced."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


_OURS = tuple(str(machine.ROOT / each) for each in ("distca", "megatron_patches", "examples"))

_MEGATRON = f"{os.sep}site-packages{os.sep}megatron{os.sep}"


def _where() -> str:
    """The line of the project, or of Megatron, that is running."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_OURS):
            return f"{Path(frame.filename).relative_to(machine.ROOT)}:{frame.lineno}"
        if _MEGATRON in frame.filename:
            return f"megatron/{frame.filename.partition(_MEGATRON)[2]}:{frame.lineno}"
    return "elsewhere"


def _index(device: Any = None) -> int:
    import torch

    if device is None:
        return native.device()
    if isinstance(device, int):
        return native.device() if device < 0 else device
    index = torch.device(device).index
    return native.device() if index is None else index


class Stream:
    """See `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **made: int) -> None:
        import torch

        self.device_index = _index(device)
        self.device = torch.device("cuda", self.device_index)
        self.priority, self.device_type = priority, 1
        self.stream_id = made["stream_id"] if "stream_id" in made else native.new_stream()
        self.cuda_stream = self.stream_id

    def wait_event(self, event: Event) -> None:
        native.note("wait", self.device_index, self.stream_id, event.number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        native.synchronize("stream", self.device_index, 0, self.stream_id)

    def query(self) -> bool:
        native.arrive(self.device_index, 0, self.stream_id)
        return True

    def is_capturing(self) -> bool:
        return bool(native.is_capturing())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, int]:
        return self.device_index, self.stream_id

    def __enter__(self) -> Stream:
        self._before = native.device(), native.stream(self.device_index)
        native.set_device(self.device_index)
        native.set_stream(self.device_index, self.stream_id)
        return self

    def __exit__(self, *_: object) -> None:
        device, stream = self._before
        native.set_stream(self.device_index, stream)
        native.set_device(device)


class Event:
    """See `torch.cuda.Event`. Its time is the host's."""

    def __init__(self, enable_timing: bool = False, **_: bool) -> None:
        self.number, self._time = native.new_event(), 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self._time = time.perf_counter()
        native.note("record", stream.device_index, stream.stream_id, self.number)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        native.arrive(0, self.number, 0)
        return True

    def synchronize(self) -> None:
        native.synchronize("event", native.device(), self.number, native.stream(native.device()))

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._time - self._time)


class Graph:
    """See `torch.cuda.CUDAGraph`. Operators of a capture take no effect until it is replayed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._number = id(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        if not native.stream(native.device()):
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        native.begin_capture(self._number, capture_error_mode == "global")

    def capture_end(self) -> None:
        native.end_capture(self._number)

    def replay(self) -> None:
        native.replay(self._number)

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def reset(self) -> None:
        native.forget_graph(self._number)

    __del__ = reset


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream(index, stream_id=native.stream(index))


def default_stream(device: Any = None) -> Stream:
    return Stream(_index(device), stream_id=0)


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    with chosen:
        yield


@contextlib.contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = native.device()
    native.set_device(_index(chosen))
    try:
        yield
    finally:
        native.set_device(before)


def _record_stream(tensor: Any, stream: Stream) -> None:
    data = tensor.untyped_storage().data_ptr()
    native.note("record_stream", stream.device_index, stream.stream_id, data)


def set_stream(chosen: Stream) -> None:
    native.set_stream(chosen.device_index, chosen.stream_id)


def synchronize(device: Any = None) -> None:
    native.synchronize("device", _index(device), 0, 0)


class _Properties:
    """See `torch.cuda.get_device_properties`; numbers of an H100 but for name and memory."""

    name = property(lambda self: NAMES[capability])
    major, minor = (property(lambda self, at=at: capability[at]) for at in range(2))
    multi_processor_count, warp_size, max_threads_per_multi_processor = 132, 32, 2048
    shared_memory_per_block_optin, regs_per_multiprocessor = 232448, 65536
    L2_cache_size = 50 << 20
    pci_domain_id = pci_bus_id = pci_device_id = is_integrated = 0
    gcnArchName, uuid = "", "simulated"

    @property
    def total_memory(self) -> int:
        return int(native.capacity())


def _generator(function: str) -> Callable[..., Any]:
    """A function of torch's generator of the CPU, which is the devices' too."""

    def call(*values: Any, **_: Any) -> Any:
        import torch

        return getattr(torch.random, function)(*values[:1])

    return call


def _seed(number: int) -> None:
    import torch

    torch.default_generator.manual_seed(number)


def _random_state(device: Any = None) -> Any:
    import torch

    return torch.random.get_rng_state()


_REPLACED: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: native.devices(),
    "current_device": lambda: native.device(),
    "set_device": lambda device: native.set_device(_index(device)),
    "get_device_capability": lambda device=None: capability,
    "get_device_name": lambda device=None: NAMES[capability],
    "get_device_properties": lambda device=None: _Properties(),
    "can_device_access_peer": lambda device, peer: device != peer,
    "is_bf16_supported": lambda *_, **__: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "_lazy_call": lambda call, **_: call(),
    "_is_in_bad_fork": lambda: False,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "StreamContext": stream,
    "stream": stream,
    "device": device,
    "device_of": lambda tensor: device(tensor.device),
    "current_stream": current_stream,
    "default_stream": default_stream,
    "set_stream": set_stream,
    "synchronize": synchronize,
    "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": lambda: native.is_capturing(),
    "current_blas_handle": lambda: 0,
    "ipc_collect": lambda: None,
    "manual_seed": _seed,
    "manual_seed_all": _seed,
    "get_rng_state": _random_state,
    "set_rng_state": _generator("set_rng_state"),
}


def _memory_functions() -> dict[str, Any]:
    def free(device: Any = None) -> tuple[int, int]:
        return native.capacity() - native.used(_index(device)), native.capacity()

    def used(device: Any = None) -> int:
        return int(native.used(_index(device)))

    def peak(device: Any = None) -> int:
        return int(native.peak(_index(device), False))

    def reset(device: Any = None) -> None:
        native.peak(_index(device), True)

    def stats(device: Any = None) -> dict[str, int]:
        now, most = used(device), peak(device)
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        values = {f"{kind}.all.current": now for kind in kinds}
        return values | {f"{kind}.all.peak": most for kind in kinds} | {"num_alloc_retries": 0}

    return {
        "mem_get_info": free,
        "memory_allocated": used,
        "memory_reserved": used,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "memory_stats": stats,
        "empty_cache": lambda: None,
    }

"""What simulated GPUs do and refuse, as functions that run in a process that has two of them."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.simgpu import cuda
from support.simgpu.races import Counts, count, races

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@contextmanager
def refused(*texts: str) -> Iterator[None]:
    """Fails unless an error is raised whose message has these texts."""
    with pytest.raises(RuntimeError) as raised:
        yield
    assert all(text in str(raised.value) for text in texts), raised.value


def logged(call: Callable[[], Any]) -> list[Any]:
    cuda.native.start()
    kept = call()
    log: list[Any] = cuda.native.stop()
    del kept
    return log


def counted(call: Callable[[], Any]) -> Counts:
    return count(logged(call))


@contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[torch.cuda.Stream]:
    """Captures a graph on a stream of its own, as must be."""
    own, current = torch.cuda.Stream(), torch.cuda.current_stream()
    own.wait_stream(current)
    with torch.cuda.stream(own):
        graph.capture_begin()
        yield own
        graph.capture_end()
    current.wait_stream(own)


@check
def values_and_gradients_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True)
    on_gpu = w.detach().cuda().requires_grad_()
    (x @ w).relu().sum().backward()
    loss = (x.cuda() @ on_gpu).relu().sum()
    loss.backward()
    assert loss.device == on_gpu.grad.device == torch.device("cuda", 0)
    assert torch.equal(on_gpu.grad.cpu(), w.grad)


@check
def tensors_of_two_devices_are_refused() -> None:
    a, b, c = torch.ones(3), torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with refused("same device", "cpu"):
        a + b
    with refused("same device", "cuda:1"):
        b + c
    with refused("invalid device ordinal"):
        torch.ones(3, device="cuda:2")


@check
def memory_ends_at_the_capacity() -> None:
    free, total = torch.cuda.mem_get_info()
    with refused("CUDA out of memory"):
        torch.empty(free + 1, dtype=torch.uint8, device="cuda")
    held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (free - held.nbytes, total)
    del held
    assert torch.cuda.mem_get_info()[0] == free


@check
def launches_syncs_and_bytes_are_counted() -> None:
    x, host = torch.ones(8, device="cuda"), torch.ones(8).pin_memory()

    def run() -> None:
        (x + 1).mul_(2)  # two launches
        x.copy_(host, non_blocking=True)  # one, which nobody waits for
        x.sum().item()  # a launch, and a wait for the number

    found = counted(run)
    assert found.operators["to device"] == 1
    assert found.bytes_to_device == 32
    assert sum(found.syncs.values()) == 1, found.syncs
    assert counted(lambda: torch.ones(8).to("cuda", non_blocking=True)).syncs.total() == 1
    mask = torch.zeros(8, dtype=torch.bool, device="cuda")
    assert counted(lambda: x[mask]).syncs.total() >= 1
    assert counted(lambda: x.__setitem__(mask, 0)).syncs.total() == 0, "it is a fill"
    assert counted(lambda: x.__setitem__(mask, x[:0])).syncs.total() >= 1


@check
def a_copy_to_the_host_comes_when_it_is_waited_for() -> None:
    x, host = torch.ones(8, device="cuda"), torch.zeros(8).pin_memory()
    host.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    assert host.isnan().all(), "read before it has come"
    # What another stream has done says nothing of it.
    torch.cuda.Stream().record_event().synchronize()
    assert host.isnan().all()
    done.synchronize()
    assert host.eq(1).all()


@check
def new_memory_holds_no_numbers() -> None:
    assert torch.empty(3, device="cuda").isnan().all().item()


@check
def a_graph_takes_effect_when_it_is_replayed() -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with captured(graph):
        y = x * 2
        x.add_(1)
    assert x.cpu().tolist() == [1] * 3
    assert y.isnan().all().item()
    for time in range(3):
        assert counted(graph.replay).launches == 1
        assert y.cpu().tolist() == [2 * (time + 1)] * 3
    assert x.cpu().tolist() == [4] * 3


@check
def a_capture_refuses_waits_and_pageable_copies() -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with captured(graph):
        with refused("not permitted when stream is capturing"):
            x.sum().item()
        with refused("not permitted when stream is capturing", "pageable"):
            x.copy_(torch.ones(3), non_blocking=True)
        with refused("not permitted when stream is capturing"):
            torch.cuda.synchronize()


@check
def a_capture_refuses_the_default_stream() -> None:
    with refused("must be captured on a non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


@check
def a_capture_takes_the_operators_of_its_streams_on_all_threads() -> None:
    x, w = torch.ones(3, device="cuda"), torch.ones(3, device="cuda", requires_grad=True)
    other, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    # By default a wait of any thread ends a capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        side = threading.Thread(target=lambda: (other.add_(1), torch.cuda.synchronize()))
        side.start()
        side.join()
        # Autograd's thread computes it.
        (gradient,) = torch.autograd.grad((x * w * w).sum(), w)
    assert other.cpu().tolist() == [2] * 3
    assert gradient.isnan().all().item()
    x.fill_(5)
    graph.replay()
    assert gradient.cpu().tolist() == [10] * 3


@check
def a_capture_forks_and_joins_by_events() -> None:
    x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    before = side.record_event()

    def capture(joins: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with captured(graph) as own:
            side.wait_stream(own)
            with torch.cuda.stream(side):
                x.mul_(2)
            if joins:
                own.wait_stream(side)
        return graph

    capture(joins=True).replay()
    assert x.cpu().tolist() == [2] * 3
    with refused("has not waited for"):
        capture(joins=False)
    graph = torch.cuda.CUDAGraph()
    with captured(graph) as own, refused("uncaptured work in another stream"):
        own.wait_event(before)


def _two_streams(waits: bool, begin: int) -> list[Any]:
    """A write of eight numbers on one stream and of as many on another, from `begin` on."""
    x, side = torch.zeros(16, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()

    def run() -> None:
        x[:8] = 1
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[begin : begin + 8] = 2
        torch.cuda.current_stream().wait_stream(side)

    return logged(run)


@check
def a_missing_wait_is_a_race_where_bytes_overlap() -> None:
    found = races(_two_streams(waits=False, begin=4))
    assert len(found) == 1
    assert "without waiting for" in found[0]
    assert not races(_two_streams(waits=True, begin=4))
    assert not races(_two_streams(waits=False, begin=8))


@check
def memory_freed_while_another_stream_uses_it_is_a_race() -> None:
    side = torch.cuda.Stream()

    def run(told: bool, waits: str) -> list[str]:
        def call() -> None:
            x = torch.ones(8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)
            if told:
                x.record_stream(side)
            if waits == "before":
                torch.cuda.current_stream().wait_stream(side)
            del x
            if waits == "after":
                torch.cuda.current_stream().wait_stream(side)
            # It may have the same memory.
            torch.ones(8, device="cuda")

        return races(logged(call))

    assert len(run(told=False, waits="never")) == 1
    assert not run(told=True, waits="never")
    assert not run(told=False, waits="before")
    assert not run(told=False, waits="after")


def _flash(queries: int, tasks: int, most: int, dtype: Any = torch.bfloat16) -> Any:
    """A call of torch's FlashAttention 2: `queries` of the first tasks, 16 keys of each."""
    q = torch.randn(queries, 4, 16, dtype=dtype, device="cuda")
    k = torch.randn(tasks * 16, 2, 16, dtype=dtype, device="cuda")
    cu_q = torch.arange(tasks + 1).clamp(max=queries).int().cuda()
    cu_k = torch.arange(0, tasks * 16 + 1, 16, dtype=torch.int32, device="cuda")
    call = torch.ops.aten._flash_attention_forward
    return call(q, k, k, cu_q, cu_k, most, 16, 0.0, True, False)


@check
def flash_attention_refuses_what_its_source_refuses() -> None:
    assert torch.isfinite(_flash(3, 3, 1)[0]).all().item()
    assert torch.isfinite(_flash(2, 3, 2)[0]).all().item()
    with refused("shape '[3, 2, 2, 16]' is invalid for input of size 128"):
        _flash(2, 3, 1)
    with refused("only supports fp16 and bf16"):
        _flash(3, 3, 1, torch.float32)


if __name__ == "__main__":
    results = {}
    for name, function in CHECKS.items():
        try:
            function()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(results))

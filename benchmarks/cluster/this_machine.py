"""Description of this machine for the simulator, measured apart from the steps it predicts."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.training.setting import Setting
from distca.attention import KernelTasks, select_kernel
from distca.attention.kernel_timing import fastest
from distca.cost.model_sizes import ModelSize
from distca.cost.profile import Profile
from distca.lifetime import end_with_parent
from distca.plan import BLOCK
from distca.simulate import Cluster, ModelCosts
from distca.simulate.charges import Charges
from distca.transport import Channel, ChannelBytes, CollectiveTransport, MessageSizes

CPU = torch.device("cpu")


@contextmanager
def beside_busy_processes(processes: int) -> Iterator[None]:
    """Keeps this process to a core, and others at work on theirs, as when steps are measured.

    Caches, memory and clock rates are shared: kernels that run alone are faster.
    """
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_keep_busy, args=(cores[rank % len(cores)],), daemon=True)
        for rank in range(1, processes)
    ]
    for other in others:
        other.start()
    os.sched_setaffinity(0, cores[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.terminate()
            other.join()


def _keep_busy(core: int) -> None:
    """Runs attention kernels on a core until the process that started this one stops it."""
    end_with_parent()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    kernel, rows = select_kernel("cpu"), torch.randn(2048, 8, 32)
    edges = torch.tensor([0, len(rows)], dtype=torch.int32)
    tasks = KernelTasks(edges, edges, causal=True, window_left=None, softmax_scale=0.1)
    while True:
        kernel.forward(rows, rows, rows, tasks)


def backward_over_forward(profile: Profile) -> float:
    """Ratio of backward to forward seconds, measured on a long task of the profile's heads."""
    shape, length = profile.shape, profile.lengths[-1]
    kernel = select_kernel("cpu")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, heads, shape.head_dim, generator=generator)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    edges = torch.tensor([0, length], dtype=torch.int32)
    tasks = KernelTasks(edges, edges, causal=True, window_left=None, softmax_scale=0.1)
    out, lse = kernel.forward(q, k, v, tasks)
    forward = fastest(lambda: kernel.forward(q, k, v, tasks), lambda: None, 2.0)
    backward = fastest(lambda: kernel.backward(out, q, k, v, out, lse, tasks), lambda: None, 2.0)
    return backward / forward


def copy_gb_per_s() -> float:
    """Measures the memory traffic of gathering rows, which are read and written: more than caches
    hold, in memory that is there."""
    rows, index = torch.randn(65536, 256), torch.randperm(65536)
    into = torch.zeros_like(rows)
    seconds = fastest(lambda: torch.index_select(rows, 0, index, out=into), lambda: None, 0.5)
    return 2 * rows.nbytes / seconds / 1e9


def _exchange(rank: int, processes: int, store: str, output: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes
    )
    assert dist.group.WORLD is not None
    transport, channel = CollectiveTransport(dist.group.WORLD, CPU), Channel("dispatch", 0)
    found = {}
    for nbytes in (4096, 16 * 2**20):
        sizes = tuple(nbytes * (other != rank) for other in range(processes))
        put_at = tuple(nbytes * (rank - (rank > other)) for other in range(processes))
        transport.reserve({channel: ChannelBytes(sum(sizes), sum(sizes))})
        transport.staging(channel, sum(sizes)).zero_()
        times, busy = [], []
        for _ in range(8):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            transport.start("measured", channel, MessageSizes(sizes, sizes, put_at)).wait()
            times.append(time.perf_counter() - start)
            busy.append((time.process_time() - cpu) / times[-1])
        found[nbytes] = statistics.median(times[2:]), statistics.median(busy[2:])
    if rank == 0:
        Path(output).write_text(json.dumps(list(found.items())))
    dist.destroy_process_group()


def link_of_processes(processes: int) -> tuple[float, float, float]:
    """Measures GB/s of a process, each way, seconds of a small message, and the share of a core
    that a large one takes meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "found")
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(_exchange, args=(processes, store, output), nprocs=processes)
        (_, (small, _)), (nbytes, (large, busy)) = json.loads(Path(output).read_text())
    return (processes - 1) * nbytes / max(large - small, 1e-9) / 1e9, small, busy


def describe_machine(
    setting: Setting, model: ModelSize, profile: Profile, rest_seconds: float
) -> Cluster:
    """Describes this machine to the simulator.

    Args:
        setting: sizes of the measured steps.
        model: sizes of the trained model.
        profile: kernel times.
        rest_seconds: time of a step whose documents are one block long.
    """
    speed, latency, busy = link_of_processes(setting.processes)
    with beside_busy_processes(setting.processes):
        copies, backward = copy_gb_per_s(), backward_over_forward(profile)
    machine = Cluster(
        "this machine",
        gpus_per_node=1,
        memory_gb=1e6,
        peak_tflops=1.0,
        attention_tflops=1.0,
        node_gb_per_s=speed,
        network_gb_per_s=speed,
        copy_gb_per_s=copies,
        linear_mfu=1.0,
        backward_over_forward=backward,
        node_latency=latency,
        network_latency=latency,
        launch_seconds=0.0,
        # A process has one core, for its kernels and its exchanges.
        charges=Charges(interference=min(busy, 0.95)),
    )
    costs = ModelCosts(model, machine, dtype_bytes=4)
    block = np.array([BLOCK])
    short = float(profile.seconds(block, block, block * (block + 1) // 2)[0])
    blocks = setting.seq_length // BLOCK
    kernels = setting.layers * blocks * short * (1 + machine.backward_over_forward)
    linear = setting.layers * sum(costs.layer_seconds())
    linear = setting.seq_length * (linear + sum(costs.head_seconds()))
    # `linear` is at 1 TFLOP/s; the rate found counts in everything else that a step does.
    return replace(machine, peak_tflops=linear / max(rest_seconds - kernels, 1e-9))

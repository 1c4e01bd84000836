"""Where the recorder looks: the file to re-point when what it wraps moves.

Each hook wraps a method for as long as a run is recorded and notes a line before it is called. The
lines name what happens, not where its code lies, so that they outlive a move.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from recording.log import Log, bits, digest

WORDS = {"combine": "return", "combine_backward": "return_backward"}
"""What recordings call phases."""
DIRECTIONS = {"dispatch": "to servers", "combine": "to owners"}
"""What they call the ways that rows travel."""
PATIENCE_SECONDS = 20.0
"""How long a value may take that is made ahead: none takes a second."""


Wrap = Callable[..., None]
"""Function of an owner, the name of a method, what is called around it, and its first arguments."""


@contextlib.contextmanager
def watch_exchanges(log: Log) -> Iterator[Wrap]:
    """Notes exchanges, kernels and buffers inside, and yields what wraps further methods."""
    from torch.distributed import Work

    from distca.attention import select_kernel
    from distca.runtime import Buffers, Trace
    from distca.transport import Transport
    from distca.transport.shared_memory import SharedMemoryTransport

    kernel = type(select_kernel("cpu"))
    with contextlib.ExitStack() as stack:

        def wrap(owner: Any, name: str, around: Callable[..., Any], *given: Any) -> None:
            original = getattr(owner, name)
            method = functools.wraps(original)(
                lambda *args, **options: around(log, original, *given, *args, **options)
            )
            stack.enter_context(mock.patch.object(owner, name, method))

        wrap(Transport, "start", _start)
        wrap(SharedMemoryTransport, "wait_for", _wait, "wait in shared memory")
        wrap(Work, "wait", _wait, "wait for a collective or a message")
        wrap(Trace, "span", _span)
        for name, words in (
            ("forward", "forward"),
            ("forward_paged", "forward of a pool"),
            ("backward", "backward"),
        ):
            wrap(kernel, name, _kernel, words)
        wrap(Buffers, "reserve", _reserve)
        yield wrap


@contextlib.contextmanager
def watching(log: Log) -> Iterator[None]:
    """Notes what this process's runtime does in training inside."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from distca.runtime import Prefetcher

    with watch_exchanges(log) as wrap:
        wrap(Prefetcher, "__init__", _prefetch)
        wrap(Prefetcher, "__next__", _next)
        wrap(P2PCommunicator, "_communicate", _pass_on)
        for name, words in (
            ("start_grad_sync", "start to reduce gradients"),
            ("finish_grad_sync", "wait for reduced gradients"),
            ("start_param_sync", "start to gather parameters"),
            ("finish_param_sync", "wait for gathered parameters"),
        ):
            wrap(_ParamAndGradBucketGroup, name, _synchronize, words)
        yield


def _start(log: Log, original: Any, transport: Any, phase: str, channel: Any, sizes: Any) -> Any:
    phase_name = WORDS.get(phase, phase)
    what = f"{phase_name} {DIRECTIONS[channel.direction]}, slot {channel.slot}"
    log.event(f"start {what}: sends {list(sizes.send)}, receives {list(sizes.receive)} bytes")
    pending = original(transport, phase, channel, sizes)
    for name in ("wait", "release"):
        pending.__dict__[name] = functools.partial(
            _wait, log, getattr(pending, name), f"{name} {what}"
        )
    return pending


def _wait(log: Log, original: Any, line: str, *args: Any, **options: Any) -> Any:
    log.event(line)
    return original(*args, **options)


@contextlib.contextmanager
def _span(log: Log, original: Any, trace: Any, name: str, lane: str, **labels: Any) -> Any:
    words = name.replace("combine", "return")
    log.event(", ".join([words, *(f"{key} {value}" for key, value in labels.items() if value)]))
    within = lane in ("exchange", "kernels")
    with log.inside("exchange") if within else contextlib.nullcontext():
        yield


def _kernel(log: Log, original: Any, name: str, kernel: Any, *args: Any, **options: Any) -> Any:
    rows = [tuple(each.shape[:2]) for each in args if torch.is_tensor(each) and each.dim() == 3]
    # Commits differ in what follows the tasks.
    tasks = next(each for each in args if hasattr(each, "cu_seqlens_q"))
    shape = {key: getattr(tasks, key) for key in ("causal", "window_left", "softmax_scale")}
    number = len(tasks.cu_seqlens_q) - 1
    log.event(f"kernel {name}: rows and heads {rows}, {number} tasks, {shape}")
    with log.inside("kernels"):
        return original(kernel, *args, **options)


def _reserve(log: Log, original: Any, buffers: Any, *args: Any, **options: Any) -> None:
    before = buffers.room
    original(buffers, *args, **options)
    if buffers.room != before:
        log.event("buffers grow")
        log.note("buffers", buffers_of(buffers))


def buffers_of(buffers: Any) -> dict[str, int]:
    """What core attention's buffers hold."""
    room = asdict(buffers.room)
    for direction, words in DIRECTIONS.items():
        for end in ("send", "receive"):
            room[f"{words.replace(' ', '_')}_{end}"] = room.pop(f"{direction}_{end}")
    return {"total": buffers.nbytes, **room}


class _Made:
    """An iterator that knows which thread made each of its values, and waits for one made ahead."""

    def __init__(self, values: Iterator[Any], consumer: int) -> None:
        self._values, self._consumer = values, consumer
        self._made: deque[str] = deque()
        self._changed = threading.Condition()
        self._patience = PATIENCE_SECONDS

    def __iter__(self) -> _Made:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._values)
        finally:
            own = threading.get_ident() == self._consumer
            with self._changed:
                self._made.append("the training thread" if own else "another thread")
                self._changed.notify()

    def ahead(self) -> str:
        """Whether the next value is made without being asked for; for ever not after one is not."""
        with self._changed:
            if self._patience and self._changed.wait_for(lambda: self._made, self._patience):
                return "ahead"
            self._patience = 0.0
            return "when asked for"

    def by(self) -> str:
        """Who made the value that was taken."""
        with self._changed:
            return self._made.popleft()


def _prefetch(
    log: Log, original: Any, prefetcher: Any, values: Any, *args: Any, **options: Any
) -> None:
    prefetcher.recorded = _Made(values, log.thread)
    original(prefetcher, prefetcher.recorded, *args, **options)


def _next(log: Log, original: Any, prefetcher: Any) -> Any:
    if threading.get_ident() != log.thread:
        # A global batch's plans: the thread that makes ticks of them takes them.
        return original(prefetcher)
    when = prefetcher.recorded.ahead()
    value = original(prefetcher)
    if isinstance(value, tuple):
        return value
    log.event(f"next value: made {when} on {prefetcher.recorded.by()}")
    if hasattr(value, "plans"):
        log.note("plans", [saved_plan(plan) for plan in value.plans])
    batch = getattr(value, "micro_batch", value)
    if batch is not None:
        names = ("tokens", "labels", "loss_mask", "position_ids")
        log.note("micro-batches", {name: bits(getattr(batch, name)) for name in names})
    return value


def saved_plan(plan: Any) -> str:
    """A hash of the file that a plan is saved as."""
    from distca.plan.saved import save_plan

    with tempfile.TemporaryDirectory() as folder:
        save_plan(plan, Path(folder) / "plan.json")
        return digest((Path(folder) / "plan.json").read_bytes())


def _pass_on(log: Log, original: Any, communicator: Any, **options: Any) -> Any:
    said = []
    for name, value in options.items():
        said.append(f"{name} {list(value.shape) if isinstance(value, torch.Tensor) else value}")
    log.event(f"between stages: {', '.join(said)}")
    return original(communicator, **options)


def _synchronize(
    log: Log, original: Any, words: str, group: Any, *args: Any, **options: Any
) -> Any:
    log.event(f"{words} of {len(group.params)} weights")
    return original(group, *args, **options)


def watch_modules(log: Log, model: list[Any]) -> None:
    """Notes when layers, embedding and head run, there and back."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    names = ("embedding", "decoder.final_layernorm", "output_layer")
    for chunk in model:
        for name, module in chunk.named_modules():
            if isinstance(module, TransformerLayer):
                _watch_module(log, module, f"layer {module.layer_number}")
            elif name.endswith(names):
                _watch_module(log, module, name.rpartition(".")[2])


def _watch_module(log: Log, module: Any, name: str) -> None:
    def label(options: dict[str, Any]) -> str:
        nano_batch = getattr(options.get("packed_seq_params"), "nano_batch", None)
        return f"{name} {nano_batch.name}" if nano_batch else name

    def back(tensor: Any, line: str) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: log.event(line))

    def before(module: Any, args: Any, options: dict[str, Any]) -> None:
        hidden = options.get("hidden_states", args[0] if args else None)
        rows = f", {len(hidden)} rows" if hidden is not None else ""
        log.event(f"{label(options)} begins{rows}")
        back(hidden, f"{label(options)} backward ends")

    def after(module: Any, args: Any, options: dict[str, Any], output: Any) -> None:
        log.event(f"{label(options)} ends")
        back(
            output[0] if isinstance(output, tuple) else output, f"{label(options)} backward begins"
        )

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)


def watch_loss(log: Log, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """A `forward_step` that notes when each micro-batch's loss is computed, and its bits."""

    def step(*args: Any, **options: Any) -> Any:
        output, loss_function = forward_step(*args, **options)

        def noted(*args: Any, **options: Any) -> Any:
            log.event("loss")
            loss, count, report = loss_function(*args, **options)
            log.note("losses of micro-batches", f"{loss.item().hex()} of {count.item()}")
            return loss, count, report

        return output, noted

    return step

"""What a rank does in a training step, in order: exchanges, kernels, layers, the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from distca.runtime import CoreAttention, Trace
from distca.transport import Channel, MessageSizes, Pending
from megatron_patches.flags.config import DistcaConfig
from support.models import make_run, memory_stream, parse
from support.ranks import forget_megatron

SeenEvent = tuple[Any, ...]
"""A start or a wait of the transport with phase and nano-batch; a kernel with its pass and
nano-batch; the linear layers before and after attention with layer and nano-batch,
those after it also when their gradient has come; or the output layer, which comes before the loss.
Nano-batches are "ping", "pong" or None."""


def events_of_step(flags: Sequence[str], lengths: Sequence[int]) -> list[SeenEvent]:
    """What this rank does in a first training step, as the transport, the kernel and the model are
    called. Collective."""
    return events_and_trace(flags, lengths)[0]


def events_and_trace(
    flags: Sequence[str], lengths: Sequence[int]
) -> tuple[list[SeenEvent], list[SeenEvent]]:
    """Those events, and those of transport and kernel as the runtime's own trace has them."""
    from support import training

    args = parse(flags)
    training.initialize(args)
    run, made = make_run(args, memory_stream(lengths))
    recorder = Recorder(made.runtime.core_attention, DistcaConfig.from_args(args).ping_pong)
    for chunk in run.model:
        recorder.watch(chunk)
    made.runtime.core_attention.trace.recording = True
    training.forward_backward(run)
    run.data.close()
    forget_megatron()
    return recorder.events, list(_traced(made.runtime.core_attention.trace))


def _traced(trace: Trace) -> Iterator[SeenEvent]:
    for span in sorted(trace.take(0), key=lambda each: each["ts"]):
        if span["cat"] not in ("exchange", "kernels"):
            continue
        name, nano = span["name"], span["args"]["nano_batch"]
        direction = "backward" if name.endswith(" backward") else "forward"
        name = name.removesuffix(" backward")
        phase = name.removeprefix("wait for ")
        if direction == "backward":
            phase += "_backward"
        if span["cat"] == "kernels":
            yield "kernel", direction, nano
        else:
            yield "wait" if name.startswith("wait for ") else "start", phase, nano


class Recorder:
    """Wraps a rank's transport and kernel.

    Args:
        attention: whose.
        ping_pong: whether slots are of two nano-batches.

    Attributes:
        events: so far.
    """

    def __init__(self, attention: CoreAttention, ping_pong: bool) -> None:
        self.events: list[SeenEvent] = []
        self._ping_pong = ping_pong
        self._labels: dict[str, Any] = {}
        self._watch_transport(attention.transport)
        self._watch_kernel(attention)

    def _watch_transport(self, transport: Any) -> None:
        start = transport.start

        def started(phase: str, channel: Channel, sizes: MessageSizes) -> Pending:
            what = phase, ("ping", "pong")[channel.slot] if self._ping_pong else None
            pending = start(phase, channel, sizes)
            self.events.append(("start", *what))
            wait = pending.wait

            def waited() -> torch.Tensor:
                self.events.append(("wait", *what))
                return wait()

            pending.wait = waited
            return pending

        transport.start = started

    def _watch_kernel(self, attention: CoreAttention) -> None:
        kernel: Any = attention.kernel.kernel
        span: Any = attention.trace.span

        @contextlib.contextmanager
        def labelled(name: str, lane: str, **labels: Any) -> Iterator[None]:
            self._labels = labels
            with span(name, lane, **labels):
                yield

        # A kernel does not know whose rows it is given.
        attention.trace.span = labelled  # type: ignore[method-assign]
        for name in ("forward", "backward"):
            setattr(kernel, name, self._noting(name, getattr(kernel, name)))

    def _noting(self, name: str, compute: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            event = "kernel", name, self._labels["nano_batch"]
            # There is a call for each task shape.
            if self.events[-1:] != [event]:
                self.events.append(event)
            return compute(*arguments, **options)

        return noted

    def watch(self, model: Any) -> None:
        """Notes the linear layers of a model chunk, too."""
        while not hasattr(model, "decoder"):
            model = model.module
        for layer in model.decoder.layers:
            self._watch_layer(layer)
        if model.post_process:
            model.output_layer.register_forward_pre_hook(
                lambda *_: self.events.append(("output layer",))
            )

    def _watch_layer(self, layer: Any) -> None:
        number = layer.layer_number

        def name_of(options: dict[str, Any]) -> str | None:
            nano_batch = options["packed_seq_params"].nano_batch
            return None if nano_batch is None else nano_batch.name

        def before(_: Any, arguments: Any, options: dict[str, Any]) -> None:
            self.events.append(("pre-attention", number, name_of(options)))

        def after(_: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
            nano_batch = name_of(options)
            self.events.append(("post-attention", number, nano_batch))
            event = "post-attention backward", number, nano_batch
            output[0].register_hook(lambda _: self.events.append(event))

        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after, with_kwargs=True)

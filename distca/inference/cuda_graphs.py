"""CUDA graphs of a model's layers in steps that decode, in pieces between calls of core attention.

Where several ranks have keys, an exchange is started and waited for by the host, among ranks and
rows that are others in each step, so graphs end where a layer asks for core attention: that runs as
ever, over as many rows as there are. All else of a layer depends on the number of rows alone, and
is captured once for each of a few numbers, to which rows are padded. A rank alone has
`step_graphs.StepGraphs`. This has not been run on a GPU yet.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from distca.inference.attention_runner import ForwardContext
from distca.inference.models import ServedModel
from distca.inference.runnable import RunnableModel

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, *range(8, 257, 8))
"""Numbers of rows that graphs are captured for; steps with more run without."""

Replay = Callable[[], object]


def size_for(rows: int) -> int | None:
    """The number of rows to which that many are padded; None: there is no graph of that many."""
    return next((size for size in SIZES if size >= rows), None)


class Capture(Protocol):
    """What captures graphs, one after the other."""

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Makes ready for graphs to be captured inside."""
        ...

    def begin(self) -> None:
        """Begins a graph of all that runs from here on."""
        ...

    def end(self) -> Replay:
        """Ends the graph; returns what runs it, on the same memory."""
        ...


class CudaCapture:
    """A `Capture` by CUDA.

    All graphs share one memory pool. One graph may overwrite what another has left there, so that
    nothing in it may be read later: graphs of a step run in the order of their capture, and what
    outlives a step lies elsewhere.

    Args:
        device: device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """See `Capture.prepared`."""
        # What garbage frees during a capture would end it.
        gc.collect()
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def begin(self) -> None:
        """See `Capture.begin`."""
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, as NCCL's, may call CUDA meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """See `Capture.end`."""
        graph = self._graph
        graph.capture_end()
        return graph.replay


class NoCapture:
    """Runs everything as it is."""

    def begin(self) -> None:
        """Does nothing."""

    def end(self) -> Replay:
        """Returns nothing to run."""
        return lambda: None


@dataclass(frozen=True)
class _Piece:
    """What runs up to a call of core attention, and the call. Tensors are the same in each step.

    Attributes:
        replay: runs it.
        layer: layer that calls.
        inputs: queries, keys and values, `[size, heads, head_dim]`.
        scale: factor of the scores.
        sink: one more logit of each head, a weight of the layer, or None.
        out: memory for the outputs, like the queries.
    """

    replay: Replay
    layer: int
    inputs: Sequence[torch.Tensor]
    scale: float
    sink: torch.Tensor | None
    out: torch.Tensor


class _Recorder:
    """Stands for a `ForwardContext` in a run that is captured: ends a graph at each call.

    Args:
        windows: see `ForwardContext`.
        capture: what captures.
    """

    def __init__(self, windows: Sequence[int | None], capture: Capture | NoCapture) -> None:
        self.windows, self.pieces = windows, list[_Piece]()
        self._capture = capture

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `ForwardContext.attend`; outputs come when the graphs are replayed."""
        replay = self._capture.end()
        out = torch.zeros_like(q)
        self.pieces.append(_Piece(replay, layer, (q, k, v), scale, sink, out))
        self._capture.begin()
        return out


class _Recording:
    """The graphs of one number of rows.

    Args:
        model: model whose layers are captured.
        size: rows.
        windows: see `ForwardContext`.
        device: device of the model.
        capture: what captures.
    """

    def __init__(
        self,
        model: RunnableModel,
        size: int,
        windows: Sequence[int | None],
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._ids, self._positions = torch.zeros((2, size), dtype=torch.int64, device=device)
        every = torch.arange(size, device=device)

        def run(recorder: _Recorder) -> torch.Tensor:
            return model.logits(self._ids, self._positions, every, recorder)

        with capture.prepared():
            # Libraries make room for themselves when they are first called.
            run(_Recorder(windows, NoCapture()))
            recorder = _Recorder(windows, capture)
            capture.begin()
            self._logits = run(recorder)
            self._last = capture.end()
        self._pieces = recorder.pieces

    def run(self, ids: torch.Tensor, positions: torch.Tensor, run: ForwardContext) -> torch.Tensor:
        """Logits of a batch's rows, `[rows, vocabulary]`."""
        rows = len(ids)
        self._ids[:rows], self._positions[:rows] = ids, positions
        for piece in self._pieces:
            piece.replay()
            q, k, v = (each[:rows] for each in piece.inputs)
            piece.out[:rows] = run.attend(piece.layer, q, k, v, piece.scale, piece.sink)
        self._last()
        return self._logits[:rows].clone()


class DecodeGraphs:
    """Graphs of a model on a rank, captured when a number of rows first comes.

    Args:
        model: model whose layers are captured.
        windows: see `ForwardContext`.
        device: device of the model.
        capture: what captures.
    """

    def __init__(
        self,
        model: RunnableModel,
        windows: Sequence[int | None],
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._model, self._windows, self._device = model, windows, device
        self._capture = capture
        self._recordings: dict[int, _Recording] = {}

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, run: ForwardContext
    ) -> torch.Tensor | None:
        """Runs a batch that decodes alone.

        Args:
            ids: token of each row, at least one.
            positions: position of each.
            run: the batch.

        Returns:
            Logits of each row, `[rows, vocabulary]`; None, and nothing has run: there are too many.
        """
        size = size_for(len(ids))
        if size is None:
            return None
        if size not in self._recordings:
            logger.info("CUDA graphs of decode steps of up to %d rows are captured", size)
            self._recordings[size] = _Recording(
                self._model, size, self._windows, self._device, self._capture
            )
        return self._recordings[size].run(ids, positions, run)


def capture_for(model: ServedModel, device: torch.device, enforce_eager: bool) -> Capture | None:
    """What captures a model's graphs on a device; None: its steps run without.

    Left out are CPUs, and slices of tensor parallelism, whose sums are collectives. Models whose
    layers ask the host run without graphs, too: see `RunnableModel.asks_host`.
    """
    if enforce_eager or device.type != "cuda" or model.tensor_parallel_size > 1:
        return None
    return CudaCapture(device)

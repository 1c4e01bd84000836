"""How fast fused kernels move rows on one GPU, beside torch's operators: each step of an exchange.

    python benchmarks/kernels/fused_rows.py

The rows are those of the busiest rank of a plan of the pretraining distribution. A line has the
seconds that the GPU takes, which is held back until all is launched, those that the host takes to
launch, and how far results are apart. It needs a GPU, and has not run on one yet.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # device_copy shares its ranks

from benchmarks.arguments import Parser
from distca.attention.merge import Sums
from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape
from distca.documents.lengths import DISTRIBUTIONS, Capped, draw
from distca.plan import Mask, Plan
from distca.runtime import Buffers, Exchange, build_exchange
from distca.runtime.fused_rows import select_row_kernels
from distca.runtime.messages import WORD, PackedRows, QAndKV, RowFormat, row_types
from distca.runtime.row_kernels import RowKernels, ServedRows, TorchRowKernels
from distca.runtime.row_sources import NO_ROWS, SummedRows
from distca.runtime.server_kernels import (
    local_gradients,
    local_outputs,
    received_gradients,
    received_outputs,
)
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler


@dataclass(frozen=True)
class Operation:
    """A step of an exchange.

    Attributes:
        name: what it does.
        run: does it with some kernels, and returns what it writes.
    """

    name: str
    run: Callable[[RowKernels], list[torch.Tensor]]


def make_plan(servers: int, tokens: int, shape: AttentionShape, block: int = 128) -> Plan:
    """Plans a batch of documents.

    Args:
        servers: ranks.
        tokens: tokens of each rank.
        shape: heads of a rank.
        block: rows of a kernel's block.
    """
    lengths = draw(Capped(DISTRIBUTIONS["pretrain"], 4 * tokens), servers * tokens, seed=0)
    config = ScheduleConfig(shape=shape, block=block)
    capacities = even_capacities(int(lengths.sum()), servers)
    return make_scheduler("tiles", config).plan(lengths, capacities, Mask())


def operations(
    plan: Plan, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Iterator[Operation]:
    """Yields the steps of the rank that receives most rows, forward and backward.

    Args:
        plan: plan of all ranks.
        shape: heads of a rank.
        dtype: dtype of rows.
        device: device of the rows.
    """
    memory = plan_memory(plan, shape)
    buffers = Buffers(device, headroom=0.0)
    for workspace, nbytes in (
        (buffers.workspaces[0], memory.slot),
        (buffers.scratch, memory.scratch),
        (buffers.indices, memory.indices),
    ):
        workspace.reserve(nbytes)
    exchanges = [build_exchange(plan, rank) for rank in range(plan.world_size)]
    busiest = max(exchanges, key=lambda each: each.q.received + each.kv.received)
    (exchange,) = buffers.place([busiest])
    rows = _Rows(exchange, shape, dtype, device)
    yield from rows.forward(buffers)
    yield from rows.backward(buffers)


class _Rows:
    """Random rows of a rank."""

    def __init__(
        self, exchange: Exchange, shape: AttentionShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._exchange, self._device = exchange, device
        of_q, of_kv = exchange.q, exchange.kv
        heads, kv_heads = shape.heads, shape.kv_heads

        def rows(number: int, heads: int, size: int) -> torch.Tensor:
            return torch.randn(number, heads, size, device=device).to(dtype)

        self._kinds = QAndKV(
            [rows(of_q.local, heads, shape.head_dim)],
            [rows(of_kv.local, kv_heads, size) for size in (shape.head_dim, shape.value_dim)],
        )
        lse = torch.Size((heads,)), torch.float32
        self._results = ((torch.Size((heads, shape.value_dim)), dtype), lse), ()
        self._gradients = [
            rows(of_q.parts + of_q.sent, heads, shape.head_dim),
            rows(of_kv.parts + of_kv.sent, kv_heads, shape.head_dim),
            rows(of_kv.parts + of_kv.sent, kv_heads, shape.value_dim),
        ]

    def _messages(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device).view(WORD)

    def forward(self, buffers: Buffers) -> Iterator[Operation]:
        """Yields the steps of the forward pass."""
        exchange, scratch = self._exchange, buffers.scratch
        of_kinds = exchange.q, exchange.kv
        layout = exchange.layout("dispatch", self._kinds.row_types)
        sent, arrived = (
            self._messages(each) for each in (layout.sizes.sent, layout.sizes.received)
        )
        sources = [
            SummedRows(tensors, Sums(rows.send, None))
            for tensors, rows in zip(self._kinds, of_kinds, strict=True)
        ]

        def dispatch(kernels: RowKernels) -> list[torch.Tensor]:
            kernels.pack(sent, list(zip(layout.send, sources, strict=True)), scratch)
            return [sent.view(torch.uint8)]

        yield Operation("rows into messages", dispatch)
        served = []
        for tensors, rows in zip(self._kinds, of_kinds, strict=True):
            of = RowFormat.of(row_types(tensors))
            words = torch.zeros((rows.received, of.words), dtype=WORD, device=self._device)
            served.append(ServedRows(tensors, PackedRows.at(words, of)))
        targets = [None if each.received is None else each.received.words for each in served]

        def receive(kernels: RowKernels) -> list[torch.Tensor]:
            kernels.unpack(arrived, list(zip(layout.receive, targets, strict=True)))
            return [torch.view_as_real(each) for each in targets if each is not None]

        yield Operation("rows out of messages", receive)
        for call in exchange.calls:
            pairs = list(zip(served, (call.q_rows, call.kv_rows), strict=True))

            def take(kernels: RowKernels, pairs: Any = pairs) -> list[torch.Tensor]:
                with scratch.borrowed():
                    return kernels.take(pairs, scratch)

            yield Operation(f"rows of the {'causal' if call.causal else 'full'} call", take)
        parts = PackedRows.take(
            buffers.workspaces[0], RowFormat.of(self._results[0]), exchange.output_rows
        )
        for tensor in parts.tensors:
            tensor.copy_(torch.randn(tensor.shape, device=self._device))
        back = exchange.layout("combine", self._results)
        returned = self._messages(back.sizes.sent)
        outputs = [received_outputs(exchange, parts), NO_ROWS]

        def combine(kernels: RowKernels) -> list[torch.Tensor]:
            kernels.pack(returned, list(zip(back.send, outputs, strict=True)), scratch)
            return [returned.view(torch.uint8)]

        yield Operation("outputs merged, into messages", combine)
        own = local_outputs(exchange, parts)
        yield Operation("outputs merged", lambda kernels: list(kernels.merge(own, scratch)))

    def backward(self, buffers: Buffers) -> Iterator[Operation]:
        """Yields the steps that only the backward pass has."""
        exchange, scratch = self._exchange, buffers.scratch
        dq, dk, dv = self._gradients
        layout = exchange.layout("combine", (row_types([dq]), row_types([dk, dv])))
        sent = self._messages(layout.sizes.sent)
        sources = [received_gradients(exchange.q, [dq]), received_gradients(exchange.kv, [dk, dv])]

        def combine(kernels: RowKernels) -> list[torch.Tensor]:
            kernels.pack(sent, list(zip(layout.send, sources, strict=True)), scratch)
            return [sent.view(torch.uint8)]

        yield Operation("gradients summed, into messages", combine)
        pairs = zip((exchange.q, exchange.kv, exchange.kv), self._gradients, strict=True)
        own = [local_gradients(*pair) for pair in pairs]
        yield Operation("gradients summed", lambda kernels: kernels.sum(own))


def host_seconds(work: Callable[[], object], rounds: int) -> float:
    """The median seconds of the thread that launches some work."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    torch.cuda.synchronize()
    return statistics.median(times)


def differing(operation: Operation, ways: tuple[RowKernels, RowKernels]) -> float:
    """The share of bytes in which the results of two ways differ."""
    found = [
        torch.cat(
            [each.contiguous().view(torch.uint8).flatten() for each in operation.run(way)]
        ).clone()
        for way in ways
    ]
    return float((found[0] != found[1]).double().mean()) if found[0].numel() else 0.0


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of each server")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("needs a GPU\n")
        return 1
    from benchmarks.kernels.device_copy import seconds

    device, fused = torch.device("cuda"), select_row_kernels("cuda")
    if isinstance(fused, TorchRowKernels):
        sys.stderr.write("needs triton: pip install triton\n")
        return 1
    shape = AttentionShape(options.heads, options.kv_heads, options.head_dim)
    plan = make_plan(options.servers, options.tokens, shape)
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    sys.stdout.write(
        f"{'step':32} {'GPU us: torch':>14} {'fused':>8} {'host us: torch':>15} {'fused':>8} "
        f"{'bytes apart':>12}\n"
    )
    ways = TorchRowKernels(), fused
    for each in operations(plan, shape, torch.bfloat16, device):
        apart = differing(each, ways)
        runs = [functools.partial(each.run, way) for way in ways]
        gpu = [1e6 * seconds(run, options.rounds) for run in runs]
        host = [1e6 * host_seconds(run, options.rounds) for run in runs]
        sys.stdout.write(
            f"{each.name:32} {gpu[0]:14.1f} {gpu[1]:8.1f} {host[0]:15.1f} {host[1]:8.1f} "
            f"{apart:12.1%}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

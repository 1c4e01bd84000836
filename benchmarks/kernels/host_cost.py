"""Host time and launches of core attention in one layer and nano-batch, by number of servers.

    python benchmarks/kernels/host_cost.py --output benchmarks/results

One rank's steps are run, forward and backward, over a transport that moves nothing and with kernels
that compute nothing: what is left is Python and torch's dispatch. Rows have few bytes, and plans
are those of 8,192 tokens a server with all lengths divided by 16, so that copies take little. The
time is the thread's CPU time, which others on the machine hardly change: the fastest run. The rank
is one to which most servers return outputs.

Launches are those that the same operations would take on a GPU, beside the kernels of attention:
views take none, and operations on lists of tensors one for as many as a launch takes.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from distca.cost.memory import plan_memory
from distca.cost.volume import AttentionShape
from distca.documents.lengths import DISTRIBUTIONS, Capped, draw
from distca.machine import cpu_name
from distca.plan import Mask, Plan
from distca.runtime import Buffers, CoreAttention, EventCursor, build_exchange
from distca.schedule import ScheduleConfig, even_capacities, make_scheduler
from distca.transport import Channel, ChannelBytes, MessageSizes, Pending, Transport

SHAPE = AttentionShape(heads=2, kv_heads=1, head_dim=4, dtype_bytes=2)
TOKENS_PER_SERVER, LONGEST, SCALED = 8192, 524_288, 16
"""Tokens before and after they are divided by `SCALED`, as are the kernel's blocks."""

VIEWS = {
    *("view", "reshape", "_reshape_alias", "slice", "split", "split_with_sizes", "select"),
    *("unsqueeze", "detach", "alias", "empty", "new_empty", "as_strided", "expand", "_unsafe_view"),
    *("transpose", "t", "squeeze", "permute", "unbind", "empty_like"),
}
LISTS = {"cat": 128, "_foreach_copy_": 64}
"""Operations on lists of tensors, and how many tensors one launch takes."""


class Nowhere(Transport):
    """A transport whose messages arrive at once, with whatever lies in the receive buffer."""

    def reserve(self, sizes: Mapping[Channel, ChannelBytes]) -> None:
        """See `Transport.reserve`."""
        self._sent, self._received = (
            {channel: torch.zeros(nbytes, dtype=torch.uint8) for channel, nbytes in rooms}
            for rooms in (
                [(channel, room.send) for channel, room in sizes.items()],
                [(channel, room.receive) for channel, room in sizes.items()],
            )
        )

    def staging(self, channel: Channel, nbytes: int) -> torch.Tensor:
        """See `Transport.staging`."""
        return self._sent[channel][:nbytes]

    def _start(self, channel: Channel, sizes: MessageSizes) -> Pending:
        return _Arrived(self._received[channel][: sum(sizes.receive)])

    def close(self) -> None:
        """See `Transport.close`."""


class _Arrived(Pending):
    def __init__(self, received: torch.Tensor) -> None:
        self._received = received

    def wait(self) -> torch.Tensor:
        return self._received

    def release(self) -> None:
        """Does nothing: no other rank sends."""


class NoKernel:
    """Kernels that leave their results as they are."""

    def forward(self, q_THD: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`; without memory for it, the result is new."""
        if rest[-1] is not None:
            return rest[-1]
        return torch.empty_like(q_THD), q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)

    def backward(self, *tensors: Any) -> tuple[torch.Tensor, ...]:
        """See `Kernel.backward`."""
        into: tuple[torch.Tensor, ...] = tensors[-1]
        return into


class Operations(TorchDispatchMode):
    """Counts torch's operations, and the launches that they take on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.launches = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        self.all += 1
        if name in LISTS:
            self.launches += -(-len(args[0]) // LISTS[name])
        elif name not in VIEWS:
            self.launches += 1
        return func(*args, **(kwargs or {}))


def plan_for(servers: int, scheduler: str = "tiles") -> Plan:
    """Makes the plan of a batch of documents, whose lengths are divided by `SCALED`."""
    tokens = servers * TOKENS_PER_SERVER
    lengths = draw(Capped(DISTRIBUTIONS["pretrain"], LONGEST), tokens, seed=0)
    # Ends are rounded, so that the lengths still fill the servers.
    ends = np.unique(np.cumsum(lengths) // SCALED)
    lengths = np.diff(ends, prepend=np.int64(0)).astype(np.int64)
    config = ScheduleConfig(shape=SHAPE, block=128 // SCALED)
    capacities = even_capacities(int(lengths.sum()), servers)
    return make_scheduler(scheduler, config).plan(lengths, capacities, Mask())


def peers_of(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Servers that compute queries of each rank, and all ranks that it sends to or receives from,
    `[ranks]`."""
    q, kv = (each.moved_rows(plan.world_size) for each in (plan.q_segments, plan.kv_segments))
    moved = (q + kv) > 0
    return (q > 0).sum(axis=1), (moved | moved.T).sum(axis=1)


class RankAlone:
    """One rank's steps of a layer, without the other ranks.

    Args:
        plan: plan of all ranks.
        rank: which of them.

    Attributes:
        exchange: its part of the plan.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        attention = CoreAttention(
            Nowhere(rank, plan.world_size),
            NoKernel(),  # type: ignore[arg-type]
            Buffers(torch.device("cpu"), headroom=0.0),
        )
        attention.reserve(plan_memory(plan, SHAPE))
        (self.exchange,) = attention.buffers.place([build_exchange(plan, rank)])
        self._call = attention._call(EventCursor([self.exchange]), 0, 0.3, {"layer": 0})
        rows = self.exchange.q.local, self.exchange.kv.local, self.exchange.kv.local
        heads = SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads
        self._q, self._k, self._v = (
            torch.zeros(n, h, SHAPE.head_dim, dtype=torch.bfloat16)
            for n, h in zip(rows, heads, strict=True)
        )

    def forward(self) -> None:
        """Does the forward steps."""
        self._call.dispatch(self._q, self._k, self._v)
        self._call.compute()
        self._call.combine()

    def backward(self) -> None:
        """Does the backward steps, after the forward ones."""
        self._call.dispatch_backward(self._q)
        self._call.compute_backward()
        self._call.combine_backward()


@dataclass(frozen=True)
class HostCost:
    """Figures of a layer and nano-batch of one rank; `returning`: servers that compute queries of
    it; `peers`: ranks that it sends to or receives from."""

    servers: int
    rank: int
    returning: int
    peers: int
    forward_ms: float
    backward_ms: float
    forward_median_ms: float
    backward_median_ms: float
    forward_operations: int
    backward_operations: int
    forward_launches: int
    backward_launches: int


def operations(steps: Callable[[], None]) -> Operations:
    """Counts the operations of some steps."""
    with Operations() as found:
        steps()
    return found


def launches_of(alone: RankAlone) -> tuple[int, int]:
    """Launches of a rank's forward and backward steps, beside the kernels of attention."""
    return operations(alone.forward).launches, operations(alone.backward).launches


def measure(plan: Plan, rank: int, repetitions: int) -> HostCost:
    """Times and counts one rank's layer."""
    alone = RankAlone(plan, rank)
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    gc.disable()
    for _ in range(repetitions):
        for name, taken in seconds.items():
            start = time.thread_time()
            getattr(alone, name)()
            taken.append(time.thread_time() - start)
    gc.enable()
    forward, backward = operations(alone.forward), operations(alone.backward)
    returning, peers = peers_of(plan)
    return HostCost(
        plan.world_size,
        rank,
        int(returning[rank]),
        int(peers[rank]),
        1e3 * min(seconds["forward"]),
        1e3 * min(seconds["backward"]),
        1e3 * statistics.median(seconds["forward"]),
        1e3 * statistics.median(seconds["backward"]),
        forward.all,
        backward.all,
        forward.launches,
        backward.launches,
    )


def worst_rank(plan: Plan) -> int:
    """The rank with most servers that return outputs to it, and of these with most peers."""
    returning, peers = peers_of(plan)
    return int((returning * plan.world_size + peers).argmax())


def report(found: list[HostCost], options: argparse.Namespace) -> str:
    """Formats the figures as a Markdown table."""
    head = ["servers", "servers that return to this rank", "its peers", "forward, ms"]
    head += ["backward, ms", "torch's operations", "launches forward", "backward"]
    rows = [
        [
            *(c.servers, c.returning, c.peers),
            f"{c.forward_ms:.2f} ({c.forward_median_ms:.2f})",
            f"{c.backward_ms:.2f} ({c.backward_median_ms:.2f})",
            f"{c.forward_operations}, {c.backward_operations}",
            *(c.forward_launches, c.backward_launches),
        ]
        for c in found
    ]
    lines = [
        "# Host cost of a layer",
        "",
        f"    python benchmarks/kernels/host_cost.py --scheduler {options.scheduler} --output DIR",
        "",
        f"{cpu_name()}, Python {platform.python_version()}, torch {torch.__version__}; fastest "
        f"(median) of {options.repetitions} runs",
        "",
        pages.table(head, rows),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 8, 64, 256, 512])
    parser.add_argument("--scheduler", default="tiles", choices=["greedy", "tiles"])
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--output", type=Path, metavar="DIR", help="Write the figures there.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found = []
    for servers in options.servers:
        plan = plan_for(servers, options.scheduler)
        found.append(measure(plan, worst_rank(plan), options.repetitions))
    text = report(found, options)
    if options.output is not None:
        pages.save(options.output, "host_cost", text, __file__, [asdict(cost) for cost in found])
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One layer, forward and backward, on one device that plays several attention servers in turn.

    python benchmarks/kernels/layer.py --output benchmarks/results
    python benchmarks/kernels/layer.py --seq-length 65536 --hidden-size 4096 --servers 4  # on a GPU

The layer is Megatron's; each server runs it for its own tokens, and computes the plan's tasks for
that server. All bytes move, from memory to memory, on a GPU beside the kernels on a stream of their
own. The difference is the cost of disaggregation where nothing can be gained, since one device does
all servers' work. The baseline is the plan in which documents lie packed and queries stay.

A timeline of each way is written, too (`layer_packed.trace.json` and so on, for ui.perfetto.dev).
"GPU idle" is the share of it in which the GPU does nothing: it waits for the host's launches.
"""

from __future__ import annotations

import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import greenlet
import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.kernels.attention import seconds_of
from benchmarks.lengths_only import VOCABULARY, stream_of
from benchmarks.virtual_ranks import core_attention_of_ranks
from distca.cost.volume import plan_bytes
from distca.documents.lengths import DISTRIBUTIONS, draw
from distca.plan.plan import max_over_mean
from distca.plan.span import Int64s
from distca.runtime import CoreAttention, EventCursor, Exchange, build_exchange
from distca.schedule import ExecutionOptions, GlobalBatchPlanner, documents_in_turn
from distca.schedule.program import Event, LayerGroup, Pass, Step, tick_program
from distca.transport import Transport
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.micro_batch import MicroBatch
from megatron_patches.batches.planned import PlannedReader
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.planning import schedule_config
from megatron_patches.model.core_attention import CoreAttentionRun
from megatron_patches.parts import build_model, initialize, parse_args

WAYS: dict[str, tuple[str | None, int, bool]] = {
    "packed": ("packed", 1, False),
    "whole": (None, 1, False),
    "ping-pong, one stream": (None, 2, False),
    "ping-pong": (None, 2, True),
}
"""Scheduler (None: that of `--scheduler`), nano-batches, and whether bytes move beside kernels."""


def parse(args: Namespace, nano_batches: int) -> Namespace:
    """Parses Megatron's arguments for one process."""
    flags = f"""
        --distca --num-layers 1 --hidden-size {args.hidden_size} --num-attention-heads {args.heads}
        --group-query-attention --num-query-groups {max(args.heads // 4, 1)}
        --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --seq-length {args.seq_length} --micro-batch-size 1 --train-iters 1 --lr 1e-4
        --max-position-embeddings {args.seq_length} --split 100,0,0
        --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --data-path none --eval-iters 0
        --distca-scheduler {args.scheduler}
    """.split()
    flags += ["--bf16"] if torch.cuda.is_available() else []
    flags += [] if nano_batches == 2 else ["--no-distca-ping-pong"]
    return parse_args(flags)


class ServerInLockstep(EventCursor):
    """Program of one of several servers in a thread, which gives way after each event.

    Args:
        exchanges: server's part of the plan of each nano-batch.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        layer = [LayerGroup(range(1), recomputed=False)]
        passes: tuple[Pass, ...] = ("forward", "backward")
        of_passes = [tick_program(each, layer, len(exchanges), at_home=False) for each in passes]
        self._there_and_back = of_passes[0] + of_passes[1]
        super().__init__(exchanges, self._there_and_back)

    def begin_again(self) -> None:
        """Starts another forward and backward pass."""
        self.begin(self.exchanges, self._there_and_back)

    def take_turn(self, direction: Pass, step: Step, nano_batch: int) -> Event:
        """See `EventCursor`."""
        if self.give_way is not None and step != "dispatch":
            self.give_way()
        return super().take_turn(direction, step, nano_batch)


def in_lockstep(
    functions: Sequence[Callable[[], Any]], programs: Sequence[ServerInLockstep]
) -> list[Any]:
    """Runs functions in turn, each until its server has done an event; returns their results."""
    main = greenlet.getcurrent()
    results: list[Any] = [None] * len(functions)

    def keep(number: int, function: Callable[[], Any]) -> None:
        results[number] = function()

    for program in programs:
        program.give_way = main.switch
    left = [greenlet.greenlet(partial(keep, *each)) for each in enumerate(functions)]
    while left:
        for each in left:
            each.switch()
        left = [each for each in left if not each.dead]
    for program in programs:
        program.give_way = None
    return results


@dataclass(frozen=True)
class Half:
    """A nano-batch of one server's tokens, or all of them.

    Attributes:
        hidden: inputs of the layer, `[tokens, 1, hidden_size]`.
        angles: rotary angles of the tokens.
        params: documents of the tokens, and the server's part of the plan.
    """

    hidden: torch.Tensor
    angles: torch.Tensor
    params: Any


class Layer:
    """Megatron's layer, and the servers that run it.

    Args:
        args: arguments of this benchmark.
        lengths: lengths of the documents of all servers together.
        device: device of all servers.
    """

    def __init__(self, args: Namespace, lengths: Int64s, device: torch.device) -> None:
        self._args, self._lengths, self._device = args, lengths, device
        parsed = parse(args, 2)
        self._model = build_model(initialize(parsed))
        if device.type == "cuda":
            self._model.cuda()
        if parsed.bf16:
            self._model.bfloat16()
        self._dtype = parsed.params_dtype
        self._layer = self._model.decoder.layers[0]
        self._embedding = torch.randn(
            VOCABULARY, args.hidden_size, device=device, dtype=self._dtype
        )
        self.bytes_planned: dict[str, int] = {}
        self.balance: dict[str, float] = {}
        self.transports: dict[str, list[Transport]] = {}

    def way(self, name: str) -> Callable[[], torch.Tensor]:
        """Makes a function that runs the layer forward and backward, and returns the outputs' sum.

        Args:
            name: one of `WAYS`.
        """
        halves = self._halves(name)
        # Halves take turns, all servers' pings and then all pongs, so that every server starts an
        # exchange before one waits for it.
        return partial(
            self._run, [half for together in zip(*halves, strict=True) for half in together]
        )

    def _run(self, halves: list[Half]) -> torch.Tensor:
        for half in halves:
            half.params.run.cursor.begin_again()
        outputs = in_lockstep(
            [partial(self._through, half) for half in halves],
            [half.params.run.cursor for half in halves],
        )
        total = torch.stack([output.float().sum() for output in outputs]).sum()
        total.backward()
        return total.detach()

    def _through(self, half: Half) -> torch.Tensor:
        output, _ = self._layer(
            hidden_states=half.hidden,
            attention_mask=None,
            rotary_pos_emb=half.angles,
            packed_seq_params=half.params,
        )
        return output  # type: ignore[no-any-return]

    def _halves(self, name: str) -> list[list[Half]]:
        """Makes the nano-batches of each server."""
        scheduler, nano_batches, overlaps = WAYS[name]
        servers, seq_length = self._args.servers, self._args.seq_length
        parsed = parse(self._args, nano_batches)
        config = schedule_config(DistcaConfig.from_args(parsed), parsed, servers)
        planner = GlobalBatchPlanner(
            np.arange(servers).reshape(1, servers),
            config,
            ExecutionOptions(scheduler or self._args.scheduler, ping_pong=nano_batches == 2),
        )
        stream = stream_of(self._lengths.tolist())
        batches = [
            PlannedReader(stream, WindowLayout(rank, servers, seq_length, 1), planner, 1)
            for rank in range(servers)
        ]
        planned = planner.plan(documents_in_turn([self._lengths]))
        plans = planned.ticks[0].plans
        self.bytes_planned[name] = sum(plan_bytes(plan, config.shape).total for plan in plans)
        loads = np.sum([plan.loads() for plan in plans], axis=0)
        self.balance[name] = max_over_mean(loads)
        needed = planned.largest_memory(config.shape)
        stream = None
        if self._device.type == "cuda" and overlaps:
            stream = torch.cuda.Stream(priority=-1)
        ranks = core_attention_of_ranks(servers, len(plans), needed, self._device, stream)
        halves = []
        for rank, (attention, batch) in enumerate(zip(ranks, batches, strict=True)):
            exchanges = attention.buffers.place([build_exchange(plan, rank) for plan in plans])
            only = planned.micro_batches[0]
            made = batch.micro_batch(only, [None] * len(only.plans))
            micro_batch = made.to(self._device)
            halves.append(self._of_server(attention, exchanges, micro_batch))
        self.transports[name] = [attention.transport for attention in ranks]
        return halves

    def _of_server(
        self, attention: CoreAttention, exchanges: tuple[Exchange, ...], batch: MicroBatch
    ) -> list[Half]:
        params = batch.packed_seq_params
        assert params is not None
        run = CoreAttentionRun(attention, ServerInLockstep(exchanges))
        given = [replace(part, run=run) for part in params.nano_batches or (params,)]
        sizes = [part.rows for part in given]
        self._model.rotary_pos_emb.positions = batch.position_ids[0]
        angles = self._model.rotary_pos_emb(0)
        tokens = batch.tokens[0]
        return [
            # Every token's numbers follow from the token, so that all ways compute the same.
            Half(self._embedding[one].unsqueeze(1).requires_grad_(), angle, part)
            for one, angle, part in zip(
                tokens.split(sizes), angles.split(sizes), given, strict=True
            )
        ]


def write_timeline(function: Callable[[], Any], file: Path) -> float | None:
    """Writes a timeline of one call; returns the share in which the GPU idles, or None on a CPU."""
    with torch.profiler.profile() as profiled:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiled.export_chrome_trace(str(file))
    on_gpu = torch.autograd.DeviceType.CUDA
    ranges = [each.time_range for each in profiled.events() if each.device_type == on_gpu]
    return idle_share([(each.start, each.end) for each in ranges]) if ranges else None


def idle_share(busy: list[tuple[float, float]]) -> float:
    """Returns the share in no interval of the time from the first one's begin to the last's end."""
    begin = end = min(busy)[0]
    idle = 0.0
    for start, stop in sorted(busy):
        idle += max(start - end, 0.0)
        end = max(end, stop)
    return idle / (end - begin)


def table(rows: list[dict[str, Any]]) -> str:
    """Formats the figures as Markdown."""
    header = ["way", "loads max/mean", "MB moved", "ms", "of packed", "GPU idle"]
    cells = [
        [
            row["way"],
            f"{row['max_over_mean']:.3f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{1e3 * row['seconds']:.2f}",
            f"{row['of_packed']:.3f}",
            "" if row["idle"] is None else f"{row['idle']:.1%}",
        ]
        for row in rows
    ]
    return pages.table(header, cells, "---:")


def main(argv: list[str] | None = None) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens of a server")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--scheduler", choices=("greedy", "tiles"), default="tiles")
    parser.add_argument("--mix", choices=list(DISTRIBUTIONS), default="prolong")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    # The mixes are of 65,536 tokens a rank.
    total = args.servers * args.seq_length
    drawn = draw(DISTRIBUTIONS[args.mix], args.servers * 65_536, seed=0)
    lengths = np.maximum(drawn * args.seq_length // 65_536, 1)
    lengths = np.append(lengths, total)[: int(np.searchsorted(np.cumsum(lengths), total)) + 1]
    lengths[-1] -= int(lengths.sum()) - total
    layer = Layer(args, lengths, device)
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in WAYS:
        function = layer.way(name)
        seconds = seconds_of(function, device, args.repeats)
        # One run more than the timed ones warms up.
        runs = args.repeats + 1
        slug = name.replace(",", "").replace(" ", "_")
        moved = sum(sum(each.bytes_sent.values()) for each in layer.transports[name])
        assert moved == runs * layer.bytes_planned[name], (moved, runs, layer.bytes_planned[name])
        rows.append(
            {
                "way": name,
                "max_over_mean": layer.balance[name],
                "bytes": layer.bytes_planned[name],
                "seconds": seconds,
                "sum_of_outputs": float(function()),
                "idle": write_timeline(function, args.output / f"layer_{slug}.trace.json"),
            }
        )
    rows = [row | {"of_packed": row["seconds"] / rows[0]["seconds"]} for row in rows]
    dist.destroy_process_group()
    gpu = device.type == "cuda"
    what = {
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or "a CPU",
        "torch": torch.__version__,
        "flags": {name: str(value) for name, value in vars(args).items() if name != "output"},
        "rows": rows,
    }
    pages.save(args.output, f"layer_{device.type}", table(rows), __file__, what)


if __name__ == "__main__":
    main()

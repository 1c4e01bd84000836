"""Host cost of a decode step: planned, sent, checked and built, for long contexts and any stripe.

    python benchmarks/serving/decode_step.py --output DIR

64 sequences of 132,000 cached tokens, 128,000 of them prompts and the rest decoded in stripes, are
fed a token each on 4 ranks. An engine plans the step, takes blocks and encodes a message; every
rank decodes and checks it, plans the step itself, and builds its exchange, tables and indices.
Times are the thread's CPU time, the fastest (median) of many steps in which all sequences advance;
kernels and exchanges are not in them. One layer's attention is timed apart, with kernels that
compute nothing and messages that go nowhere.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.kernels.host_cost import NoKernel, Nowhere, operations
from distca.attention.kernel_timing import cpu_name
from distca.cost.volume import AttentionShape
from distca.inference.attention_runner import AttentionRunner, ForwardContext
from distca.inference.step_planner import Step, StepPlanner
from distca.plan import Mask
from distca.runtime import Buffers, CoreAttention
from distca.schedule.serving import shard_evenly
from distca.schedule.serving.accounts import Growth
from distca.schedule.serving.blocks import BlockPool
from distca.schedule.serving.decode import DecodeBatch
from distca.schedule.serving.decode_message import DecodeMessage
from distca.schedule.serving.holdings import Holdings

SHAPE = AttentionShape(heads=2, kv_heads=1, head_dim=4, dtype_bytes=2)
MASKS = (Mask(), Mask(4095))


class NoPagedKernel(NoKernel):
    """Kernels over pools that leave their results as they are."""

    def forward_paged(self, q_THD: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PagedKernel.forward_paged`; it finds where the keys are."""
        *_, keys, into = rest
        assert len(keys.runs)
        return self.forward(q_THD, into)


@dataclass(frozen=True)
class Setting:
    """What is decoded.

    Attributes:
        sequences: sequences that are fed.
        prompt: tokens of each prompt.
        decoded: tokens of each that are decoded already.
        ranks: ranks.
        stripe: consecutive decoded positions of a rank.
        block_size: rows of a block.
        kernel: kernel of the ranks.
        shape: heads.
        dtype: dtype of rows.
    """

    sequences: int = 64
    prompt: int = 128_000
    decoded: int = 4_000
    ranks: int = 4
    stripe: int = 16
    block_size: int = 256
    kernel: Any = None
    shape: AttentionShape = SHAPE
    dtype: torch.dtype = torch.bfloat16


class Decoding:
    """An engine and its ranks, of which one runs its part of steps."""

    def __init__(self, setting: Setting, rank: int = 0) -> None:
        self.setting, self.rank = setting, rank
        rows = setting.prompt + setting.decoded + 2000
        per_sequence = rows // setting.ranks // setting.block_size + 3
        self.blocks = setting.sequences * per_sequence
        pool = BlockPool(setting.ranks, self.blocks, setting.block_size)
        self.engine = StepPlanner(pool, MASKS, setting.stripe)
        self.mirror = Holdings(setting.ranks, setting.stripe)
        device = torch.device("cpu")
        core = CoreAttention(
            Nowhere(rank, setting.ranks),
            setting.kernel or NoPagedKernel(),
            Buffers(device, len(MASKS)),
        )
        self.steps = AttentionRunner(
            core,
            [mask.window_left for mask in MASKS],
            setting.shape,
            setting.dtype,
            device,
            self.blocks,
            setting.block_size,
        )
        self._fill()

    def _fill(self) -> None:
        """Lays out prompts and decoded tokens without computing them."""
        setting, numbers = self.setting, list(range(self.setting.sequences))
        none = np.zeros(len(numbers), dtype=np.int64)
        new = shard_evenly(none, none + setting.prompt, setting.ranks)
        nothing = np.zeros((len(numbers), setting.ranks), dtype=np.int64)
        for holdings in (self.engine.holdings, self.mirror):
            holdings.note(numbers, new)
            lines = holdings.lines(numbers)
            holdings.note_decoded(lines, setting.decoded)
        rows = self.engine.holdings.rows(lines, self.engine.holdings.lengths(lines))
        for number in numbers:
            growth = Growth((number,), nothing[:1], rows[number : number + 1])
            found = self.engine.accounts.take(growth)
            self.steps.add_blocks(found)

    def plan(self) -> bytes:
        """Does the engine's part of a step; returns what is sent."""
        step = self.engine.plan(dict.fromkeys(range(self.setting.sequences), 1), "pass-q", True)
        (decode,) = step.parts
        assert isinstance(decode, DecodeBatch)
        return DecodeMessage.of(decode, [7] * self.setting.sequences, step.blocks).encode()

    def build(self, message: bytes) -> ForwardContext:
        """Does a rank's part of a step but for its layers."""
        found = DecodeMessage.decode(message)
        decode, blocks = found.plan(self.mirror, MASKS, self.blocks, self.setting.block_size)
        run = self.steps.begin(Step((decode,), blocks))
        tokens = dict(zip(decode.sequences, found.tokens[:, None].tolist(), strict=True))
        for values in (run.ids(tokens), run.positions, np.array([*run.last().values()])):
            torch.from_numpy(values)
        return run

    def layer(self, run: ForwardContext, layer: int) -> None:
        """Runs a layer's attention."""
        shape, count = self.setting.shape, len(run.slots)
        q, kv = (
            torch.ones(count, heads, shape.head_dim, dtype=self.setting.dtype)
            for heads in (shape.heads, shape.kv_heads)
        )
        run.attend(layer, q, kv, kv, 1.0)


@dataclass(frozen=True)
class Found:
    """Milliseconds of CPU time, the fastest and the median; bytes sent; operations of torch."""

    engine: tuple[float, float]
    rank: tuple[float, float]
    layers: tuple[float, float]
    bytes_a_sequence: float
    operations: int


def measure(setting: Setting, repetitions: int) -> Found:
    """Times steps of the rank with most to do: all have alike."""
    decoding = Decoding(setting)
    taken: dict[str, list[float]] = {"engine": [], "rank": [], "layers": []}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        result = function()
        taken[name].append(1e3 * (time.thread_time() - begin))
        return result

    gc.disable()
    for _ in range(repetitions):
        message = timed("engine", decoding.plan)
        run = timed("rank", lambda sent=message: decoding.build(sent))
        timed("layers", lambda of=run: [decoding.layer(of, layer) for layer in range(len(MASKS))])
    gc.enable()
    message = decoding.plan()
    counted = operations(lambda: decoding.layer(decoding.build(message), 0)).all
    times = {name: (min(each), statistics.median(each)) for name, each in taken.items()}
    return Found(**times, bytes_a_sequence=len(message) / setting.sequences, operations=counted)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--stripes", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_000, 132_000])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--output", type=Path, metavar="DIR", help="Write the figures there.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    lines = [
        "# Host cost of a decode step",
        "",
        "    python benchmarks/serving/decode_step.py --output DIR",
        "",
        f"{cpu_name()}, Python {platform.python_version()}, torch {torch.__version__}; 64 "
        f"sequences on 4 ranks, a full mask and a window of 4,096; CPU time, fastest (median) of "
        f"{options.repetitions} steps",
        "",
        "| cached tokens | stripe | engine, ms | each rank, ms | both layers' attention, ms | "
        "bytes sent a sequence | torch's operations with one layer |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for tokens in options.tokens:
        for stripe in options.stripes:
            prompt = tokens - min(4_000, tokens // 2)
            setting = Setting(prompt=prompt, decoded=tokens - prompt, stripe=stripe)
            found = measure(setting, options.repetitions)
            times = (f"{a:.2f} ({b:.2f})" for a, b in (found.engine, found.rank, found.layers))
            lines.append(
                f"| {tokens:,} | {stripe} | {' | '.join(times)} | {found.bytes_a_sequence:.0f} | "
                f"{found.operations} |"
            )
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        pages.write(options.output / "decode_step.md", text, __file__)
    return 0


if __name__ == "__main__":
    sys.exit(main())

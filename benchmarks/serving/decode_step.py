"""Host cost of a decode step: scheduled, planned and built, for long contexts and any stripe.

    python benchmarks/serving/decode_step.py --output DIR

64 sequences of 132,000 cached tokens are fed a token each on 4 ranks. The engine schedules the
step, takes blocks and takes in the tokens; every rank takes in new blocks, plans the step, and
builds its exchange, tables and indices. Times are the thread's CPU time, the minimum (median) of
many steps in which all sequences advance; kernels and exchanges are not in them. Both layers'
attention is timed apart, with kernels that compute nothing and messages that go nowhere.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.kernels.host_cost import NoKernel, Nowhere, operations
from distca.attention import Kernel
from distca.cost.volume import AttentionShape
from distca.inference.attention_runner import AttentionRunner, ForwardContext
from distca.inference.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from distca.inference.engine import Engine
from distca.inference.messages import AddRequest, Iteration, ModelOutput, SampledToken
from distca.inference.sampling import SamplingParams
from distca.machine import cpu_name
from distca.plan import Mask
from distca.runtime import Buffers, CoreAttention
from distca.schedule.serving.batches import Batch
from distca.schedule.serving.iteration import plan_iteration
from distca.schedule.serving.limits import SchedulerConfig
from distca.schedule.serving.scheduled import SchedulerOutput

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
        tokens: cached tokens of each.
        ranks: ranks.
        stripe: consecutive decoded positions of a rank, a multiple of a block.
        block_size: rows of a block.
        kernel: kernel of the ranks.
        shape: heads.
        dtype: dtype of rows.
    """

    sequences: int = 64
    tokens: int = 132_000
    ranks: int = 4
    stripe: int = 256
    block_size: int = 256
    kernel: Any = None
    shape: AttentionShape = SHAPE
    dtype: torch.dtype = torch.bfloat16


class Decoding:
    """An engine and its ranks; one of them runs its part of steps."""

    def __init__(self, setting: Setting, rank: int = 0) -> None:
        self.setting, self.rank = setting, rank
        size, count = setting.block_size, setting.sequences
        self.blocks = count * ((setting.tokens + 2000) // setting.ranks // size + 3)
        windows = tuple(mask.window_left for mask in MASKS)
        config = EngineConfig(
            ModelConfig("", "", windows, setting.tokens + 2000, 1),
            SchedulerConfig(
                count, count * (setting.tokens + 1), setting.stripe, 0, prefix_caching=False
            ),
            ParallelConfig(setting.ranks, strategy="pass-q"),
            CacheConfig(size, None),
        )
        self.engine = Engine(config, self.blocks)
        device = torch.device("cpu")
        core = CoreAttention(
            Nowhere(rank, setting.ranks),
            cast(Kernel, setting.kernel or NoPagedKernel()),
            Buffers(device, len(MASKS)),
        )
        self.steps = AttentionRunner(
            core, windows, setting.shape, setting.dtype, device, self.blocks, size
        )
        self._fill()

    def _fill(self) -> None:
        """Lays out prompts without computing them."""
        prompt = [7] * self.setting.tokens
        for number in range(self.setting.sequences):
            self.engine.add(AddRequest(number, prompt, SamplingParams(max_tokens=2000)))
        begun = self._begin()
        self._take_in(begun.batch)
        self._end(begun)

    def _begin(self) -> Iteration:
        begun = self.engine.schedule()
        assert begun is not None, "sequences have more tokens to decode"
        return begun

    def _end(self, begun: Iteration) -> None:
        chosen = [SampledToken(feed.sequence, 7) for feed in begun.batch.feeds]
        self.engine.finish({0: ModelOutput(chosen, 0)})

    def plan(self) -> SchedulerOutput:
        """Does the engine's part of a step; returns what is fed."""
        begun = self._begin()
        self._end(begun)
        return begun.batch

    def _take_in(self, batch: SchedulerOutput) -> None:
        """Takes in the blocks that a step adds to this rank."""
        for feed in batch.feeds:
            if feed.new_blocks:
                mine = [block.number for block in feed.new_blocks if block.rank == self.rank]
                self.steps.add_blocks(feed.sequence, mine)

    def build(self, batch: SchedulerOutput) -> ForwardContext:
        """Does a rank's part of a step but for its layers."""
        setting = self.setting
        self._take_in(batch)
        plan = plan_iteration(batch.feeds, MASKS, setting.block_size, setting.ranks, "pass-q")
        assert plan.decode is not None, "a step that decodes"
        run = self.steps.begin(Batch((plan.decode,)))
        tokens = {feed.sequence: [7] for feed in batch.feeds}
        new = run.new
        for values in (new.ids(tokens), new.positions, np.array([*new.last().values()])):
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

    def layers(self, run: ForwardContext) -> None:
        """Runs the attention of all layers."""
        for layer in range(len(MASKS)):
            self.layer(run, layer)


@dataclass(frozen=True)
class Found:
    """Milliseconds of CPU time, the fastest and the median; operations of torch."""

    engine: tuple[float, float]
    rank: tuple[float, float]
    layers: tuple[float, float]
    operations: int


def measure(setting: Setting, repetitions: int) -> Found:
    """Times steps of the rank with most to do; all have about the same."""
    decoding = Decoding(setting)
    taken: dict[str, list[float]] = {"engine": [], "rank": [], "layers": []}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        result = function()
        taken[name].append(1e3 * (time.thread_time() - begin))
        return result

    gc.disable()
    for _ in range(repetitions):
        batch = timed("engine", decoding.plan)
        run = timed("rank", partial(decoding.build, batch))
        timed("layers", partial(decoding.layers, run))
    gc.enable()
    batch = decoding.plan()
    counted = operations(lambda: decoding.layer(decoding.build(batch), 0)).all
    times = {name: (min(each), statistics.median(each)) for name, each in taken.items()}
    return Found(**times, operations=counted)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--stripes", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_000, 132_000])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--output", type=Path, metavar="DIR", help="Write the figures there.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    lines = [
        "# Host cost of a decode step",
        "",
        f"    {pages.typed('benchmarks/serving/decode_step.py')}",
        "",
        f"{cpu_name()}, Python {platform.python_version()}, torch {torch.__version__}; 64 "
        "sequences on 4 ranks; two layers, one with full attention and one with a window of 4,096. "
        f"Cells: minimum (median) CPU time of {options.repetitions} steps. No kernel computes, and "
        "no exchange sends bytes.",
        "",
        "*Stripe*: consecutive positions whose keys one rank caches. *Engine*: schedules the step "
        "and takes in its tokens. *Each rank*: plans the step and builds its exchange, tables and "
        "indices. *Attention*: the host's part of both layers' attention. *Operations*: torch's, "
        "in a rank's part of a step with one layer's attention.",
        "",
        "| cached tokens | stripe | engine, ms | each rank, ms | both layers' attention, ms | "
        "torch's operations |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for tokens in options.tokens:
        for stripe in options.stripes:
            found = measure(Setting(tokens=tokens, stripe=stripe), options.repetitions)
            times = (f"{a:.2f} ({b:.2f})" for a, b in (found.engine, found.rank, found.layers))
            lines.append(f"| {tokens:,} | {stripe} | {' | '.join(times)} | {found.operations} |")
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        pages.write(options.output / "decode_step.md", text, __file__)
    return 0


if __name__ == "__main__":
    sys.exit(main())

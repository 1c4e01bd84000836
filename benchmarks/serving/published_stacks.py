"""Simulated times of the runs that papers publish, by a few rates and overheads of their systems.

Three systems: KV-Runahead's on A100s (PyTorch's eager attention, which writes and reads all
scores), Tetris's on A100s, and Meta's on H100s. Each has its own rates of kernels; overheads of
calls are the same in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.serving.held_out import Parameter, Values
from benchmarks.serving.published_times import NUMBERS, ORDERS, Number, Order, Run
from distca.cost.model_sizes import MODELS
from distca.plan import Mask, Placement, SteppedPlan
from distca.plan.span import Floats, Int64s
from distca.schedule.serving import (
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.partitions import search_partition
from distca.simulate import CLUSTERS, PUBLISHED, Cluster, Outcome
from distca.simulate.serving import InferenceCosts, Overheads, simulate_step
from distca.simulate.serving.prefill_chain import ChainCosts

_A100, _H100 = (replace(CLUSTERS[name], charges=PUBLISHED) for name in ("dgx-a100", "dgx-h100"))
_H100 = replace(_H100, peak_tflops=800.0)  # what Meta takes for its GPUs, Section 3.4

PARAMETERS = {
    "runahead_linear": Parameter(0.5, 1.0, "KV-Runahead: share of the peak in linear layers"),
    "runahead_score_bytes": Parameter(
        28.0, 200.0, "KV-Runahead: bytes of memory traffic for each score of a head"
    ),
    "runahead_host": Parameter(3e-3, 1.0, "KV-Runahead: seconds in which a host launches a layer"),
    "runahead_links": Parameter(0.86, 1.0, "KV-Runahead: share of the links' speed"),
    "tetris_linear": Parameter(0.5, 1.0, "Tetris: share of the peak in linear layers"),
    "tetris_attention": Parameter(0.73, 1.0, "Tetris: share of the peak in attention"),
    "meta_linear": Parameter(0.5, 1.0, "Meta: share of the peak in linear layers"),
    "meta_attention": Parameter(0.6, 1.0, "Meta: share of the peak in attention"),
    "call": Parameter(
        3e-4, 1.0, "all: seconds of a collective, and of a step of a ring or chain, in a prefill"
    ),
    "decode_call": Parameter(
        3e-5, 1.0, "all: seconds of a collective, and of an exchange, in a decode step"
    ),
    "hop": Parameter(1.5e-5, 1.0, "all: seconds of a collective for each doubling of its nodes"),
    "weights": Parameter(0.9, 1.0, "all: share of the memory's speed that reads weights"),
}
"""What is fitted, with the values before any fit."""
OVERHEADS = ("runahead_host", "call", "decode_call", "hop", "weights")
"""Those that are no rate of kernels or links: without them the simulator charges work alone."""
_WITHOUT = {"runahead_host": 0.0, "call": 0.0, "decode_call": 0.0, "hop": 0.0, "weights": 1.0}


def rates_alone() -> dict[str, Parameter]:
    """Parameters of a fit without overheads."""
    return {name: each for name, each in PARAMETERS.items() if name not in OVERHEADS}


def start(overheads: bool) -> dict[str, float]:
    """Values before any fit."""
    values = {name: each.start for name, each in PARAMETERS.items()}
    return values if overheads else values | _WITHOUT


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model of KV-Runahead, by the models' configurations.

    Attributes:
        mlp: width of the MLP times its number of matrices.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int


_SEVEN = _Sizes(32, 4096, 32, 32, 128, 3 * 11008, 32_000)
_SIZES = {
    "Llama 7B": _SEVEN,
    "Llama 13B": _Sizes(40, 5120, 40, 40, 128, 3 * 13824, 32_000),
    "Llama 30B": _Sizes(60, 6656, 52, 52, 128, 3 * 17920, 32_000),
    "Falcon 1B": _Sizes(24, 2048, 32, 32, 64, 2 * 8192, 50_304),
    "Falcon 7B": _Sizes(32, 4544, 71, 1, 64, 2 * 18176, 65_024),
    "Llama 7B MQA": replace(_SEVEN, kv_heads=1),
    "Llama 7B GQA8": replace(_SEVEN, kv_heads=8),
}


def chain_costs(run: Run, values: Values) -> ChainCosts:
    """Costs of a run of KV-Runahead: a chain that hands on whole caches, and products with all
    keys."""
    of, peak = _SIZES[run.model], _A100.peak_tflops * 1e12 * values["runahead_linear"]
    pre = of.hidden * (of.heads + 2 * of.kv_heads) * of.head_dim
    post = of.hidden * (of.heads * of.head_dim + of.mlp)
    kv_bytes = 2 * 2 * of.kv_heads * of.head_dim
    # Its models compute the logits of all tokens.
    token = 2 * (of.layers * (pre + post) + of.hidden * of.vocabulary) / peak
    score = values["runahead_score_bytes"] / (_A100.copy_gb_per_s * 1e9) + 4 * of.head_dim / peak
    return ChainCosts(
        token,
        of.layers * of.heads * score,
        of.layers,
        kv_bytes,
        (run.gb_per_s * values["runahead_links"],) * (run.ranks - 1),
        pre / (pre + post),
        whole_caches=True,
        copy_seconds=2 * kv_bytes / _A100.copied_bytes_per_second,
        overheads=Overheads(
            host_layer_seconds=values["runahead_host"],
            collective_seconds=values["call"],
            step_seconds=values["call"],
        ),
    )


@cache
def _placed(new: int, cached: int, ranks: int, sequences: int) -> tuple[Placement, Placement]:
    """Who holds the cached tokens, and who owns the new ones."""
    start = np.full(sequences, cached)
    held = shard_evenly(0 * start, start, ranks) if cached else nobody_holds(ranks)
    if new > 1:
        return held, shard_evenly(start, start + new, ranks)
    numbers = np.arange(sequences, dtype=np.int64)
    return held, shard_in_stripes(start, start + new, numbers, 1, ranks)


@cache
def plan_of(run: Run) -> SteppedPlan:
    """The plan of a run, in steps around a ring."""
    placed = _placed(run.new, run.cached, run.ranks, run.sequences)
    return step_plan(
        *placed, "pass-kv" if run.kind == "pass-kv" else "pass-q", Mask(), in_steps=True
    )


def _cluster(run: Run, values: Values) -> Cluster:
    name, base = ("meta", _H100) if run.paper == "Meta" else ("tetris", _A100)
    return replace(
        base,
        linear_mfu=values[f"{name}_linear"],
        attention_tflops=base.peak_tflops * values[f"{name}_attention"],
        network_gb_per_s=run.gb_per_s or base.network_gb_per_s,
    )


def overheads(values: Values) -> tuple[Overheads, Overheads]:
    """Overheads of prefills, and of decode steps, which CUDA graphs launch."""
    call, of_decode = values["call"], values["decode_call"]
    prefill = Overheads(
        collective_seconds=call,
        step_seconds=call,
        hop_seconds=values["hop"],
        weight_efficiency=values["weights"],
    )
    decode = Overheads(
        collective_seconds=of_decode,
        exchange_seconds=of_decode,
        hop_seconds=values["hop"],
        weight_efficiency=values["weights"],
    )
    return prefill, decode


def outcome(run: Run, values: Values, layers: int | None = None) -> Outcome:
    """Simulates a run of Tetris or Meta; with that many layers, or the model's."""
    model, of = MODELS[run.model], overheads(values)
    model = replace(model, layers=layers or model.layers)
    mlp_bytes = 1 if run.paper == "Meta" else 2
    cluster = _cluster(run, values)
    costs = InferenceCosts(model, cluster, run.tensor_parallel, 2, mlp_bytes, *of)
    return simulate_step([plan_of(run)] * model.layers, costs)


def quick_seconds(run: Run, values: Values) -> float:
    """Predicts the seconds of a run by few layers: all further ones take as long as the last."""
    few, more = (outcome(run, values, layers).seconds for layers in _FEW_LAYERS)
    layers = MODELS[run.model].layers - _FEW_LAYERS[0]
    return few + layers * (more - few) / (_FEW_LAYERS[1] - _FEW_LAYERS[0])


_FEW_LAYERS = 2, 4
FITTED_ORDERS = tuple(each for each in ORDERS if each.fitted)


class Stacks:
    """Predicts published numbers: a `held_out.Problem`, which simulates few layers for `residuals`.

    Args:
        numbers: published numbers.
        orders: comparisons that count as errors where they are not met; they follow the numbers.
    """

    def __init__(
        self,
        numbers: Sequence[Number] = NUMBERS,
        orders: Sequence[Order] = FITTED_ORDERS,
    ) -> None:
        self.numbers, self.orders = numbers, orders
        self._partitions: dict[Run, Int64s] = {}
        self._base: dict[Run, float] = {}

    @property
    def groups(self) -> list[object]:
        """What is split into halves: the numbers of each table and kind of run, and orders."""
        numbers = [(each.run.paper, each.run.kind, each.over is None) for each in self.numbers]
        return [*numbers, *(["order"] * len(self.orders))]

    def partition(self, values: Values, finest: int = 256) -> None:
        """Searches the chains' partitions anew; of other chains they are searched when needed."""
        self._partitions = {}
        for run in {each.run for each in self.numbers}:
            if run.kind == "chain" and run.ranks > 1:
                costs = chain_costs(run, values)
                self._partitions[run] = search_partition(
                    run.new, run.ranks, costs.chain_seconds, finest
                )

    def seconds(self, run: Run, values: Values, quick: bool = False) -> float:
        """Predicts the seconds of a run."""
        if run.paper != "KV-Runahead":
            return quick_seconds(run, values) if quick else outcome(run, values).seconds
        costs = chain_costs(run, values)
        if run.kind == "all-gather":
            return costs.all_gather_seconds(run.new)
        if run.ranks == 1:
            return costs.alone(run.new)
        if run not in self._partitions:
            self._partitions[run] = search_partition(run.new, run.ranks, costs.chain_seconds, 64)
        return float(costs.chain_seconds(self._partitions[run][None])[0])

    def ours(self, number: Number, values: Values) -> float:
        """Predicts a published number."""
        of = self.seconds(number.run, values)
        return of if number.over is None else of / self.seconds(number.over, values)

    def residuals(self, values: Values, numbers: Sequence[int], changed: str | None) -> Floats:
        """See `Problem.residuals`."""
        if changed is None:
            self._base = {}
        of = {
            run: seconds
            for run, seconds in self._base.items()
            if changed is not None and not _uses(run, changed)
        }
        runs = self._runs(numbers)
        of |= self._of_chains([run for run in runs if run not in of], values)
        for run in runs:
            if run not in of:
                of[run] = self.seconds(run, values, quick=True)
        found = []
        for number in numbers:
            if number < len(self.numbers):
                each = self.numbers[number]
                ours = of[each.run] / (1.0 if each.over is None else of[each.over])
                found.append(np.log(ours / each.value))
            else:
                order = self.orders[number - len(self.numbers)]
                found.append(max(float(np.log(of[order.faster] / of[order.slower])), 0.0))
        if changed is None:
            self._base = of
        return np.array(found)

    def _runs(self, numbers: Sequence[int]) -> list[Run]:
        """Runs that numbers and orders are of."""
        runs: dict[Run, None] = {}
        for number in numbers:
            if number < len(self.numbers):
                each = self.numbers[number]
                runs |= dict.fromkeys([each.run] if each.over is None else [each.run, each.over])
            else:
                order = self.orders[number - len(self.numbers)]
                runs |= dict.fromkeys([order.faster, order.slower])
        return [*runs]

    def _of_chains(self, runs: Sequence[Run], values: Values) -> dict[Run, float]:
        """Seconds of chains, those of a model on the same links together."""
        together: dict[tuple[object, ...], list[Run]] = {}
        for run in runs:
            if run in self._partitions:
                together.setdefault((run.model, run.ranks, run.gb_per_s), []).append(run)
        found: dict[Run, float] = {}
        for of in together.values():
            parts = np.stack([self._partitions[run] for run in of])
            seconds = chain_costs(of[0], values).chain_seconds(parts)
            found |= dict(zip(of, seconds.tolist(), strict=True))
        return found


def _uses(run: Run, parameter: str) -> bool:
    """Whether a run's time may depend on a parameter."""
    of, _, _ = parameter.partition("_")
    if of in ("runahead", "tetris", "meta"):
        return run.paper.lower().endswith(of)
    if parameter == "decode_call":
        return run.kind == "decode"
    if parameter == "call":
        return run.kind != "decode"
    return run.paper == "Meta"

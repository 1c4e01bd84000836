"""Context-parallel prefills of Llama 405B, simulated beside what Meta's paper measured.

    python benchmarks/serving/context_parallel.py --output benchmarks/results/serving

Nodes of 8 H100s share each layer (tensor parallelism), and nodes share tokens; products of the MLP
have 8 bits. The plans are those of `distca generate`, their times `distca/simulate/serving`'s. One
efficiency, a share of all rates of the data sheets, is fitted to one published time, and all others
are predicted. Writes `context_parallel.md`, and prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from distca.cost.model_sizes import MODELS
from distca.plan import Mask, Placement, SteppedPlan
from distca.plan.span import Floats
from distca.schedule.serving import (
    STRATEGIES,
    PaperRule,
    Strategy,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.simulate import CLUSTERS, Charges, Cluster
from distca.simulate.serving import (
    NO_OVERHEADS,
    PREFILL_OVERHEADS,
    InferenceCosts,
    Overheads,
    SimulatedSelector,
    simulate_step,
)

LLAMA = MODELS["llama-405b"]
NODE = 8
PEAK, FAST, SLOW = 800.0, 50.0, 12.5
"""The paper's TFLOP/s of a GPU (C / 8), and GB/s of its links by RDMA (GTT) and by TCP (GTI)."""

TOKENS = 128_000
TURNS = {0.025: (1110, 1046), 0.05: (1305, 1302), 0.10: (2081, 2205)}
"""Table 4: milliseconds of pass-KV and pass-Q by share of new tokens, of 128,000 on 4 nodes."""
FITTED_TURN = 0.05
PROMPTS = {1: 42.0, 2: 21.0, 8: 5.85, 16: 3.8}
"""Table 6 and Figures 6 and 8: seconds of 128K tokens, by nodes."""
MILLION, MILLION_SECONDS = 1_000_000, 77.0
"""Figure 8: seconds of 1M tokens on 16 nodes."""
DECODES = {1: 46.26, 2: 60.23, 4: 71.31}
"""Table 7: milliseconds of a decoded token over 128K tokens, one sequence, by nodes."""
OVER_TENSOR_PARALLEL = {2: 0.15, 8: 1.0}
"""Figure 7: how much longer tensor parallelism of all nodes takes, by nodes."""


def nodes(efficiency: float, links: float | None = None, gb_per_s: float = FAST) -> Cluster:
    """The paper's nodes.

    Args:
        efficiency: share of the rates that is reached.
        links: share of the links' speed that is reached; None: the same.
        gb_per_s: speed of a GPU's link between nodes.
    """
    return replace(
        CLUSTERS["dgx-h100"],
        name="the paper's nodes",
        peak_tflops=PEAK,
        attention_tflops=PEAK * efficiency,
        linear_mfu=efficiency,
        network_gb_per_s=gb_per_s,
        charges=Charges(link_efficiency=links or efficiency, copy_efficiency=efficiency),
    )


def costs_of(
    cluster: Cluster, tensor_parallel: int = NODE, overheads: Overheads = NO_OVERHEADS
) -> InferenceCosts:
    """Costs of the model there."""
    return InferenceCosts(LLAMA, cluster, tensor_parallel, mlp_dtype_bytes=1, overheads=overheads)


@cache
def turn(new: int, cached: int, ranks: int, on_one: bool = False) -> tuple[Placement, Placement]:
    """Who holds the cached tokens of a sequence, and who owns the new ones.

    Args:
        new: new tokens.
        cached: tokens of earlier turns.
        ranks: ranks that share them.
        on_one: whether one rank holds all cached tokens; else all hold equally many.
    """
    start, end = np.array([cached]), np.array([cached + new])
    nothing, none = nobody_holds(ranks), np.zeros(1, dtype=np.int64)
    held = shard_evenly(none, start, ranks) if cached else nothing
    if on_one and cached:
        held = Placement(none, none, start, none, ranks)
    return held, shard_evenly(start, end, ranks)


def prefill(new: int, cached: int, ranks: int, strategy: Strategy) -> SteppedPlan:
    """Plan of a prefill."""
    return step_plan(*turn(new, cached, ranks), strategy, Mask(), in_steps=True)


def seconds(costs: InferenceCosts, plan: SteppedPlan) -> float:
    """Seconds to the first token."""
    return simulate_step([plan] * LLAMA.layers, costs).seconds


def fitted(target: float, predicted: Callable[[float], float]) -> float:
    """The efficiency whose prediction is the target: more of it takes less time."""
    low, high = 0.05, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) > target else (low, middle)
    return (low + high) / 2


def thresholds_text() -> list[str]:
    """The paper's thresholds."""
    rule = PaperRule(LLAMA.attention_shape(), 4, NODE * PEAK * 1e12, NODE * FAST * 1e9)
    crossing = rule.smaller_queries / (1 / TOKENS + 1 / rule.tokens_that_hide_queries)
    rows = (
        ("Eq. 1: share of new tokens up to which queries are smaller", 0.125, rule.smaller_queries),
        ("Eq. 2: new tokens from which keys are hidden", 4000, rule.tokens_that_hide_keys),
        ("Eq. 3: all tokens from which queries are hidden", 32000, rule.tokens_that_hide_queries),
        (f"Eq. 5: new tokens of {TOKENS:,} up to which pass-Q is as fast", 3200, crossing),
    )
    return [
        "## Thresholds (Eqs. 1-3 and 5), 4 nodes",
        "",
        f"C = {NODE} x {PEAK:.0f} TFLOP/s and BW = {NODE} x {FAST:.0f} GB/s a node.",
        "",
        "| threshold | published | computed |",
        "| --- | --- | --- |",
        *(f"| {what} | {published:,} | {found:,.6g} |" for what, published, found in rows),
        "",
    ]


def turn_times(
    cluster: Cluster, share: float, overheads: Overheads = NO_OVERHEADS
) -> tuple[float, float]:
    """Milliseconds of pass-KV and pass-Q of Table 4."""
    new = round(TOKENS * share)
    costs = costs_of(cluster, overheads=overheads)
    kv, q = (1e3 * seconds(costs, prefill(new, TOKENS - new, 4, each)) for each in STRATEGIES)
    return kv, q


@cache
def turn_efficiency(overheads: Overheads = NO_OVERHEADS) -> float:
    """The efficiency fitted to the row of 5%: to the mean of its two times."""
    target = sum(TURNS[FITTED_TURN]) / 2
    return fitted(target, lambda each: sum(turn_times(nodes(each), FITTED_TURN, overheads)) / 2)


def turns_text() -> list[str]:
    """Turns over cached tokens, beside Table 4."""
    efficiency, rows, apart = turn_efficiency(), [], {}
    for share, published in TURNS.items():
        found = turn_times(nodes(efficiency), share)
        cells = (
            f"{ours:,.0f} | {theirs:,} | {ours / theirs - 1:+.0%}"
            for ours, theirs in zip(found, published, strict=True)
        )
        ratio, measured = found[1] / found[0], published[1] / published[0]
        apart[share] = f"{abs(ratio / measured - 1):.1%}"
        faster, theirs = (_faster(*each) for each in (found, published))
        rows.append(
            f"| {share:.1%} | {' | '.join(cells)} | {ratio:.3f} | {measured:.3f} | {faster} "
            f"| {theirs} |"
        )
    crossing = _crossing(nodes(efficiency))
    return [
        f"## Turns over cached tokens (Table 4), {TOKENS:,} tokens on 4 nodes",
        "",
        f"Efficiency {efficiency:.3f}, fitted to the row of 5%.",
        "",
        "| new tokens | pass-KV, ms | published | error | pass-Q, ms | published | error "
        "| pass-Q / pass-KV | published | faster here | published |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"The simulated times cross at {crossing:.1%} new tokens, the published ones at 5%. "
        "Simulated times grow almost in proportion to the new tokens, the published ones have a "
        "large constant part, which one efficiency cannot have: so fewer tokens than 5% come out "
        "too fast, and more of them too slow. The ratio of both strategies is "
        + ", ".join(
            f"{each} from the published one at {share:.1%}" for share, each in apart.items()
        )
        + ". At 5% kernels hide the keys here, and do not hide the last outputs' way back. Ours "
        "return step by step, while the next kernels run; the paper's all together at the end.",
        "",
    ]


def _faster(kv: float, q: float) -> str:
    return "pass-KV" if kv < q else "pass-Q"


def _crossing(cluster: Cluster) -> float:
    """Share of new tokens from which pass-KV is faster."""
    low, high = 0.01, 0.125
    while high - low > 0.0005:
        middle = (low + high) / 2
        kv, q = turn_times(cluster, middle)
        low, high = (low, middle) if kv < q else (middle, high)
    return (low + high) / 2


def prompt_seconds(cluster: Cluster, tokens: int, number: int, together: bool = False) -> float:
    """Seconds of a prompt on some nodes.

    Args:
        cluster: the nodes.
        tokens: tokens of the prompt.
        number: number of nodes.
        together: whether all nodes share each layer's weights, rather than tokens.
    """
    if together:
        return seconds(costs_of(cluster, NODE * number), prefill(tokens, 0, 1, "pass-kv"))
    return seconds(costs_of(cluster), prefill(tokens, 0, number, "pass-kv"))


@cache
def prompt_nodes(links: float | None) -> Cluster:
    """Nodes whose efficiency is fitted to 128K tokens on one."""
    return nodes(
        fitted(PROMPTS[1], lambda each: prompt_seconds(nodes(each, links), TOKENS, 1)), links
    )


def prompts_text() -> list[str]:
    """Prompts without cached tokens, beside Figures 7 and 8."""
    rows, longer, million = [], [], []
    named = {"one efficiency": prompt_nodes(None), "links at 86%": prompt_nodes(0.86)}
    for what, cluster in named.items():
        for number in (1, 2, 4, 8, 16):
            shared, together = (
                prompt_seconds(cluster, TOKENS, number, each) for each in (False, True)
            )
            published = PROMPTS.get(number)
            theirs = f"{published:g} | {shared / published - 1:+.0%}" if published else "- | -"
            rows.append(f"| {what} | {number} | {shared:.2f} | {theirs} | {together:.2f} |")
            if number in OVER_TENSOR_PARALLEL:
                longer.append(
                    f"| {what} | {number} | {together / shared - 1:+.0%} "
                    f"| {OVER_TENSOR_PARALLEL[number]:+.0%} |"
                )
        found = prompt_seconds(cluster, MILLION, 16)
        million.append(
            f"| {what} | {found:.1f} | {MILLION_SECONDS:g} | {found / MILLION_SECONDS - 1:+.0%} |"
        )
    shares = " and ".join(f"{each.linear_mfu:.3f}" for each in named.values())
    return [
        "## Prompts of 128,000 tokens, and tensor parallelism of several nodes (Figure 7)",
        "",
        f"Efficiencies {shares}, fitted to 42 s on one node: of all rates, and of all but links, "
        "which reach 86% of their speed (as `distca simulate` charges).",
        "",
        "| rates | nodes | pass-KV, s | published | error | tensor parallelism, s |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "How much longer tensor parallelism takes:",
        "",
        "| rates | nodes | simulated | published |",
        "| --- | --- | --- | --- |",
        *longer,
        "",
        "## 1,000,000 tokens on 16 nodes (Figure 8)",
        "",
        "| rates | simulated, s | published, s | error |",
        "| --- | --- | --- | --- |",
        *million,
        "",
        "Kernels and products have one rate here, whatever their length. The published runs are "
        "faster than that with 1M tokens, where attention is nearly all, and slower with 8,000 "
        "tokens a node, where each layer's calls and the ring's 16 steps have overheads that the "
        "paper does not give.",
        "",
    ]


def decodes_text() -> list[str]:
    """Decoded tokens, beside Table 7."""
    rows, cluster, times = [], prompt_nodes(None), {}
    for number, published in DECODES.items():
        start = np.array([TOKENS])
        held, _ = turn(1, TOKENS, number)
        owner = shard_in_stripes(start, start + 1, np.zeros(1, dtype=np.int64), 1, number)
        found = 1e3 * seconds(costs_of(cluster), step_plan(held, owner, "pass-q", Mask()))
        times[number] = found
        rows.append(f"| {number} | {found:.1f} | {published:.1f} | {found / published - 1:+.0%} |")
    return [
        f"## A decoded token over {TOKENS:,} cached ones (Table 7)",
        "",
        f"The rates of prompts, efficiency {cluster.linear_mfu:.3f}, of memory, too.",
        "",
        "| nodes | simulated, ms | published | error |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        "Our queries go to all nodes at once and their outputs come back at once, a latency each. "
        "The paper's go round a ring, padded to equal numbers, before an all-to-all: two nodes "
        f"add {DECODES[2] - DECODES[1]:.0f} ms there, and {times[2] - times[1]:.0f} ms here, where "
        "no overhead of a call beside "
        f"{1e6 * cluster.launch_seconds:.0f} us and of a message beside "
        f"{1e6 * cluster.network_latency:.0f} us is charged.",
        "",
    ]


def selectors_text() -> list[str]:
    """The rules beside the simulated choice, on the nodes of Table 4."""
    rows = []
    grid = [(new, total - new) for total in (8000, 32000, 128000, 512000) for new in _news(total)]
    for ranks in (4, 8):
        for name, gb_per_s in (("RDMA", FAST), ("TCP", SLOW)):
            for on_one in (False, True):
                times = np.array(
                    [
                        _layer_seconds(gb_per_s, turn(*each, ranks, on_one and each[1] > 0))
                        for each in grid
                    ]
                )
                rules = _rules(ranks, gb_per_s, grid, times)
                for what, choices in rules.items():
                    rows.append(
                        f"| {ranks} | {name} | {'one rank' if on_one else 'all'} | {what} "
                        f"| {_judged(choices, times)} |"
                    )
    return [
        "## What the rules cost beside the simulated choice",
        "",
        f"{len(grid)} prefills each, of 8,000 to 512,000 tokens, 0.1% to all of them new, with "
        "cached tokens on all nodes evenly or on one of them. The simulated choice "
        "(`--selector simulated`) takes the least predicted time, so it is what the others are "
        "held against, with the overheads that it charges, and with efficiency "
        f"{turn_efficiency(PREFILL_OVERHEADS):.3f}, fitted to the row of 5% beside them: *agree* "
        "counts equal choices, *longer* is the core attention's time over "
        "it. The refitted form is fitted on every other prefill and judged on the rest.",
        "",
        "| nodes | network | cached on | rule | agree | longer, mean | longer, most |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _news(total: int) -> list[int]:
    shares = np.geomspace(0.001, 1.0, 16)
    return [max(round(total * share), 1) for share in shares]


def _layer_seconds(gb_per_s: float, held_and_new: tuple[Placement, Placement]) -> list[float]:
    """Seconds of a layer's core attention with each strategy."""
    cluster = nodes(turn_efficiency(PREFILL_OVERHEADS), gb_per_s=gb_per_s)
    costs = costs_of(cluster, overheads=PREFILL_OVERHEADS)
    rates = costs.shape, cluster, costs.links, costs.attention_cost()
    selector = SimulatedSelector(*rates, overheads=costs.overheads)
    return [
        selector.seconds(step_plan(*held_and_new, each, Mask(), in_steps=True))
        for each in STRATEGIES
    ]


@dataclass(frozen=True)
class EmpiricalRule:
    """Appendix D's form: pass-KV where `a log T + b log(T / (T + P)) + c` is positive.

    The published coefficients (-1.059, 1.145, 12.112) choose the same side for all rows of the
    paper's own Table 4, in any logarithm, so the form is fitted to times.

    Attributes:
        of_new: a.
        of_share: b.
        constant: c.
    """

    of_new: float
    of_share: float
    constant: float

    @staticmethod
    def fitted(new: Floats, cached: Floats, pass_kv: Floats, pass_q: Floats) -> EmpiricalRule:
        """Fits the logarithm of how many times as long pass-Q takes, by least squares.

        Args:
            new: new tokens of each prefill, `[prefills]`.
            cached: cached tokens.
            pass_kv: seconds with pass-KV.
            pass_q: seconds with pass-Q.
        """
        columns = np.stack([*_features(new, cached), np.ones(len(new))], axis=1)
        solution = np.linalg.lstsq(columns, np.log(pass_q / pass_kv), rcond=None)[0]
        return EmpiricalRule(*map(float, solution))

    def of_tokens(self, new: int, cached: int) -> Strategy:
        """Returns the choice for one sequence."""
        of_new, of_share = _features(np.array(float(new)), np.array(float(cached)))
        value = self.of_new * of_new + self.of_share * of_share + self.constant
        return "pass-kv" if value > 0 else "pass-q"


def _features(new: Floats, cached: Floats) -> tuple[Floats, Floats]:
    return np.log(new), np.log(new / (new + cached))


def _rules(
    ranks: int, gb_per_s: float, grid: list[tuple[int, int]], times: np.ndarray
) -> dict[str, list[Strategy | None]]:
    """Choices of each rule; None where a prefill is one that it was fitted on."""
    rates = ranks, NODE * PEAK * 1e12, NODE * gb_per_s * 1e9
    first, fifth = (PaperRule(LLAMA.attention_shape(), *rates, each) for each in (False, True))
    new, cached = np.array(grid, dtype=np.float64).T
    half = np.s_[::2]
    form = EmpiricalRule.fitted(new[half], cached[half], times[half, 0], times[half, 1])
    return {
        "Algorithm 1": [first.of_tokens(*each) for each in grid],
        "Algorithm 5": [fifth.of_tokens(*each) for each in grid],
        "Appendix D, refitted": [
            form.of_tokens(*each) if number % 2 else None for number, each in enumerate(grid)
        ],
    }


def _judged(choices: list[Strategy | None], times: np.ndarray) -> str:
    judged = [number for number, each in enumerate(choices) if each is not None]
    taken = np.array([times[n, STRATEGIES.index(choices[n])] for n in judged])  # type: ignore[arg-type]
    longer = taken / times[judged].min(axis=1) - 1
    agree = int((longer == 0).sum())
    return f"{agree} of {len(judged)} | {longer.mean():.1%} | {longer.max():.0%}"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder of the page")
    output = parser.parse_args().output
    lines = [
        "# Context-parallel prefills, simulated beside the paper's times",
        "",
        "By `python benchmarks/serving/context_parallel.py --output DIR`. We measured "
        "nothing here. Llama 405B on nodes of 8 H100s, the MLP in 8 bits. This is an older model: "
        "it charges iterations for their work alone, but for the last section. "
        "[published.md](published.md) charges overheads, too. [claims.md](claims.md) quotes its "
        "figures rather than these.",
        "",
        *thresholds_text(),
        *turns_text(),
        *prompts_text(),
        *decodes_text(),
        *selectors_text(),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    output.mkdir(parents=True, exist_ok=True)
    pages.write(output / "context_parallel.md", text, __file__)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

"""What flags of `distca plan` and `distca simulate` describe for inference: sequences on ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, get_args

import numpy as np

from distca.commands.chosen_sparsity import described_sparsity
from distca.commands.decode_graphs import captured_steps, overheads_of
from distca.commands.described import (
    RUNAHEAD,
    check_selector,
    cluster_of,
    given_shares,
    model_of,
)
from distca.commands.fewest_ranks import AUTO
from distca.commands.served_sparsity import near_to_far
from distca.commands.served_strategy import SEARCHED, SP_TP
from distca.commands.step_limits import MOST_RANKS, check_numbers
from distca.cost.kernel_time import CostModel
from distca.cost.profile import Profile
from distca.plan import Mask, Placement, SteppedPlan
from distca.plan.span import Int64s
from distca.schedule.base import ScheduleConfig
from distca.schedule.serving import (
    STRATEGIES,
    PaperRule,
    Selector,
    SelectorName,
    Sharding,
    Strategy,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.balanced import NAME as TILES
from distca.schedule.serving.balanced import BalancedTiles
from distca.schedule.serving.batches import plan_layers
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.partitions import Chain, Shares, shard_in_chain
from distca.simulate.serving import (
    Captured,
    InferenceCosts,
    SimulatedSelector,
    memory_bytes,
    searched_shares,
    simulate_step,
)

Kind = Literal["prefill", "decode"]

DATA_PARALLEL: Literal["data-parallel"] = "data-parallel"
"""Way of many prompts by which each stays on one rank, which computes its attention, too. Engines
have it as data parallelism, and `tiles` is compared with it."""

StepStrategy = Strategy | NearToFar | BalancedTiles

_TOLERANCE = 0.05
"""Part of the mean by which a rank's attention may exceed it with tiles, as in the engine."""

_MORE_RANKS = 64
"""Numbers of ranks that are tried, beyond those that keys and values alone need."""


@dataclass(frozen=True)
class StepCase:
    """What is planned.

    Attributes:
        kind: prefill or decode.
        held: who holds the cached tokens.
        new: who owns the new ones.
        mask: mask of all layers.
        costs: costs of the model on the cluster.
        cost_model: seconds of tasks.
        captured: what CUDA graphs hold of decode steps.
        near: how keys travel from near to far; None: they don't.
        tiles: how ranks share the attention of prompts that each of them has; None: they don't.
    """

    kind: Kind
    held: Placement
    new: Placement
    mask: Mask
    costs: InferenceCosts
    cost_model: CostModel
    captured: Captured
    near: NearToFar | None = None
    tiles: BalancedTiles | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(np.unique(self.new.document))

    def layers(self, strategy: StepStrategy) -> list[SteppedPlan]:
        layers = self.costs.model.layers
        if isinstance(strategy, str):
            return [self.plan(strategy)] * layers
        plans = plan_layers(self.held, self.new, [self.mask], strategy)
        return [plans.of(layer, self.mask) for layer in range(layers)]

    def plan(self, strategy: StepStrategy) -> SteppedPlan:
        """Returns the plan with a strategy, as `distca generate` makes it, of a layer that drops
        most."""
        if not isinstance(strategy, str):
            found = self.layers(strategy)
            return min(found, key=lambda plan: int(plan.kept_pairs().mean(1).sum()))
        prefill = self.kind == "prefill"
        shape, ranks = self.costs.shape, self.new.world_size
        groups = head_groups(shape.heads, shape.kv_heads, ranks)
        return step_plan(
            self.held, self.new, strategy, self.mask, in_steps=prefill, head_groups=groups
        )

    def chosen(self, args: argparse.Namespace) -> StepStrategy:
        """Returns the strategy that flags ask for."""
        if self.kind == "decode":
            return "pass-q"
        if by_flags := self.near or self.tiles:
            return by_flags
        if args.prefill_strategy in (RUNAHEAD, SP_TP, DATA_PARALLEL):
            return "pass-kv"
        if args.prefill_strategy != "auto":
            return next(each for each in get_args(Strategy) if each == args.prefill_strategy)
        return self.choose(args.selector)

    def choose(self, name: SelectorName) -> Strategy:
        """Returns pass-kv or pass-q: by a rule, or the faster one, all layers simulated."""
        if name == "paper":
            return self.rule.choose(self.held, self.new, self.plan)
        return min(STRATEGIES, key=self._seconds)

    def choose_as_engine(self, name: SelectorName) -> Strategy:
        """Returns what the engine chooses on such a machine: it has no time to simulate more than
        the attention of a layer, without overheads, or anything of a short prefill."""
        if name == "paper":
            return self.choose(name)
        costs = self.costs
        rates = costs.shape, costs.cluster, costs.links, self.cost_model
        selector = SimulatedSelector(*rates, costs.model.layers, self.rule)
        return selector.choose(self.held, self.new, self.plan)

    @property
    def rule(self) -> Selector:
        """The paper's rule, on the described cluster."""
        costs, ranks = self.costs, self.new.world_size
        rate = costs.cluster.attention_tflops * 1e12
        if isinstance(self.cost_model, Profile):
            rate = self.cost_model.flops_per_second
        return PaperRule(costs.shape, ranks, rate, costs.bytes_per_second(ranks))

    def _seconds(self, strategy: Strategy) -> float:
        return simulate_step(self.layers(strategy), self.costs, self.cost_model).seconds


def read_case(args: argparse.Namespace, kind: Kind) -> StepCase:
    """Reads the flags. A prefill of one token over cached ones is a decode step, as in the engine.

    Raises:
        ValueError: they cannot be used.
    """
    ranks, prefills = args.context_parallel_size, kind == "prefill"
    new, starts = check_numbers(args, kind)
    if prefills:
        check_selector(args)
        if (new == 1).all() and starts.all():
            kind = "decode"
    stripe = args.cp_kv_cache_interleave_size
    captured = captured_steps(args, 1 if ranks == AUTO else ranks, len(new))
    costs = InferenceCosts(
        model_of(args),
        cluster_of(args),
        args.tensor_parallel_size,
        args.dtype_bytes,
        args.mlp_dtype_bytes,
        *overheads_of(args, captured),
    )
    if ranks == AUTO:
        return _on_fewest_ranks(args, kind, costs, int((starts + new).sum()))
    numbers, ends = np.arange(len(new), dtype=np.int64), starts + new
    cost_model = _cost_model(args, kind, costs)
    strategy = args.prefill_strategy if kind == "prefill" else None
    near = _near_to_far(args, costs, cost_model, ranks) if prefills else None
    tiles, held = None, _held(starts, args.held, stripe, ranks)
    if prefills and args.prefill_strategy != RUNAHEAD:
        given_shares(args, ranks)
    if kind == "decode":
        near, owners = None, shard_in_stripes(starts, ends, numbers, stripe, ranks)
    elif strategy == RUNAHEAD:
        owners = _chain(args, costs, cost_model)(starts, ends)
    else:
        owners = (near.shard if near else partial(shard_evenly, world_size=ranks))(starts, ends)
    if strategy in (TILES, DATA_PARALLEL):
        homes = _homes(new, ranks)
        owners = Placement(numbers, starts, ends, homes, ranks)
        # After one prefill, as the flag has it, a prompt's rank has its keys.
        if starts.any() and args.held == "evenly":
            cached = np.flatnonzero(starts)
            nothing = np.zeros_like(cached)
            held = Placement(cached, nothing, starts[cached], homes[cached], ranks)
        tiles = _tiles(costs, cost_model) if strategy == TILES else None
    rest = Mask(args.window_left), costs, cost_model, captured
    return StepCase(kind, held, owners, *rest, near, tiles)


def _homes(new: Int64s, ranks: int) -> Int64s:
    """Returns the rank of each prompt, `[sequences]`: as in the engine that which has least to
    compute when the prompt comes."""
    backlog, homes = np.zeros(ranks, dtype=np.int64), np.zeros_like(new)
    for number, tokens in enumerate(new.tolist()):
        homes[number] = backlog.argmin()
        backlog[homes[number]] += tokens
    return homes


def _tiles(costs: InferenceCosts, cost_model: CostModel) -> BalancedTiles:
    """Returns the strategy of tiles, as the engine makes it, on the described cluster."""
    config = ScheduleConfig(_TOLERANCE, costs.shape, cost_model, links=costs.links)
    return BalancedTiles(config, costs.cluster.node_latency + costs.cluster.launch_seconds)


def _on_fewest_ranks(
    args: argparse.Namespace, kind: Kind, costs: InferenceCosts, tokens: int
) -> StepCase:
    """Returns the case on as few ranks as have room for weights, keys, values and buffers, which
    the flags then have.

    Raises:
        ValueError: there is none.
    """
    room = costs.cluster.usable_bytes - costs.state_bytes()
    of_all = tokens * costs.model.layers * costs.shape.kv_row_bytes
    # Whole racks, if there are any.
    of_node = getattr(args, "ranks_per_node", None) or costs.links.ranks_per_node
    racks = getattr(args, "nodes_per_rack", None)
    unit = 1 if racks is None else max(of_node * racks, 1)
    first = int(-(-of_all // room)) if room > 0 else 0
    if first > MOST_RANKS:
        raise ValueError(
            f"--context-parallel-size {AUTO}: keys and values of {tokens:,} tokens need {first:,} "
            f"ranks, and at most {MOST_RANKS:,} are planned: raise --tensor-parallel-size, or give "
            "fewer tokens"
        )
    for number in range(_MORE_RANKS if room > 0 else 0):
        args.context_parallel_size = (-(-first // unit) + number) * unit
        case = read_case(args, kind)
        plans = case.layers(case.chosen(args))
        if memory_bytes(plans, costs).max() <= costs.cluster.usable_bytes:
            return case
    raise ValueError(
        f"--context-parallel-size {AUTO}: weights take {costs.state_bytes() / 1e9:.1f} GB of the "
        f"{costs.cluster.usable_bytes / 1e9:.1f} of a GPU, and no number of ranks has room for the "
        "rest: raise --tensor-parallel-size"
    )


def _near_to_far(
    args: argparse.Namespace, costs: InferenceCosts, cost_model: CostModel, ranks: int
) -> NearToFar | None:
    """How keys travel from near to far, as flags describe it; None: they don't."""
    windows = [args.window_left] * costs.model.layers
    size = args.tensor_parallel_size
    heads = costs.model.kv_heads, size
    chosen = partial(described_sparsity, args, costs, cost_model, max(args.new_tokens))
    near = near_to_far(args, windows, *heads, ranks, costs.links.ranks_per_node, chosen)
    # Shown is the GPU of each rank for which the others wait.
    return near and replace(near, sparsity=near.sparsity.of_busiest(size))


def _chain(args: argparse.Namespace, costs: InferenceCosts, cost_model: CostModel) -> Sharding:
    """Returns the chain of a prefill that `--partition` describes."""
    ranks = args.context_parallel_size
    shares = given_shares(args, ranks)
    if shares is None and args.partition != SEARCHED:
        raise ValueError(
            f"--partition {args.partition}: give even, {SEARCHED}, or a share for each rank, such "
            "as 0.4,0.33,0.27"
        )
    if shares is not None:
        return Chain(ranks, shares)

    @cache
    def searched(start: int, end: int) -> Shares:
        return searched_shares(end - start, costs, cost_model, ranks, start)

    return partial(shard_in_chain, ranks=ranks, shares_of=searched)


def _held(starts: Int64s, how: str, stripe: int, ranks: int) -> Placement:
    nothing, numbers = np.zeros_like(starts), np.arange(len(starts), dtype=np.int64)
    if not starts.any():
        return nobody_holds(ranks)
    if how == "evenly":
        return shard_evenly(nothing, starts, ranks)
    if how == "stripes":
        return shard_in_stripes(nothing, starts, numbers, stripe, ranks)
    having = starts > 0
    first = nothing[having]
    return Placement(numbers[having], first, starts[having], first, ranks)


def _cost_model(args: argparse.Namespace, kind: Kind, costs: InferenceCosts) -> CostModel:
    if args.profile is None:
        return (costs if kind == "prefill" else costs.of_decode()).attention_cost()
    profile = Profile.load(args.profile)
    if profile.shape != costs.shape:
        raise ValueError(
            f"--profile {args.profile} was measured for {profile.shape}, but this is "
            f"{costs.shape}: run `distca profile` with these heads"
        )
    return profile

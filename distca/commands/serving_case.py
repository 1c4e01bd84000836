"""What flags of `distca plan` and `distca simulate` describe for inference: sequences on ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, get_args

import numpy as np

from distca.commands.chosen_sparsity import described_sparsity
from distca.commands.described import (
    RUNAHEAD,
    cluster_of,
    given_shares,
    model_of,
    overheads_of,
)
from distca.commands.fewest_ranks import AUTO
from distca.commands.served_sparsity import near_to_far
from distca.commands.served_strategy import SEARCHED, SP_TP
from distca.cost.kernel_time import CostModel
from distca.cost.profile import Profile
from distca.plan import Mask, Placement, SteppedPlan
from distca.plan.span import Int64s
from distca.schedule.serving import (
    PaperRule,
    Selector,
    Sharding,
    Strategy,
    nobody_holds,
    shard_evenly,
    shard_in_stripes,
    step_plan,
)
from distca.schedule.serving.batches import plan_layers
from distca.schedule.serving.csps.head_scatter import head_groups
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.partitions import Chain, Shares, shard_in_chain
from distca.simulate.serving import (
    InferenceCosts,
    SimulatedSelector,
    memory_bytes,
    searched_shares,
)

Kind = Literal["prefill", "decode"]

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
        near: how keys travel from near to far; None: they don't.
    """

    kind: Kind
    held: Placement
    new: Placement
    mask: Mask
    costs: InferenceCosts
    cost_model: CostModel
    near: NearToFar | None = None

    def layers(self, strategy: Strategy | NearToFar) -> list[SteppedPlan]:
        layers = self.costs.model.layers
        if isinstance(strategy, str):
            return [self.plan(strategy)] * layers
        plans = plan_layers(self.held, self.new, [self.mask], strategy)
        return [plans.of(layer, self.mask) for layer in range(layers)]

    def plan(self, strategy: Strategy | NearToFar) -> SteppedPlan:
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

    def chosen(self, args: argparse.Namespace) -> Strategy | NearToFar:
        """Returns the strategy that flags ask for."""
        if self.near is not None:
            return self.near
        if self.kind == "decode":
            return "pass-q"
        if args.prefill_strategy in (RUNAHEAD, SP_TP):
            return "pass-kv"
        if args.prefill_strategy != "auto":
            return next(each for each in get_args(Strategy) if each == args.prefill_strategy)
        return self.selector(args.selector).choose(self.held, self.new, self.plan)

    def selector(self, name: str) -> Selector:
        """Who chooses, on the described cluster."""
        costs, ranks = self.costs, self.new.world_size
        if name == "paper":
            rate = costs.cluster.attention_tflops * 1e12
            if isinstance(self.cost_model, Profile):
                rate = self.cost_model.flops_per_second
            return PaperRule(costs.shape, ranks, rate, costs.bytes_per_second(ranks))
        rates = costs.shape, costs.cluster, costs.links, self.cost_model
        return SimulatedSelector(*rates, overheads=costs.overheads)


def read_case(args: argparse.Namespace, kind: Kind) -> StepCase:
    """Reads the flags.

    Raises:
        ValueError: they cannot be used.
    """
    ranks = args.context_parallel_size
    for flag, value in (
        ("--context-parallel-size", 1 if ranks == AUTO else ranks),
        ("--tensor-parallel-size", args.tensor_parallel_size),
        ("--cp-kv-cache-interleave-size", args.cp_kv_cache_interleave_size),
        ("--dtype-bytes", args.dtype_bytes),
        ("--sequences", getattr(args, "sequences", 1)),
        ("--new-tokens", min(getattr(args, "new_tokens", [1]))),
    ):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1")
    if min(args.cached_tokens) < 0 or (args.window_left or 0) < 0:
        raise ValueError("--cached-tokens and --window-left must not be negative")
    new = np.array(args.new_tokens if kind == "prefill" else [1] * args.sequences, dtype=np.int64)
    cached = np.array(args.cached_tokens, dtype=np.int64)
    if len(cached) not in (1, len(new)):
        raise ValueError(
            f"--cached-tokens has {len(cached)} numbers for {len(new)} sequences: give one for "
            "all, or one for each"
        )
    starts = np.broadcast_to(cached, new.shape).copy()
    stripe = args.cp_kv_cache_interleave_size
    costs = InferenceCosts(
        model_of(args),
        cluster_of(args),
        args.tensor_parallel_size,
        args.dtype_bytes,
        args.mlp_dtype_bytes,
        *overheads_of(args, ranks),
    )
    if ranks == AUTO:
        return _on_fewest_ranks(args, kind, costs, int((starts + new).sum()))
    numbers = np.arange(len(new), dtype=np.int64)
    cost_model = _cost_model(args, kind, costs)
    near = _near_to_far(args, costs, cost_model, ranks) if kind == "prefill" else None
    if kind == "decode":
        owners = shard_in_stripes(starts, starts + new, numbers, stripe, ranks)
    elif args.prefill_strategy == RUNAHEAD:
        owners = _chain(args, costs, cost_model)(starts, starts + new)
    else:
        given_shares(args, ranks)
        owners = (near.shard if near else partial(shard_evenly, world_size=ranks))(
            starts, starts + new
        )
    return StepCase(
        kind,
        _held(starts, args.held, stripe, ranks),
        owners,
        Mask(args.window_left),
        costs,
        cost_model,
        near,
    )


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

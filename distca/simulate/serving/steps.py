"""A step of a model in inference: the layers of all ranks, and the plan's steps in each of them.

A plan's steps run in the order of `step_program`, as in the runtime: once a step's rows are there,
those of the next leave, the kernels run, and their outputs return while the next step's kernels
run. A layer ends when the last outputs are back and merged. Results are merged into float32 sums as
they come, those of kernels and those that return; keys are read where they arrived. All bytes are
those of `distca.cost.steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.memory import FLOAT32_BYTES, HEADROOM, CoreAttentionMemory
from distca.cost.steps import STEP_SLOTS, step_bytes, step_memory
from distca.cost.volume import AttentionShape, Messages
from distca.plan import Plan, SteppedPlan, Tasks
from distca.plan.span import Floats, Int64s, distinct
from distca.schedule.serving.steps import step_program
from distca.simulate.outcome import Outcome
from distca.simulate.resources import Transfer
from distca.simulate.serving.costs import InferenceCosts
from distca.simulate.serving.overheads import NO_OVERHEADS, Overheads
from distca.simulate.serving.spent import ATTENTION, EXCHANGES, LAUNCHES, ServingResources


@dataclass(frozen=True)
class ExchangeCosts:
    """Costs of one phase of a plan's exchange.

    Attributes:
        transfer: bytes that the links carry.
        packed: bytes of the messages that each server fills, `[servers]`.
        unpacked: bytes that each server takes out of messages, `[servers]`.
    """

    transfer: Transfer
    packed: Int64s
    unpacked: Int64s


@dataclass(frozen=True)
class PlanStepCosts:
    """Costs of one step of a plan in a layer, for each server.

    Attributes:
        kernel_seconds: seconds of the kernels, `[servers]`.
        kernel_calls: kernel calls, one for each task shape, `[servers]`.
        merged: bytes that are read and written to merge what kernels give, `[servers]`.
        merged_returned: bytes likewise for outputs that return to each rank, `[servers]`.
        queries: bytes of the queries that arrive, which are taken out of messages, `[servers]`.
        dispatch: rows that travel to the servers.
        combine: outputs that return.
    """

    kernel_seconds: Floats
    kernel_calls: Int64s
    merged: Int64s
    merged_returned: Int64s
    queries: Int64s
    dispatch: ExchangeCosts
    combine: ExchangeCosts


class AttentionCosts(Protocol):
    """Costs of a layer's core attention, step by step."""

    @property
    def steps(self) -> Sequence[PlanStepCosts]: ...


@dataclass(frozen=True)
class SteppedCosts:
    """Costs of a plan's steps in a layer.

    Attributes:
        stepped: a valid plan.
        shape: heads of one GPU.
        cost_model: seconds of tasks with these heads.
        links: links between the servers.
    """

    stepped: SteppedPlan
    shape: AttentionShape
    cost_model: CostModel
    links: Links

    @cached_property
    def steps(self) -> tuple[PlanStepCosts, ...]:
        plan, found = self.stepped.plan, []
        for number, moved in enumerate(step_bytes(self.stepped, self.shape)):
            sequences = _kernel_sequences(self.stepped.select(self.stepped.step == number))
            servers = plan.world_size
            each = self.cost_model.seconds(sequences.q, sequences.kv, sequences.pairs)
            # Each sequence is one of a head group; a GPU has several groups.
            each = each * sequences.heads / plan.head_groups
            seconds = np.zeros(servers)
            np.add.at(seconds, sequences.server, each)
            shapes = distinct(sequences.server * 2 + sequences.causal) // 2
            merged = sequences.q * sequences.heads
            rows = np.bincount(sequences.server, weights=merged, minlength=servers)
            segments = self.stepped.step_segments[number]
            returning, _ = segments.outputs.moved_per_rank(servers)
            _, arriving = segments.q.moved_per_rank(servers)
            found.append(
                PlanStepCosts(
                    seconds,
                    np.bincount(shapes, minlength=servers),
                    self._merging(rows.astype(np.int64)),
                    self._merging(returning),
                    arriving * self._shape.q_row_bytes,
                    self._exchange(moved.messages["dispatch"]),
                    self._exchange(moved.messages["combine"]),
                )
            )
        return tuple(found)

    @property
    def _shape(self) -> AttentionShape:
        """Heads of a row."""
        return self.shape.scattered(self.stepped.plan.head_groups)

    def _merging(self, rows: Int64s) -> Int64s:
        return merging_bytes(rows, self._shape)

    def _exchange(self, messages: Messages) -> ExchangeCosts:
        return costs_of(messages, self.links)


def merging_bytes(rows: Int64s, shape: AttentionShape) -> Int64s:
    """Returns the bytes that are read and written to merge rows into sums."""
    sums = shape.heads * shape.value_dim * FLOAT32_BYTES + shape.lse_row_bytes
    return rows * (2 * sums + shape.result_row_bytes)


@dataclass(frozen=True)
class _KernelSequences:
    """Sequences of kernel calls: queries over all the keys that they see as full rectangles in a
    step, and tasks that end on the diagonal; where rows may be dropped those of single key-value
    heads. Columns `[sequences]`.

    Attributes:
        heads: share of the heads that a sequence is of.
    """

    server: Int64s
    q: Int64s
    kv: Int64s
    pairs: Int64s
    causal: Int64s
    heads: Floats


def _kernel_sequences(step: SteppedPlan) -> _KernelSequences:
    """Joins the full rectangles of the same queries on a server: their keys are one sequence."""
    plan, tasks, kept = step.plan, step.plan.tasks, step.kept
    if kept is None:
        return _joined(plan, tasks, tasks.q_end - tasks.q_start, tasks.kv_end - tasks.kv_start, 1.0)
    # A rank's own keys are computed as without drops.
    owner = plan.owners(plan.document_offsets[tasks.document] + tasks.kv_start).rank
    at_home, away = tasks[owner == tasks.server], tasks[owner != tasks.server]
    lengths = at_home.q_end - at_home.q_start, at_home.kv_end - at_home.kv_start
    found, heads = [_joined(plan, at_home, *lengths, 1.0)], kept.q.shape[1]
    for q, kv in zip(*(each.T for each in kept.select(owner != tasks.server)), strict=True):
        found.append(_joined(plan, away, q, kv, 1 / heads))
    return _KernelSequences(*map(np.concatenate, zip(*map(_columns, found), strict=True)))


def _columns(of: _KernelSequences) -> tuple[Int64s | Floats, ...]:
    return of.server, of.q, of.kv, of.pairs, of.causal, of.heads


def _joined(plan: Plan, tasks: Tasks, q: Int64s, kv: Int64s, share: float) -> _KernelSequences:
    """Joins tasks of that many queries and keys, in a share of the heads."""
    # To a single query its own key is one of a full rectangle.
    causal = (tasks.ends_on_diagonal & (tasks.q_end - tasks.q_start > 1)).astype(np.int64)
    # A task on the diagonal stays alone, by its first key.
    columns = [tasks.server, tasks.document, tasks.q_start, tasks.q_end]
    columns += [causal, causal * tasks.kv_start, q]
    diagonal = plan.mask.pairs(tasks.q_start, tasks.q_end, tasks.kv_start, tasks.kv_end)
    order = np.lexsort(columns[::-1])
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = np.any([np.diff(column[order]) != 0 for column in columns], axis=0)
    first, groups = np.flatnonzero(opens), np.cumsum(opens) - 1

    def summed(values: Int64s) -> Int64s:
        sums = np.zeros(len(first), dtype=np.int64)
        np.add.at(sums, groups, values[order])
        return sums

    one = order[first]
    return _KernelSequences(
        tasks.server[one],
        q[one],
        summed(kv),
        summed(np.where(tasks.ends_on_diagonal, diagonal, q * kv)),
        causal[one],
        np.full(len(one), share),
    )


def attend(
    resources: ServingResources,
    costs: AttentionCosts,
    layer: int = 0,
    overheads: Overheads = NO_OVERHEADS,
) -> None:
    """Runs the core attention of a layer."""
    launch, steps = resources.cluster.launch_seconds, costs.steps
    arrives: dict[int, Floats] = {}
    returns: dict[int, Floats] = {}
    for action, number in step_program(len(steps)):
        step, labels = steps[number], {"layer": layer, "step": number}
        if action == "dispatch":
            arrives[number] = _start(resources, step.dispatch, "dispatch", labels, overheads)
        elif action == "receive":
            resources.wait(arrives.pop(number), "wait for dispatch", **labels)
            resources.spend({EXCHANGES: resources.copy_seconds(step.queries)})
        elif action == "compute":
            come = np.where(step.dispatch.unpacked > 0, overheads.step_seconds, 0.0)
            launches = launch * step.kernel_calls.astype(np.float64) + come
            kernels = step.kernel_seconds, resources.traffic_seconds(step.merged)
            spent = {ATTENTION: kernels[0] + kernels[1], LAUNCHES: launches}
            resources.spend(spent, "core attention", "kernels", **labels)
            returns[number] = _start(resources, step.combine, "combine", labels, overheads)
        else:
            resources.wait(returns.pop(number), "wait for combine", **labels)
            resources.spend({ATTENTION: resources.traffic_seconds(step.merged_returned)})


def costs_of(messages: Messages, links: Links) -> ExchangeCosts:
    """Returns the costs of one phase of an exchange."""
    transfer = Transfer.of_messages(messages, links)
    return ExchangeCosts(transfer, messages.sent(), messages.received())


def _start(
    resources: ServingResources,
    moved: ExchangeCosts,
    phase: str,
    labels: dict[str, int],
    overheads: Overheads,
) -> Floats:
    """Gathers rows and starts an exchange; returns when it is over."""
    takes_part = (moved.packed > 0) | (moved.unpacked > 0)
    spent = {
        EXCHANGES: resources.copy_seconds(moved.packed),
        LAUNCHES: np.where(takes_part, resources.cluster.launch_seconds, 0.0),
    }
    resources.spend(spent, phase, "exchange", **labels)
    late = np.where(takes_part, overheads.exchange_seconds, 0.0)
    return resources.exchange(moved.transfer, phase) + late


BALANCING = "cache balancing"
"""Phase of rows that change their rank."""


def simulate_step(
    plans: Sequence[SteppedPlan],
    costs: InferenceCosts,
    cost_model: CostModel | None = None,
    recording: bool = False,
    moves: Messages | None = None,
) -> Outcome:
    """Simulates a step of the model: new tokens of some sequences through all layers.

    Rows of earlier tokens may change their ranks with it. Those of a layer leave while the layer
    before is computed, and are waited for before its own attention, as
    `distca.runtime.serving.kv_moves` does it.

    Args:
        plans: plan of each layer, over the same tokens; layers with one mask share theirs.
        costs: costs of the layers.
        cost_model: seconds of tasks with the heads of a GPU; None: the cluster's own.
        recording: keep spans for `save_trace`.
        moves: bytes of keys and values that change their rank in each layer, or None.

    Returns:
        The step until the logits of each sequence's last token; its memory is that of weights,
        keys, values and core attention's buffers.
    """
    cluster, shape, first = costs.cluster, costs.shape, plans[0].plan
    ranks = first.world_size
    own = first.own_tokens_per_rank() // first.head_groups
    last = first.placement.end == first.lengths[first.placement.document]
    answered = np.bincount(first.placement.rank[last], minlength=ranks) // first.head_groups
    if own.sum() == answered.sum():
        costs = costs.of_decode()
    model = cost_model or costs.attention_cost()
    of_plan = {id(plan): SteppedCosts(plan, shape, model, costs.links) for plan in plans}
    resources = ServingResources(ranks, cluster, np.ones(ranks), recording)
    run_layers(resources, costs, own, [[of_plan[id(plan)]] for plan in plans], answered, moves)
    return Outcome(
        seconds=float(resources.clock.max()),
        tokens=int(own.sum()),
        gpus=ranks * costs.tensor_parallel,
        memory_bytes=memory_bytes(plans, costs),
        usable_bytes=cluster.usable_bytes,
        computed=resources.computed,
        exposed=resources.exposed,
        gathering=np.zeros(ranks),
        bytes_sent=resources.sent,
        spans=tuple(resources.spans),
        spent=resources.of_last(),
    )


def run_layers(
    resources: ServingResources,
    costs: InferenceCosts,
    own: Int64s,
    layers: Sequence[Sequence[AttentionCosts]],
    answered: Int64s,
    moves: Messages | None = None,
) -> None:
    """Runs all layers and the output layer.

    Args:
        resources: state of the ranks.
        costs: costs of the layers.
        own: tokens of each rank, `[ranks]`.
        layers: for each layer costs of its attention, part by part.
        answered: tokens of each rank whose logits are computed, `[ranks]`.
        moves: bytes of keys and values that change their rank in each layer, or None.
    """
    pre, post, overheads = costs.pre_parts(own), costs.post_parts(own), costs.overheads
    resources.wait_for_host(resources.clock + overheads.iteration_seconds)
    launched = resources.clock
    moved = None if moves is None else costs_of(moves, costs.links)
    arrives = None
    if moved is not None:
        arrives = _start(resources, moved, BALANCING, {"layer": 0}, overheads)
    for layer, parts in enumerate(layers):
        resources.spend(pre, "before core attention", "ticks", layer=layer)
        if moved is not None and arrives is not None:
            following = None
            if layer + 1 < len(layers):
                labels = {"layer": layer + 1}
                following = _start(resources, moved, BALANCING, labels, overheads)
            resources.wait(arrives, "wait for moved rows", layer=layer)
            resources.spend({EXCHANGES: resources.copy_seconds(moved.unpacked)})
            arrives = following
        for part in parts:
            attend(resources, part, layer, overheads)
        resources.spend(post, "after core attention", "ticks", layer=layer)
        launched = launched + costs.launch_seconds()
        resources.wait_for_host(launched)
    resources.spend(costs.head_parts(answered), "output layer", "ticks")


def memory_bytes(plans: Sequence[SteppedPlan], costs: InferenceCosts) -> Floats:
    """Returns the bytes of each rank's GPUs: weights, keys and values of all layers, and buffers.

    Args:
        plans: plan of each layer.
        costs: costs of the layers.
    """
    shape, ranks = costs.shape, plans[0].plan.world_size
    layers = [each.plan for each in plans]
    rows = np.sum([plan.placement.tokens_per_rank() // plan.head_groups for plan in layers], axis=0)
    buffers = CoreAttentionMemory()
    for plan in {id(plan): plan for plan in plans}.values():
        buffers = buffers.union(step_memory(plan, shape))
    reserved = buffers.with_headroom(HEADROOM).total(STEP_SLOTS)
    result: Floats = rows * shape.kv_row_bytes + np.full(ranks, costs.state_bytes() + reserved)
    return result

"""An iteration with `--distca`: the runtime's ticks and plans, event by event.

The order of events is the runtime's on every rank, also where a stage has nothing to run: both
follow `distca.schedule.program`. The head
runs once for both nano-batches. Rows are copied before and after exchanges, and around kernels
(`copies.py`), at the rate of memory. A tick ends with messages between stages; nothing else makes
ranks wait for each other but the exchanges, and the reduction of gradients at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.memory import FLOAT32_BYTES
from distca.cost.volume import (
    BACKWARD_PHASES,
    FORWARD_PHASES,
    SHARED_HEADS,
    BackwardInputs,
    Messages,
)
from distca.plan.span import Floats
from distca.schedule import Pass, PlannedGlobalBatch, PlannedTick, Tick
from distca.schedule.program import NANO_BATCHES, Ablation, LayerGroup, Program, tick_program
from distca.schedule.training.peak_memory import StepMemory
from distca.simulate.charges import exposed_reduction
from distca.simulate.costs import ModelCosts
from distca.simulate.outcome import Outcome
from distca.simulate.plan_costs import PlanCosts, TimedExchange
from distca.simulate.resources import Resources, Transfer
from distca.simulate.shared_heads import SharedHeadCosts

_PHASES: dict[Pass, tuple[str, str]] = {"forward": FORWARD_PHASES, "backward": BACKWARD_PHASES}
_DEDICATED = -1
"""Stage of a dedicated server: the last element of what each stage has, which is added for it."""
_SUFFIX: dict[Pass, str] = {"forward": "", "backward": " backward"}


def simulate_ticks(
    planned: PlannedGlobalBatch,
    costs: ModelCosts,
    *,
    cost_model: CostModel | None = None,
    ablation: Ablation = "none",
    speeds: Floats | None = None,
    recording: bool = False,
    backward: BackwardInputs = "resend",
) -> Outcome:
    """Simulates a global batch.

    Dedicated servers, which hold no model, have the numbers after those of all stages.

    Args:
        planned: ticks and plans of the batch.
        costs: costs of the model on the cluster.
        cost_model: forward seconds of tasks; None: the cluster's kernel.
        ablation: value of `--distca-ablation`: wait for every exchange where it starts, or send one
            byte a message.
        speeds: relative speed of each server's compute, `[servers]`; None: all are equal.
        recording: keep spans for a trace.
        backward: value of `--distca-backward`.

    Raises:
        ValueError: model chunks do not divide the layers, or dedicated servers are to keep inputs.
    """
    run = _Run(planned, costs, cost_model, ablation, speeds, recording, backward)
    return run.outcome()


def seconds_of_ticks(
    planned: PlannedGlobalBatch, costs: ModelCosts, *, backward: BackwardInputs = "resend"
) -> float:
    """Simulates ticks of a global batch; returns the seconds until the last rank has done them.

    Args:
        planned: some ticks with their plans, forward or backward ones in any order.
        costs: costs of the model on the cluster.
        backward: value of `--distca-backward`.

    Raises:
        ValueError: as `simulate_ticks`.
    """
    return _Run(planned, costs, None, "none", None, False, backward).seconds_of_ticks()


class _Run:
    """Simulated iteration: the ranks' resources, and the nano-batches under way."""

    def __init__(
        self,
        planned: PlannedGlobalBatch,
        costs: ModelCosts,
        cost_model: CostModel | None,
        ablation: Ablation,
        speeds: Floats | None,
        recording: bool,
        backward: BackwardInputs,
    ) -> None:
        schedule = planned.schedule
        parts = schedule.stages * schedule.chunks
        if costs.model.layers % parts:
            raise ValueError(f"{parts} model chunks do not divide {costs.model.layers} layers")
        if backward == "keep" and planned.ticks[0].plans[0].world_size > planned.servers.size:
            raise ValueError("dedicated servers keep no inputs: simulate with backward='resend'")
        self._planned, self._costs = planned, costs
        self._layers = costs.model.layers // parts
        self._servers = planned.servers
        ranks = planned.ticks[0].plans[0].world_size
        self._stage = np.full(ranks, _DEDICATED, dtype=np.int64)
        for stage, members in enumerate(planned.servers):
            self._stage[members] = stage
        self._cost_model = cost_model or costs.cluster.attention_cost(costs.shape)
        self._links = costs.cluster.links(costs.server_gpus)
        # Ranks of a server. Each has an equal part of its tokens.
        self._ranks = costs.head_parallel
        self._shared_heads = SharedHeadCosts.of(costs)
        # Servers that share experts, which wait for each other in every layer.
        sharing = costs.servers_with_all_experts(self._servers.shape[1])
        self._sharing = None if sharing == 1 else self._servers.reshape(-1, sharing)
        self._ablation, self._backward = ablation, backward
        self._shape = costs.comm_shape
        self._resources = Resources(
            ranks, costs.cluster, np.ones(ranks) if speeds is None else speeds, recording
        )
        self._plan_costs: dict[int, list[PlanCosts]] = {}
        self._borrow_seconds: dict[tuple[int, Pass], Floats] = {}
        # Arrival times of what was prefetched for each nano-batch's backward pass.
        self._prefetched: dict[int, Floats] = {}
        # Arrival times of the inputs of each nano-batch's kernels.
        self._arrives: dict[int, Floats] = {}
        # When each rank's last backward pass began, and how long its ports had been held by then.
        self._last_backward, self._held = np.zeros(ranks), np.zeros((4, ranks))

    def outcome(self) -> Outcome:
        """Runs all ticks and the reduction of gradients."""
        tokens = self._run_ticks()
        resources, costs = self._resources, self._costs
        clock = resources.clock.copy()
        self._reduce_gradients()
        return Outcome(
            float(resources.clock.max()),
            tokens,
            resources.ranks * costs.server_gpus,
            self._step_memory().peak(self._planned, self._costs_of),
            costs.cluster.usable_bytes,
            resources.computed,
            resources.exposed,
            np.zeros(resources.ranks),
            resources.sent,
            tuple(resources.spans),
            clock,
            resources.between,
        )

    def seconds_of_ticks(self) -> float:
        """Runs all ticks alone."""
        self._run_ticks()
        return float(self._resources.clock.max())

    def _run_ticks(self) -> int:
        """Runs all ticks; returns the tokens that the first stage takes in."""
        resources, planned, tokens = self._resources, self._planned, 0
        first = planned.servers[0]
        for number, (planned_tick, goes_back) in enumerate(
            zip(planned.ticks, planned.schedule.goes_back, strict=True)
        ):
            tick = planned_tick.tick
            resources.labels = {"tick": number, "phase": tick.direction}
            start, held = resources.clock.copy(), resources.held.copy()
            nano_costs = self._costs_of(planned_tick)
            self._run_layers(tick, nano_costs, goes_back)
            if tick.direction == "forward" and tick.work[0] is not None and not tick.work[0].chunk:
                tokens += sum(
                    int(each.own_tokens[first].sum()) for each in self._of_one_mask(nano_costs)
                )
            self._record_tick(tick, start)
            if tick.direction == "backward":
                runs = np.array([*(work is not None for work in tick.work), False])[self._stage]
                self._last_backward = np.where(runs, start, self._last_backward)
                self._held = np.where(runs, held, self._held)
            self._pass_on(tick, nano_costs)
        resources.labels = {}
        return tokens

    def _step_memory(self) -> StepMemory:
        return StepMemory(self._costs, self._shape, self._backward, self._ranks)

    def _costs_of(self, tick: PlannedTick) -> list[PlanCosts]:
        if tick.number not in self._plan_costs:
            self._plan_costs[tick.number] = [
                PlanCosts(
                    plan,
                    self._shape,
                    self._backward,
                    self._cost_model,
                    self._links,
                    self._costs.cluster,
                    self._ablation == "signal",
                )
                for plan in tick.plans
            ]
        return self._plan_costs[tick.number]

    def _of_one_mask(self, nano_costs: list[PlanCosts]) -> Sequence[PlanCosts]:
        """Costs of each nano-batch, which has the same tokens with all masks."""
        return self._planned.masks.select(nano_costs, 0)

    def _tokens_of_a_rank(self, nano_costs: list[PlanCosts]) -> Floats:
        """Returns the tokens of each server's ranks, `[servers]`."""
        tokens = np.sum([each.own_tokens for each in self._of_one_mask(nano_costs)], axis=0)
        result: Floats = tokens / self._ranks
        return result

    def _run_layers(self, tick: Tick, nano_costs: list[PlanCosts], goes_back: bool) -> None:
        """Runs a tick's passes: all layers of a chunk, for all nano-batches.

        Args:
            tick: work of all stages.
            nano_costs: costs of each nano-batch's plan, with each mask in turn.
            goes_back: whether the next tick takes back the same micro-batches.
        """
        resources, forward = self._resources, tick.direction == "forward"
        count = len(self._of_one_mask(nano_costs))
        head_seconds = self._head_seconds(tick, nano_costs)
        directions: tuple[Pass, ...] = ("forward", "backward")
        linear = {each: self._linear_seconds(each, nano_costs) for each in directions}
        alone = self._costs.recompute == "full" and not forward
        first, last = (0, self._layers - 1) if forward else (self._layers - 1, 0)
        names = NANO_BATCHES if count > 1 else (None,)
        returns: dict[int, Floats] = {}
        if not forward:
            resources.compute(head_seconds)
        for event in self._program(tick, nano_costs, goes_back):
            n, layer = event.nano_batch, event.layer
            plan = self._planned.masks.select(nano_costs, layer)[n]
            labels = {"layer": layer, "nano_batch": names[n]}
            before, after = linear[event.direction]
            if event.step == "prefetch":
                self._prefetched[n] = self._dispatch(plan, "backward", labels)
            elif event.step == "dispatch":
                begins = alone or layer == first
                if self._sharing is not None and not (begins and event.direction == "forward"):
                    resources.meet(self._sharing)
                resources.compute(before[n] if begins else before[n] + after[n])
                resources.compute(self._borrowing(plan, event.direction))
                self._count_shared_heads(plan, event.direction)
                if n in self._prefetched:
                    self._arrives[n] = self._prefetched.pop(n)
                else:
                    self._arrives[n] = self._dispatch(plan, event.direction, labels)
            elif event.step == "compute":
                arrived = self._arrives.pop(n)
                returns[n] = self._compute(plan, event.direction, arrived, labels)
            else:
                self._combine(plan, event.direction, returns.pop(n), labels)
                if alone or layer == last:
                    if self._sharing is not None and event.direction == "forward":
                        resources.meet(self._sharing)
                    resources.compute(after[n])
        if forward:
            resources.compute(head_seconds)

    def _linear_seconds(
        self, direction: Pass, nano_costs: list[PlanCosts]
    ) -> tuple[list[Floats], list[Floats]]:
        """Returns the seconds of each nano-batch's linear layers, before and after a pass of core
        attention."""
        number = 0 if direction == "forward" else 1
        pre, post = self._costs.pre_seconds()[number], self._costs.post_seconds()[number]
        tokens = [each.own_tokens / self._ranks for each in self._of_one_mask(nano_costs)]
        of_pre, of_post = (
            self._costs.pre_launch_seconds()[number],
            self._costs.post_launch_seconds()[number],
        )
        # All-to-alls of heads are right before and after core attention.
        pre, of_pre = pre + self._shared_heads.seconds, of_pre + self._shared_heads.launch_seconds
        pre_seconds = [pre * own + of_pre * (own > 0) for own in tokens]
        post_seconds = [post * own + of_post * (own > 0) for own in tokens]
        return (pre_seconds, post_seconds) if number == 0 else (post_seconds, pre_seconds)

    def _head_seconds(self, tick: Tick, nano_costs: list[PlanCosts]) -> Floats:
        """Returns the seconds of the output layer for all nano-batches of a tick, `[ranks]`."""
        number = 0 if tick.direction == "forward" else 1
        seconds, launch = (
            self._costs.head_seconds()[number],
            self._costs.head_launch_seconds()[number],
        )
        tokens = self._tokens_of_a_rank(nano_costs)
        result: Floats = (tokens * seconds + launch * (tokens > 0)) * self._runs_head(tick)
        return result

    def _program(self, tick: Tick, nano_costs: list[PlanCosts], goes_back: bool) -> Program:
        """Returns the order of events of a tick."""
        at_home = self._planned.schedule.stages == 1 and not any(p.returns for p in nano_costs)
        layers = [LayerGroup(range(self._layers), recomputed=False)]
        if self._costs.recompute == "full":
            layers = [LayerGroup(range(n, n + 1), recomputed=True) for n in range(self._layers)]
        count = len(self._of_one_mask(nano_costs))
        return tick_program(tick.direction, layers, count, at_home, goes_back)

    def _dispatch(self, plan: PlanCosts, direction: Pass, labels: Mapping[str, object]) -> Floats:
        """Starts to send the kernels' inputs; returns when they arrive."""
        exchange, suffix = plan.of(direction).dispatch, _SUFFIX[direction]
        return self._start(exchange, _PHASES[direction][0], f"dispatch{suffix}", labels)

    def _count_shared_heads(self, plan: PlanCosts, direction: Pass) -> None:
        """Counts the bytes that ranks send because they share heads."""
        if self._ranks > 1:
            phase, sent = SHARED_HEADS[direction], self._resources.sent
            moved = plan.own_tokens // self._ranks * self._shared_heads.sent
            sent[phase] = sent.get(phase, 0) + moved

    def _borrowing(self, plan: PlanCosts, direction: Pass) -> Floats:
        """Returns the seconds in which ranks borrow keys, or add up their gradients, `[ranks]`.

        Borrowed rows are put together with the rank's own ones. Gradients of a chain's rows are
        added up in float32; those of ping's rows, which are gathered to be lent, by autograd, over
        all rows of ping, about as many as pong's.
        """
        key = id(plan), direction
        if key in self._borrow_seconds:
            return self._borrow_seconds[key]
        borrowed = plan.borrowed_bytes
        own = np.where(borrowed > 0, plan.own_tokens * plan.lent_row_bytes, 0)
        if self._planned.schedule.chain == 1:
            moved = {"forward": 2 * own + 4 * borrowed, "backward": 4 * own + 3 * borrowed}
        else:
            sums = 2 * FLOAT32_BYTES // self._costs.dtype_bytes
            moved = {"forward": 2 * (own + borrowed), "backward": (1 + sums) * borrowed}
        seconds = self._costs.cluster.traffic_seconds(moved[direction])
        self._borrow_seconds[key] = seconds
        return seconds

    def _compute(
        self, plan: PlanCosts, direction: Pass, over: Floats, labels: Mapping[str, object]
    ) -> Floats:
        """Runs the kernels once inputs are there, and starts to return their outputs."""
        resources, costs, suffix = self._resources, plan.of(direction), _SUFFIX[direction]
        resources.wait(over, f"wait for dispatch{suffix}", **labels)
        resources.compute(costs.dispatch.unpack_seconds)
        resources.compute(costs.kernel_seconds, f"core attention{suffix}", "kernels", **labels)
        return self._start(costs.combine, _PHASES[direction][1], f"combine{suffix}", labels)

    def _start(
        self, exchange: TimedExchange, phase: str, name: str, labels: Mapping[str, object]
    ) -> Floats:
        """Gathers rows and starts an exchange; returns when it is over."""
        resources = self._resources
        resources.compute(exchange.pack_seconds, name, "exchange", **labels)
        by_copy_engines = self._costs.cluster.charges.copy_engines
        over = resources.exchange(exchange.transfer, phase, by_copy_engines)
        if self._ablation == "single-stream":
            resources.wait(over, f"wait for {name}", **labels)
        return over

    def _combine(
        self,
        plan: PlanCosts,
        direction: Pass,
        over: Floats,
        labels: Mapping[str, object],
    ) -> None:
        resources, combine = self._resources, plan.of(direction).combine
        resources.wait(over, f"wait for combine{_SUFFIX[direction]}", **labels)
        resources.compute(combine.unpack_seconds)

    def _runs_head(self, tick: Tick) -> Floats:
        """1.0 for the ranks of a last stage that runs its last chunk, `[ranks]`."""
        schedule = self._planned.schedule
        work = tick.work[-1]
        is_last = work is not None and work.chunk == schedule.chunks - 1
        return np.where(is_last & (self._stage == schedule.stages - 1), 1.0, 0.0)

    def _pass_on(self, tick: Tick, nano_costs: list[PlanCosts]) -> None:
        """Sends activations or gradients to the next stages, which both sides wait for."""
        schedule, resources = self._planned.schedule, self._resources
        stages, forward = schedule.stages, tick.direction == "forward"
        if stages == 1:
            return
        row = self._costs.model.hidden_size * self._costs.dtype_bytes // self._costs.tensor_parallel
        tokens = self._tokens_of_a_rank(nano_costs)
        source, destination = [], []
        for stage, work in enumerate(tick.work):
            if work is None:
                continue
            ends_stage, ends_chunk = (stages - 1, schedule.chunks - 1) if forward else (0, 0)
            if stage == ends_stage and work.chunk == ends_chunk:
                continue
            mine = self._servers[stage]
            theirs = self._servers[(stage + (1 if forward else -1)) % stages]
            source.append(mine)
            destination.append(theirs)
        if not source:
            return
        senders = np.concatenate(source)
        sizes = (tokens[senders] * row).astype(np.int64)
        messages = Messages(senders, np.concatenate(destination), sizes, resources.ranks)
        start = resources.clock.copy()
        exposed = resources.exposed.copy()
        resources.wait(resources.exchange(Transfer.of_messages(messages, self._links), "pass on"))
        resources.exposed = exposed
        resources.record_since("pass on", "pipeline", start)

    def _record_tick(self, tick: Tick, start: Floats) -> None:
        resources = self._resources
        if not resources.recording:
            return
        chunks = self._planned.schedule.chunks
        for stage, work in enumerate(tick.work):
            title = "serve" if work is None else f"micro-batch {work.micro_batch}"
            title += f" chunk {work.chunk}" if work is not None and chunks > 1 else ""
            began = np.where(self._stage == stage, start, resources.clock)
            resources.record_since(f"{tick.direction}: {title}", "ticks", began)

    def _reduce_gradients(self) -> None:
        """Reduces gradients in each stage, as far as possible behind its last backward pass."""
        resources, costs = self._resources, self._costs
        replicas = self._servers.shape[1] * self._ranks
        exposed = []
        for stage, members in enumerate(self._servers):
            needed = costs.gradient_seconds(stage, len(self._servers), replicas)
            began = float(self._last_backward[members].max())
            hidden = max(float(resources.clock[members].max()) - began, 0.0)
            others = float((resources.held - self._held)[:, members].max())
            exposed.append(exposed_reduction(hidden, needed, others, costs.cluster.charges))
        resources.barrier(list(self._servers), exposed)

"""An iteration with `--distca`: the runtime's ticks and plans, event by event.

The order of events on every rank is the runtime's (`megatron_patches/ping_pong.py`): in each layer
both nano-batches run their context-independent part and start to send, then both run kernels and
start to return, one head group after the other. The backward pass is the exact mirror. Where all
queries stay at home and every rank runs in every tick, a nano-batch goes on at once when its
kernels have run, and keys and values are sent ahead for the backward pass. The head runs once for
both nano-batches. Ranks whose stage has nothing to run serve in the same order. Rows are copied
before and after exchanges, and around kernels (`copies.py`), at the rate of memory. A tick ends
with messages between stages; nothing else makes ranks wait for each other but the exchanges, and
the reduction of gradients at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from distca.cost.memory import HEADROOM, CoreAttentionMemory
from distca.cost.model import CostModel
from distca.cost.volume import BACKWARD_PHASES, FORWARD_PHASES
from distca.plan import Plan
from distca.plan.span import Floats
from distca.schedule import Phase, Tick
from distca.simulate.batches import PlannedBatch
from distca.simulate.costs import ModelCosts
from distca.simulate.outcome import Outcome
from distca.simulate.plan_costs import PlanCosts
from distca.simulate.resources import Resources, Transfer

Ablation = Literal["none", "single-stream", "signal"]
NANO_BATCHES = ("ping", "pong")


def simulate_ticks(
    planned: PlannedBatch,
    costs: ModelCosts,
    *,
    cost_model: CostModel | None = None,
    ablation: Ablation = "none",
    speeds: Floats | None = None,
    recording: bool = False,
    head_groups: int = 1,
) -> Outcome:
    """Runs a global batch.

    Args:
        planned: its ticks and plans.
        costs: of the model on the cluster.
        cost_model: forward seconds of tasks; None: the cluster's kernel.
        ablation: `--distca-ablation`: wait for every exchange where it starts, or send one byte a
            message.
        speeds: of each server's compute, `[servers]`; None: all alike.
        recording: keep spans for a trace.
        head_groups: `--distca-head-groups`.

    Raises:
        ValueError: the stages' layers don't divide, or the key-value heads.
    """
    run = _Run(planned, costs, cost_model, ablation, speeds, recording, head_groups)
    return run.outcome()


class _Run:
    def __init__(
        self,
        planned: PlannedBatch,
        costs: ModelCosts,
        cost_model: CostModel | None,
        ablation: Ablation,
        speeds: Floats | None,
        recording: bool,
        head_groups: int,
    ) -> None:
        schedule = planned.schedule
        parts = schedule.stages * schedule.chunks
        if costs.model.layers % parts:
            raise ValueError(f"{parts} model chunks do not divide {costs.model.layers} layers")
        self._planned, self._costs = planned, costs
        self._layers = costs.model.layers // parts
        self._servers = planned.servers
        ranks = planned.servers.size
        self._stage = np.empty(ranks, dtype=np.int64)
        for stage, members in enumerate(planned.servers):
            self._stage[members] = stage
        self._cost_model = cost_model or costs.cluster.attention_cost(costs.shape)
        self._links = costs.cluster.links(costs.tensor_parallel)
        self._ablation, self._head_groups = ablation, head_groups
        self._shape = costs.shape.head_group(head_groups)
        self._groups = [{"head_group": n} for n in range(head_groups)] if head_groups > 1 else [{}]
        self._resources = Resources(
            ranks, costs.cluster, np.ones(ranks) if speeds is None else speeds, recording
        )
        self._of_plans: dict[int, list[PlanCosts]] = {}
        # What was sent ahead for the backward pass of each nano-batch of the micro-batch that runs.
        self._ahead: dict[str | None, list[Floats]] = {}
        self._last_backward = np.zeros(ranks)

    def outcome(self) -> Outcome:
        """Runs all ticks."""
        at, planned, tokens = self._resources, self._planned, 0
        first = planned.servers[0]
        for number, (tick, plans) in enumerate(planned.ticks):
            at.labels = {"tick": number, "phase": tick.phase}
            start = at.clock.copy()
            nano = self._costs_of(plans)
            self._run_layers(tick, nano)
            if tick.phase == "forward" and tick.work[0] is not None and not tick.work[0].chunk:
                tokens += sum(int(each.own_tokens[first].sum()) for each in nano)
            self._record_tick(tick, start)
            if tick.phase == "backward":
                runs = np.array([work is not None for work in tick.work])[self._stage]
                self._last_backward = np.where(runs, start, self._last_backward)
            self._pass_on(tick, nano)
        at.labels = {}
        self._reduce_gradients()
        costs = self._costs
        return Outcome(
            float(at.clock.max()),
            tokens,
            at.ranks * costs.tensor_parallel,
            self._memory(),
            costs.cluster.usable_bytes,
            at.computed,
            at.exposed,
            np.zeros(at.ranks),
            at.sent,
            tuple(at.spans),
        )

    def _costs_of(self, plans: tuple[Plan, ...]) -> list[PlanCosts]:
        if id(plans) not in self._of_plans:
            self._of_plans[id(plans)] = [
                PlanCosts(
                    plan,
                    self._shape,
                    self._head_groups,
                    self._cost_model,
                    self._links,
                    self._ablation == "signal",
                )
                for plan in plans
            ]
        return self._of_plans[id(plans)]

    def _run_layers(self, tick: Tick, nano: list[PlanCosts]) -> None:
        """A tick's passes: all layers of a chunk, of both nano-batches."""
        at, costs, forward = self._resources, self._costs, tick.phase == "forward"
        direction = 0 if forward else 1
        pre, post, head = (
            seconds[direction]
            for seconds in (costs.pre_seconds(), costs.post_seconds(), costs.head_seconds())
        )
        tokens = np.sum([each.own_tokens for each in nano], axis=0)
        head_seconds = tokens * head * self._runs_head(tick)
        if not forward:
            at.compute(head_seconds)
        numbers = list(range(len(nano)) if forward else reversed(range(len(nano))))
        names = NANO_BATCHES if len(nano) > 1 else (None,)
        ahead = self._planned.schedule.stages == 1 and not _returns(nano)
        turns = [
            self._through(
                nano[n],
                tick.phase,
                (pre, post) if forward else (post, pre),
                names[n],
                ahead,
                ahead and forward and n == len(nano) - 1 > 0,
            )
            for n in numbers
        ]
        ended = object()
        while turns:
            turns = [each for each in turns if next(each, ended) is not ended]
        if forward:
            if ahead and len(nano) > 1:
                for n in reversed(range(len(nano))):
                    labels = {"layer": self._layers - 1, "nano_batch": names[n]}
                    self._ahead[names[n]] = self._dispatch(nano[n], "backward", labels)
            at.compute(head_seconds)

    def _through(
        self,
        plan: PlanCosts,
        phase: Phase,
        linear: tuple[float, float],
        name: str | None,
        ahead: bool,
        late: bool,
    ) -> Iterator[None]:
        """A nano-batch through all layers of a chunk; it pauses where the other goes on.

        Args:
            plan: of the nano-batch.
            phase: of the tick.
            linear: seconds a token before and after a layer's core attention.
            name: of the nano-batch, if there are two.
            ahead: it goes on at once when its kernels have run; going back, keys and values are
                sent a layer ahead.
            late: its kernels run after another pause.
        """
        at, forward = self._resources, phase == "forward"
        tokens = plan.own_tokens.astype(np.float64)
        before, after = (seconds * tokens for seconds in linear)
        layers = list(range(self._layers) if forward else reversed(range(self._layers)))
        all_labels = [{"layer": layer, "nano_batch": name} for layer in layers]
        for step, labels in enumerate(all_labels):
            at.compute(before + after if step else before)
            arrives = None if forward else self._ahead.pop(name, None)
            if arrives is None:
                arrives = self._dispatch(plan, phase, labels)
            for _ in range((1 + late) if forward else (not ahead)):
                yield
            returns = [
                self._compute(plan, phase, over, labels | group)
                for over, group in zip(arrives, self._groups, strict=True)
            ]
            if ahead and not forward and step + 1 < len(all_labels):
                self._ahead[name] = self._dispatch(plan, phase, all_labels[step + 1])
            if not late:
                yield
            self._finish(plan, phase, returns, labels)
        at.compute(after)

    def _dispatch(self, plan: PlanCosts, phase: Phase, labels: dict[str, Any]) -> list[Floats]:
        """Starts to send what kernels need; when it is there, for each head group."""
        forward = phase == "forward"
        to_servers = (FORWARD_PHASES if forward else BACKWARD_PHASES)[0]
        name = "dispatch" if forward else "dispatch backward"
        return [self._start(plan, to_servers, name, labels | group) for group in self._groups]

    def _compute(
        self, plan: PlanCosts, phase: Phase, over: Floats, labels: dict[str, Any]
    ) -> Floats:
        """A head group's kernels when its inputs are there; starts to return what they make."""
        at, forward, cluster = self._resources, phase == "forward", self._costs.cluster
        to_servers, to_owners = FORWARD_PHASES if forward else BACKWARD_PHASES
        factor, suffix = (1.0, "") if forward else (cluster.backward_over_forward, " backward")
        at.wait(over, f"wait for dispatch{suffix}", **labels)
        at.compute(at.copy_seconds(plan.exchanges[to_servers].unpacked))
        seconds = factor * plan.kernel_seconds + cluster.launch_seconds * plan.kernel_calls
        seconds = seconds + at.traffic_seconds(plan.copied[phase])
        at.compute(seconds, f"core attention{suffix}", "kernels", **labels)
        return self._start(plan, to_owners, f"return{suffix}", labels)

    def _start(self, plan: PlanCosts, phase: str, name: str, labels: dict[str, Any]) -> Floats:
        """Gathers rows and starts an exchange; when it is over."""
        at, moved = self._resources, plan.exchanges[phase]
        launch = np.where((moved.packed > 0) | (moved.unpacked > 0), 1.0, 0.0)
        seconds = at.copy_seconds(moved.packed) + launch * self._costs.cluster.launch_seconds
        at.compute(seconds, name, "exchange", **labels)
        over = at.exchange(moved.transfer, phase)
        if self._ablation == "single-stream":
            at.wait(over, f"wait for {name}", **labels)
        return over

    def _finish(
        self,
        plan: PlanCosts,
        phase: Phase,
        returns: list[Floats],
        labels: dict[str, Any],
    ) -> None:
        at, forward = self._resources, phase == "forward"
        to_owners = (FORWARD_PHASES if forward else BACKWARD_PHASES)[1]
        for over in returns:
            at.wait(over, f"wait for return{'' if forward else ' backward'}", **labels)
            at.compute(at.copy_seconds(plan.exchanges[to_owners].unpacked))

    def _runs_head(self, tick: Tick) -> Floats:
        """1.0 for the ranks of a last stage that runs its last chunk, `[ranks]`."""
        schedule = self._planned.schedule
        work = tick.work[-1]
        is_last = work is not None and work.chunk == schedule.chunks - 1
        return np.where(is_last & (self._stage == schedule.stages - 1), 1.0, 0.0)

    def _pass_on(self, tick: Tick, nano: list[PlanCosts]) -> None:
        """Messages between stages, which both sides wait for."""
        schedule, at = self._planned.schedule, self._resources
        stages, forward = schedule.stages, tick.phase == "forward"
        if stages == 1:
            return
        row = self._costs.model.hidden_size * self._costs.dtype_bytes // self._costs.tensor_parallel
        tokens = np.sum([each.own_tokens for each in nano], axis=0)
        matrix = np.zeros((at.ranks, at.ranks), dtype=np.int64)
        for stage, work in enumerate(tick.work):
            if work is None:
                continue
            ends_stage, ends_chunk = (stages - 1, schedule.chunks - 1) if forward else (0, 0)
            if stage == ends_stage and work.chunk == ends_chunk:
                continue
            mine = self._servers[stage]
            theirs = self._servers[(stage + (1 if forward else -1)) % stages]
            matrix[mine, theirs] = tokens[mine] * row
        start = at.clock.copy()
        exposed = at.exposed.copy()
        at.wait(at.exchange(Transfer.of_bytes(matrix, self._links), "pass on"))
        at.exposed = exposed
        at.record_since("pass on", "pipeline", start)

    def _record_tick(self, tick: Tick, start: Floats) -> None:
        at = self._resources
        if not at.recording:
            return
        chunks = self._planned.schedule.chunks
        for stage, work in enumerate(tick.work):
            title = "serve" if work is None else f"micro-batch {work.micro_batch}"
            title += f" chunk {work.chunk}" if work is not None and chunks > 1 else ""
            began = np.where(self._stage == stage, start, at.clock)
            at.record_since(f"{tick.phase}: {title}", "ticks", began)

    def _reduce_gradients(self) -> None:
        """A stage's ranks wait for their last; what the last backward pass hides costs nothing."""
        at, costs = self._resources, self._costs
        replicas = self._servers.shape[1]
        exposed = []
        for stage, members in enumerate(self._servers):
            needed = costs.gradient_seconds(stage, len(self._servers), replicas)
            until = float(self._last_backward[members].max()) + needed
            exposed.append(max(until - float(at.clock[members].max()), 0.0))
        at.barrier(list(self._servers), exposed)

    def _memory(self) -> Floats:
        """Of each rank's GPUs at most: see `ModelCosts`, and the buffers of core attention."""
        costs, schedule, at = self._costs, self._planned.schedule, self._resources
        per_token = self._layers * costs.activation_bytes()
        kept_logits = costs.kept_logit_bytes()
        new_logits = costs.logit_bytes() - kept_logits
        kept: dict[tuple[int, int, int], Floats] = {}
        now, most = np.zeros(at.ranks), np.zeros(at.ranks)
        buffers = CoreAttentionMemory()
        nano_batches = 1
        for tick, plans in self._planned.ticks:
            nano = self._costs_of(plans)
            nano_batches = len(nano)
            tokens = np.sum([each.own_tokens for each in nano], axis=0)
            for each in nano:
                buffers = buffers.union(each.memory)
            for stage, work in enumerate(tick.work):
                if work is None:
                    continue
                members, key = self._servers[stage], (stage, *work)
                last = stage == schedule.stages - 1 and work.chunk == schedule.chunks - 1
                if tick.phase == "forward":
                    kept[key] = (per_token + last * kept_logits) * tokens[members]
                    now[members] += kept[key]
                # The gradients of logits have 16 bits, too.
                peak = now[members] + last * new_logits * tokens[members]
                most[members] = np.maximum(most[members], peak)
                if tick.phase == "backward":
                    now[members] -= kept.pop(key)
        replicas = self._servers.shape[1]
        state = [costs.state_bytes(s, schedule.stages, replicas) for s in range(schedule.stages)]
        reserved = buffers.with_headroom(HEADROOM).total(nano_batches, self._head_groups)
        return most + np.array(state)[self._stage] + reserved


def _returns(nano: list[PlanCosts]) -> bool:
    """Whether any output of a forward pass comes back from elsewhere."""
    return any(bool(each.exchanges["return"].packed.any()) for each in nano)

"""Costs of a plan in a layer: kernels, exchanges, copies and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.plan_memory import PlanMemory
from distca.cost.profile import Profile
from distca.cost.volume import (
    BACKWARD_PHASES,
    FORWARD_PHASES,
    Messages,
)
from distca.plan.span import Floats, Int64s
from distca.schedule.base import server_loads
from distca.schedule.program import Pass
from distca.simulate.cluster import Cluster
from distca.simulate.copies import copy_traffic
from distca.simulate.resources import Transfer


class TimedExchange(NamedTuple):
    """One phase of a plan's exchange.

    Attributes:
        transfer: bytes that the links carry.
        pack_seconds: time in which each server fills messages and sends them off, `[servers]`.
        unpack_seconds: time in which each server takes rows out of messages, `[servers]`.
    """

    transfer: Transfer
    pack_seconds: Floats
    unpack_seconds: Floats


class PassCosts(NamedTuple):
    """Costs of one pass of a plan.

    Attributes:
        dispatch: exchange that brings the kernels' inputs.
        kernel_seconds: time of each server's kernels and of the copies around them, `[servers]`.
        combine: exchange that takes outputs to their owners.
    """

    dispatch: TimedExchange
    kernel_seconds: Floats
    combine: TimedExchange


@dataclass(frozen=True)
class PlanCosts(PlanMemory):
    """Costs of a plan in a layer, for each server.

    What is asked for is worked out once: every layer of a tick runs the same plan, and ticks of a
    pipeline that do one pass need nothing of the other.

    Attributes:
        plan, shape, backward_inputs: as for `PlanMemory`.
        cost_model: forward seconds of tasks with these heads.
        links: links between the servers.
        cluster: rates of the servers' GPUs.
        signal: every message is one byte.
    """

    cost_model: CostModel
    links: Links
    cluster: Cluster
    signal: bool

    @property
    def returns(self) -> bool:
        """Whether any output of a forward pass comes back from elsewhere."""
        return bool(self.moved.messages["combine"].sizes.any())

    @cached_property
    def forward(self) -> PassCosts:
        return self._pass("forward", FORWARD_PHASES, self._kernel_seconds)

    @cached_property
    def backward(self) -> PassCosts:
        seconds = self.cluster.backward_over_forward * self._kernel_seconds
        if isinstance(self.cost_model, Profile) and self.cost_model.backward is not None:
            seconds = self._seconds_by(self.cost_model.backward)
        return self._pass("backward", BACKWARD_PHASES, seconds)

    def of(self, direction: Pass) -> PassCosts:
        return self.forward if direction == "forward" else self.backward

    @cached_property
    def _kernel_seconds(self) -> Floats:
        """Time of each server's forward kernels, `[servers]`."""
        return self._seconds_by(self.cost_model)

    def _seconds_by(self, cost_model: CostModel) -> Floats:
        plan = self.plan
        loads = server_loads(plan.tasks, plan.mask, plan.world_size, cost_model)
        return loads.astype(np.float64)

    @cached_property
    def _kernel_calls(self) -> Int64s:
        """Kernel calls of each server: one for each task shape that it has."""
        q, _ = self.rows
        return np.sum([call.rows > 0 for call in q.calls], axis=0)  # type: ignore[no-any-return]

    @cached_property
    def _expansion_seconds(self) -> Floats:
        """Time in which each server expands the latents that arrive, forward, `[servers]`; backward
        it does so again and makes the gradients of latents and weight."""
        _, kv = self.rows
        rate = self.cluster.peak_tflops * 1e12 * self.cluster.linear_mfu
        return kv.received.astype(np.float64) * (self.shape.expansion_flops / rate)

    def _pass(self, direction: Pass, phases: tuple[str, str], kernels: Floats) -> PassCosts:
        """Works out a pass, whose kernels take some seconds on each server, `[servers]`."""
        seconds = kernels + self.cluster.launch_seconds * self._kernel_calls
        copied = copy_traffic(self.rows, self.shape, direction, self.backward_inputs)
        seconds = seconds + self.cluster.traffic_seconds(copied)
        seconds = seconds + self._expansion_seconds * (1 if direction == "forward" else 3)
        dispatch, combine = (self._exchange(self.moved.messages[phase]) for phase in phases)
        return PassCosts(dispatch, seconds, combine)

    def _exchange(self, messages: Messages) -> TimedExchange:
        """Costs of messages. A signal is one byte, but its message is packed and unpacked whole."""
        cluster, carried = self.cluster, messages
        if self.signal:
            carried = replace(messages, sizes=(messages.sizes > 0).astype(np.int64))
        packed, unpacked = messages.sent(), messages.received()
        launches = np.where((packed > 0) | (unpacked > 0), cluster.launch_seconds, 0.0)
        return TimedExchange(
            Transfer.of_messages(carried, self.links),
            cluster.traffic_seconds(2 * packed) + launches,
            cluster.traffic_seconds(2 * unpacked),
        )

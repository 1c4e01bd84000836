"""Who chooses what travels in prefills, on this machine's ranks."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.inference.models import ServedModel, model_size
from distca.schedule.base import ScheduleConfig
from distca.schedule.serving import PaperRule, Selector, SelectorName
from distca.schedule.serving.balanced import BalancedTiles
from distca.simulate import CLUSTERS, Cluster
from distca.simulate.serving import InferenceCosts, SimulatedSelector

GPUS = CLUSTERS["dgx-h100"]
CPUS = Cluster(
    "cores of a CPU",
    gpus_per_node=1,
    memory_gb=64.0,
    peak_tflops=0.076,
    attention_tflops=0.076,
    node_gb_per_s=1.21,
    network_gb_per_s=1.21,
    copy_gb_per_s=21.5,
    linear_mfu=1.0,
    node_latency=1.9e-4,
    network_latency=1.9e-4,
    multiprocessors=1,
    source="processes of one core each, as benchmarks/results/simulator.md has them",
)

TOLERANCE = 0.05
"""Part of the mean by which a rank's attention may exceed it where ranks share prompts' tiles."""


def hardware() -> str:
    """Names the hardware of a rank."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"CPU, {platform.machine()}"


def machine_of(profile: Path | None, gb_per_s: float | None) -> Machine:
    """This machine, by the values of `--profile` and `--node-gb-per-s`.

    Raises:
        ValueError: the profile cannot be used.
    """
    measured = None if profile is None else Profile.load(profile)
    return Machine.described(torch.cuda.is_available(), gb_per_s, measured)


@dataclass(frozen=True)
class Machine:
    """What a choice is based on.

    Attributes:
        rates: rates and latencies of a rank.
        profile: measured kernel times; None: those of the rates.
    """

    rates: Cluster
    profile: Profile | None = None

    @staticmethod
    def described(on_gpus: bool, gb_per_s: float | None, profile: Profile | None) -> Machine:
        """This machine, by what is known of it.

        Args:
            on_gpus: whether ranks have GPUs.
            gb_per_s: speed of a rank's link to another; None: NVLink's, or gloo's on CPUs.
            profile: measured kernel times.
        """
        rates = GPUS if on_gpus else CPUS
        if gb_per_s is not None:
            rates = replace(rates, node_gb_per_s=gb_per_s)
        return Machine(rates, profile)

    def costs(self, model: ServedModel, ranks: int) -> tuple[InferenceCosts, CostModel]:
        """Costs of a model's layers on that many ranks, and of its attention.

        Raises:
            ValueError: the profile was measured for other heads.
        """
        size = model.tensor_parallel_size
        cluster = self.of_ranks(ranks * size)
        costs = InferenceCosts(model_size(model), cluster, size, model.dtype.itemsize)
        self._check_profile(costs.shape)
        return costs, self.profile or cluster.inference_cost(costs.shape)

    def _check_profile(self, shape: AttentionShape) -> None:
        if self.profile is not None and self.profile.shape != shape:
            raise ValueError(
                f"the profile was measured for {self.profile.shape}, but a rank has {shape}: run "
                "`distca profile` with these heads"
            )

    def of_ranks(self, ranks: int) -> Cluster:
        """The rates of that many ranks' processes, all of one machine."""
        return replace(self.rates, gpus_per_node=max(ranks, self.rates.gpus_per_node))

    def selector(
        self,
        name: SelectorName,
        shape: AttentionShape,
        ranks: int,
        hurried: int | None = None,
    ) -> Selector:
        """Makes a selector.

        Args:
            name: which one.
            shape: heads of a rank.
            ranks: ranks that share tokens.
            hurried: layers of a model whose small steps are chosen for by the paper's rule, since
                simulating takes longer than it could gain; None: all steps are simulated.

        Raises:
            ValueError: the profile was measured for other heads.
        """
        rates, profile = self.rates, self.profile
        self._check_profile(shape)
        rate = rates.attention_tflops * 1e12 if profile is None else profile.flops_per_second
        rule = PaperRule(shape, ranks, rate, rates.node_gb_per_s * 1e9)
        if name == "paper":
            return rule
        links = Links(ranks, rates.node_gb_per_s, rates.network_gb_per_s)
        selector = SimulatedSelector(shape, rates, links, profile or rates.inference_cost(shape))
        return selector if hurried is None else replace(selector, layers=hurried, quick=rule)

    def tiles(
        self, shape: AttentionShape, ranks: int, ranks_per_node: int | None = None
    ) -> BalancedTiles:
        """Makes the strategy by which ranks share the attention of prompts that each of them has.

        Args:
            shape: heads of a rank.
            ranks: ranks that compute attention.
            ranks_per_node: those of one machine; None: all.

        Raises:
            ValueError: the profile was measured for other heads.
        """
        self._check_profile(shape)
        rates = self.rates
        cost_model = self.profile or rates.inference_cost(shape)
        links = Links(ranks_per_node or ranks, rates.node_gb_per_s, rates.network_gb_per_s)
        config = ScheduleConfig(TOLERANCE, shape, cost_model, links=links)
        return BalancedTiles(config, rates.node_latency + rates.launch_seconds)

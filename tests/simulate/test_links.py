"""Simulated links: ports, messages in turn, and collectives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.link import Links
from distca.cost.model_sizes import MODELS
from distca.cost.volume import Messages
from distca.documents.lengths import DISTRIBUTIONS, cut_to_pieces, draw
from distca.plan.span import Floats, Int64s
from distca.simulate import (
    CLUSTERS,
    Candidate,
    ModelCosts,
    Resources,
    Transfer,
    Workload,
    pack_sequences,
    simulate,
    training_flags,
)
from distca.simulate.advice import advise
from distca.simulate.variants import (
    with_slower_links,
)
from support.simulated import IDEAL


def transfer_of(matrix: Int64s, links: Links) -> Transfer:
    """A transfer of bytes `[source rank, destination rank]`."""
    return Transfer.of_messages(Messages.of_matrix(matrix), links)


def test_a_slow_link_carries_messages_one_after_the_other() -> None:
    cluster = replace(IDEAL, network_gb_per_s=1.0, network_latency=0.25)
    links = Links(1, 1.0, 1.0)
    at = Resources(4, cluster, np.ones(4))
    matrix = np.zeros((4, 4), dtype=np.int64)
    matrix[0, 1:] = 10**9
    moved = transfer_of(matrix, links)
    first = at.exchange(moved, "dispatch")
    # Three messages share the port out of rank 0; they leave together.
    assert first.tolist() == [3.0, 3.25, 3.25, 3.25]
    # The port is still busy with the first exchange.
    second = at.exchange(moved, "dispatch")
    assert second.tolist() == [6.0, 6.25, 6.25, 6.25]
    at.wait(second)
    assert at.exposed.tolist() == second.tolist()
    assert at.sent["dispatch"].tolist() == [6 * 10**9, 0, 0, 0]
    # What comes from all shares the port in.
    at = Resources(4, cluster, np.ones(4))
    at.compute(np.array([0.0, 1.0, 0.0, 0.0]))
    arrived = at.exchange(transfer_of(matrix.T.copy(), links), "combine")
    assert arrived.tolist() == [3.25, 2.0, 1.0, 1.0]


def test_a_port_in_carries_one_thing_at_a_time() -> None:
    cluster = replace(IDEAL, node_gb_per_s=4.0, network_gb_per_s=1.0, network_latency=0.25)
    matrix = np.zeros((5, 5), dtype=np.int64)
    matrix[1:4, 0] = 10**9
    moved = transfer_of(matrix, Links(1, 4.0, 1.0))
    at = Resources(5, cluster, np.ones(5))
    at.compute(np.array([0.0, 0.0, 5.0, 5.0, 0.0]))
    # Two messages come from 5 s on, whatever has come before.
    assert at.exchange(moved, "dispatch")[0] == 7.25
    # What comes next waits for the port, or for its senders.
    at.compute(np.array([0.0, 0.0, 0.5, 1.5, 0.0]))
    assert at.exchange(moved, "dispatch")[0] == 10.25
    # Those of a node are no part of it, and don't make the port in start.
    matrix[4, 0] = 4 * 10**9
    moved = transfer_of(matrix, Links(3, 4.0, 1.0))
    at = Resources(5, cluster, np.ones(5))
    at.compute(np.array([0.0, 3.0, 1.0, 4.0, 2.0]))
    # Network: 5 GB from 2 s on, of which 1 GB may not begin before 4 s.
    assert at.exchange(moved, "dispatch").tolist() == [7.25, 3.25, 1.25, 5.0, 6.0]
    # A message does not come before its sender's port is free for it.
    out = np.zeros((5, 5), dtype=np.int64)
    out[1, 2] = 10 * 10**9
    at = Resources(5, cluster, np.ones(5))
    at.exchange(transfer_of(out, Links(1, 4.0, 1.0)), "dispatch")
    matrix = np.zeros((5, 5), dtype=np.int64)
    matrix[1, 0], matrix[3, 0] = 1, 2 * 10**9
    late = at.exchange(transfer_of(matrix, Links(1, 4.0, 1.0)), "dispatch")
    assert late[0] == pytest.approx(10.25)


def test_links_inside_a_node_and_outside_work_at_the_same_time() -> None:
    cluster = replace(IDEAL, node_gb_per_s=4.0, network_gb_per_s=1.0)
    matrix = np.zeros((4, 4), dtype=np.int64)
    matrix[0, 1] = matrix[0, 2] = 2 * 10**9
    moved = transfer_of(matrix, Links(2, 4.0, 1.0))
    assert Resources(4, cluster, np.ones(4)).exchange(moved, "dispatch").tolist() == [2, 0.5, 2, 0]


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_no_port_is_used_twice_at_a_time(ranks: int, per_node: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    cluster = replace(IDEAL, node_gb_per_s=2.0, network_gb_per_s=1.0)
    links = Links(per_node, 2.0, 1.0)
    at = Resources(ranks, cluster, np.ones(ranks))
    busy_out, busy_in = np.zeros((2, ranks)), np.zeros((2, ranks))
    over, left = np.zeros(ranks), np.zeros(ranks)
    for _ in range(4):
        matrix = generator.integers(0, 10**9, (ranks, ranks)) * generator.integers(
            0, 2, (ranks, ranks)
        )
        np.fill_diagonal(matrix, 0)
        moved = transfer_of(matrix, links)
        assert moved.bytes_sent.sum() == matrix.sum()
        busy_out, busy_in = busy_out + moved.out_seconds, busy_in + moved.in_seconds
        left += matrix.sum(axis=1)
        at.compute(generator.random(ranks))
        over = np.maximum(over, at.exchange(moved, "dispatch"))
        assert (over >= busy_out.max(axis=0) - 1e-9).all()
        assert (over >= busy_in.max(axis=0) - 1e-9).all()
        assert at.sent["dispatch"].tolist() == left.tolist()
    # A rank's ports are never idle for longer than all that was computed before.
    slowest = at.clock.max() + (busy_out + busy_in).sum()
    assert over.max() <= slowest


class Ports:
    """The ports of ranks, one message after the other."""

    def __init__(self, ranks: int, per_node: int, speed: tuple[float, float]) -> None:
        self.per_node, self.speed, self.latency = per_node, speed, (0.125, 0.25)
        self.out, self.into = np.zeros((2, ranks)), np.zeros((2, ranks))

    def exchange(self, matrix: Int64s, clock: Floats) -> Floats:
        """When an exchange of `[source, destination]` bytes is over for each rank."""
        over, begins = clock.copy(), np.maximum(self.out, clock)
        left = begins.copy()
        messages = []
        for source, destination in np.argwhere(matrix).tolist():
            kind = int(source // self.per_node != destination // self.per_node)
            seconds = matrix[source, destination] / self.speed[kind] / 1e9
            left[kind, source] += seconds
            self.out[kind, source] = left[kind, source]
            messages.append((begins[kind, source], kind, source, destination, seconds))
        for begin, kind, source, destination, seconds in sorted(messages):
            port = kind, destination
            self.into[port] = max(self.into[port], begin) + seconds
            came = max(self.into[port], left[kind, source]) + self.latency[kind]
            over[destination] = max(over[destination], came)
            over[source] = max(over[source], left[kind, source])
        return over


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 10**6))
def test_exchanges_are_those_of_messages_in_turn(ranks: int, per_node: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    cluster = replace(IDEAL, node_latency=0.125, network_latency=0.25)
    at, ports = Resources(ranks, cluster, np.ones(ranks)), Ports(ranks, per_node, (2.0, 1.0))
    for _ in range(4):
        matrix = generator.integers(0, 10**9, (ranks, ranks))
        matrix *= generator.integers(0, 2, (ranks, ranks))
        np.fill_diagonal(matrix, 0)
        # Several ranks may start together.
        at.compute(generator.integers(0, 4, ranks) / 2)
        expected = ports.exchange(matrix, at.clock)
        moved = transfer_of(matrix, Links(per_node, 2.0, 1.0))
        assert at.exchange(moved, "dispatch") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("members", "servers", "tensor_parallel", "expected"),
    [
        # Inside a node, also where the job is smaller than one.
        (4, 16, 1, 450.0),
        (3, 3, 1, 450.0),
        (6, 6, 1, 450.0),
        # As many links as members on a node, but no faster than the node.
        (16, 32, 1, 400.0),
        (16, 16, 2, 200.0),
        (16, 16, 8, 50.0),
        # Some group has only 4 members on one of its nodes, or a single one.
        (12, 24, 1, 200.0),
        (3, 24, 1, 50.0),
    ],
)
def test_collectives_use_the_links_of_all_members(
    members: int, servers: int, tensor_parallel: int, expected: float
) -> None:
    cluster = CLUSTERS["dgx-h200"]
    assert cluster.ring(members, servers, tensor_parallel)[0] == expected
    fast = replace(cluster, network_gb_per_s=100.0)
    assert fast.ring(16, 16, 1)[0] == 450.0
    costs = ModelCosts(MODELS["llama-8b"], cluster, tensor_parallel)
    nbytes = costs.stage_parameters(0, servers // members) * 6
    assert costs.gradient_seconds(0, servers // members, members) == pytest.approx(
        nbytes * (members - 1) / members / (expected * 1e9)
    )


@pytest.mark.parametrize(
    ("name", "memory_gib", "copy_gb_per_s"),
    [("dgx-a100", 80, 2039), ("dgx-h100", 80, 3350), ("dgx-h200", 139, 4800)],
)
def test_memories_and_their_speeds_are_those_of_data_sheets(
    name: str, memory_gib: int, copy_gb_per_s: int
) -> None:
    cluster = CLUSTERS[name]
    assert cluster.memory_gb == memory_gib * 2**30 // 10**9
    assert cluster.copy_gb_per_s == copy_gb_per_s


def test_twice_the_network_is_not_slower() -> None:
    """The search tries the plans of a slower network, too: those of the fast one may be slower."""
    lengths = cut_to_pieces(draw(DISTRIBUTIONS["pretrain"], 8 * 65536, 0), 65536)
    batch = pack_sequences(lengths, 8, 65536)
    own = Candidate("tiles", 2, 1, 8, 1, 2, keeps_inputs=True)
    found = []
    for speed in (200.0, 400.0):
        cluster = replace(CLUSTERS["dgx-h200"], network_gb_per_s=speed)
        workload = Workload(MODELS["llama-8b"], cluster, 16, 65536, 8, tolerance=0.02)
        tried = [own, *with_slower_links(own, workload)]
        found.append({each: simulate(each, workload, batch).seconds for each in tried})
    slow, fast = found
    assert min(fast.values()) <= min(slow.values())
    # By its own links alone the faster network is slower.
    assert fast[own] > min(slow.values())
    best = min(fast, key=lambda each: fast[each])
    (flag,) = [each for each in training_flags(best, workload) if "network" in each]
    planned = cluster.links(2).network_gb_per_s / best.network_divisor
    assert flag == f"--distca-network-gb-per-s {planned}"


def test_the_search_finds_a_slower_network_s_plan_with_its_tolerance() -> None:
    """A job that was slower on the faster network: the plan has another tolerance, too."""
    lengths = cut_to_pieces(draw(DISTRIBUTIONS["pretrain"], 8 * 65536, 0), 65536)
    batches = [pack_sequences(lengths, 8, 65536)]
    seconds = []
    for speed in (200.0, 400.0):
        cluster = replace(CLUSTERS["dgx-h200"], network_gb_per_s=speed)
        workload = Workload(MODELS["llama-8b"], cluster, 16, 65536, 8)
        found = advise(workload, batches, ["tiles"], [1], [1], 1, (0.02, 0.05))
        assert found[0].candidate is not None
        seconds.append(found[0].seconds)
    assert seconds[1] <= seconds[0]

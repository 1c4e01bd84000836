"""Ways to share documents in a group: bytes by enumeration, rings by a slow simulation, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.simulate import PUBLISHED, BaselineLayout, Charges, ModelCosts, simulate_baseline
from distca.simulate.sharing import (
    Group,
    all_gather,
    ring,
    ring_backward,
    ring_bytes,
    ring_forward,
)
from support.simulated import IDEAL, attention_seconds, costs_on


@pytest.mark.parametrize(("ring_size", "apart"), [(4, 1), (1, 4), (3, 2), (2, 4)])
def test_bytes_are_those_of_all_messages(ring_size: int, apart: int) -> None:
    """Enumerates the messages of every rank: of each row and head that is not where it is needed.

    A rank has 12 rows, of 8 heads whose queries are 3 bytes a head, keys and values 2,
    outputs 4.
    """
    own, heads, q, kv, out = 12, 8, 3, 2, 4
    there, back = ring_bytes(own, ring_size, apart, heads * q, heads * kv, heads * out)
    found = [0, 0]
    for owner in range(apart):
        for head in range(heads):
            computes = head * apart // heads
            if owner == 0 != computes:
                # Query, key and value go to who computes the head; the output and its gradient.
                found[0] += own * (q + kv)
                found[1] += own * 2 * out
            if computes == 0 != owner:
                # The output goes back, and gradients of query, key and value.
                found[0] += own * out
                found[1] += own * (q + kv)
    held = {rank: rank for rank in range(ring_size)}
    heads_here = heads // apart
    for step in range(ring_size):
        # After all-to-alls a rank has the rows of all its neighbours, for some heads.
        message = own * apart * heads_here * kv
        if step < ring_size - 1:
            held = {(rank + 1) % ring_size: keys for rank, keys in held.items()}
            found[0] += message
            found[1] += message
        # The gradients of the keys of the step before follow.
        found[1] += message if step else 0
    assert [there, back] == found
    # Everybody's keys came by.
    assert sorted(held.values()) == list(range(ring_size))


def slow_ring(kernels: np.ndarray, hop: float, backward: bool, interference: float) -> float:
    """Seconds of one ring, rank by rank: a message needs both ends' turn."""
    ranks, steps = kernels.shape
    arrives = [[0.0] * (steps + 1) for _ in range(ranks)]
    ends = [[0.0] * (steps + 1) for _ in range(ranks)]
    last = 0.0
    for step in range(steps):
        for rank in range(ranks):
            if backward:
                parts = (step < steps - 1) + (step > 0)
                turn = [max(ends[r][step], arrives[r][step]) for r in (rank, (rank - 1) % ranks)]
            else:
                parts = int(step < steps - 1)
                turn = [
                    max(ends[r][max(step - 1, 0)], arrives[r][step])
                    for r in (rank, (rank - 1) % ranks)
                ]
            arrives[rank][step + 1] = max(turn) + parts * hop
        for rank in range(ranks):
            now, left = max(ends[rank][step], arrives[rank][step]), float(kernels[rank, step])
            slowed = max(arrives[rank][step + 1] - now, 0.0)
            if step == steps - 1 and not backward:
                slowed = 0.0
            done = min(left, slowed * (1 - interference))
            ends[rank][step + 1] = now + done / (1 - interference) + left - done
            last = max(last, ends[rank][step + 1])
    if backward and steps > 1:
        last = max(last, *(each[steps] for each in arrives))
    return last


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("hop", [0.0, 0.9, 3.0])
def test_rings_are_those_of_a_slow_simulation(ranks: int, hop: float) -> None:
    generator = np.random.default_rng(ranks)
    kernels = generator.uniform(0.5, 1.5, (3, ranks, ranks))
    for run, backward in ((ring_forward, False), (ring_backward, True)):
        for interference in (0.0, 0.25):
            found = run(kernels, np.full(3, hop), interference)
            expected = [slow_ring(each, hop, backward, interference) for each in kernels]
            assert found.tolist() == pytest.approx(expected)


def test_a_ring_hides_its_messages_behind_equal_steps() -> None:
    costs = costs_on(replace(IDEAL, network_gb_per_s=100.0), vocab_size=1)
    lengths, layout = np.full(1, 262_144), BaselineLayout(1, 1, 16, 1)
    found = simulate_baseline("cp-p2p", lengths, layout, costs)
    gathered = simulate_baseline("per-document-cp", lengths, layout, costs)
    # Each rank computes a 16th of the document; squares on the diagonal have a few more tiles.
    whole = 4 * (1 + costs.cluster.backward_over_forward) * attention_seconds(costs, 262_144) / 16
    linear = 262_144 / 16 * 4 * (sum(costs.pre_seconds()) + sum(costs.post_seconds()))
    assert found.seconds == pytest.approx(whole + linear, rel=0.01)
    assert gathered.gathering[0] > 10 * found.gathering[0]
    # Slow links expose all but the first steps.
    slow = costs_on(replace(IDEAL, network_gb_per_s=0.1), vocab_size=1)
    exposed = simulate_baseline("cp-p2p", lengths, layout, slow)
    hops = 262_144 // 16 * costs.shape.kv_row_bytes * 15 / 0.1e9
    assert exposed.gathering[0] == pytest.approx(3 * 4 * hops, rel=0.1)


def test_an_all_to_all_needs_heads_and_no_memory() -> None:
    costs = costs_on(IDEAL, heads=16, kv_heads=8, vocab_size=1)
    lengths, layout = np.full(2, 32_768), BaselineLayout(1, 1, 8, 1, all_to_all=8)
    found = simulate_baseline("cp-a2a", lengths, layout, costs)
    both = replace(layout, all_to_all=4)
    mixed = simulate_baseline("cp-a2a+p2p", lengths, both, costs)
    whole = 4 * (1 + costs.cluster.backward_over_forward) * attention_seconds(costs, 32_768) / 4
    linear = 2 * 32_768 / 8 * 4 * (sum(costs.pre_seconds()) + sum(costs.post_seconds()))
    for outcome in (found, mixed):
        assert outcome.seconds == pytest.approx(whole + linear, rel=0.01)
    gathered = simulate_baseline("per-document-cp", lengths, replace(layout, all_to_all=1), costs)
    assert found.memory_bytes.max() < gathered.memory_bytes.max()
    for name, wrong in (
        ("cp-a2a", replace(layout, all_to_all=4)),
        ("cp-a2a+p2p", layout),
        ("cp-p2p", both),
    ):
        with pytest.raises(ValueError, match="no all-to-all among"):
            simulate_baseline(name, lengths, wrong, costs)
    with pytest.raises(ValueError, match="cannot share 2 key-value heads"):
        simulate_baseline("cp-a2a", lengths, layout, costs_on(IDEAL))
    with pytest.raises(ValueError, match="crosses the end of its 16,384 tokens"):
        simulate_baseline("cp-p2p", lengths, BaselineLayout(1, 4, 1, 1), costs)


COPIES = Charges(baseline_copies=True)


def test_copies_of_an_all_gather() -> None:
    """Rows that Transformer Engine's all-gather copies, counted one tensor after the other."""
    costs = ModelCosts(costs_on(IDEAL).model, replace(IDEAL, charges=COPIES))
    size, own = 4, 1000
    tokens, q, kv = np.full((1, size), own), costs.shape.q_row_bytes, costs.shape.kv_row_bytes
    whole = size * own
    for keeps in (0, 1):
        found = all_gather(tokens, np.zeros((1, size)), Group(size, 1, size), costs, keeps)
        forward = 2 * whole * kv + 2 * own * q
        # Reordered once more, zeros, heads and tails added, reordered, queries put together.
        rank = 1
        seen = whole * (rank + 1) // (2 * size) + whole * (2 * size - rank) // (2 * size)
        backward = whole * kv + 3 * seen * kv + 2 * whole * kv + 2 * own * q
        backward += 0 if keeps else 2 * whole * kv
        assert found.copied[0, rank].tolist() == [forward, backward]
        # Keys that are kept need not be gathered again.
        assert found.exposed[0, 1] == pytest.approx((1 if keeps else 2) * found.exposed[0, 0])
        assert found.sent[0, 1] == (1 if keeps else 2) * found.sent[0, 0]
        assert found.kept[0, 0] == keeps * (whole - own) * kv
        assert found.transient[0, 0, 0] == (1 if keeps else 2) * whole * kv


def test_copies_of_a_ring_are_those_of_its_steps() -> None:
    costs = ModelCosts(costs_on(IDEAL).model, replace(IDEAL, charges=COPIES))
    steps, own = 4, 1000
    tokens, q, kv = np.full((1, steps), own), costs.shape.q_row_bytes, costs.shape.kv_row_bytes
    attention = costs.cluster.attention_cost(costs.shape)
    found = ring([np.array([steps * own])], tokens, attention, Group(steps, 1, steps), costs)
    for rank in range(steps):
        forward = backward = outputs = 0
        for step in range(steps):
            heads = 0 < step <= rank
            tails = step > rank
            rows, keys = (own // 2 if tails else own), (own // 2 if heads else own)
            # Halves are copied; outputs and gradients of all steps are added up.
            forward += 2 * (own // 2) * (kv * heads + q * tails) + 3 * rows * q
            backward += 2 * (own // 2) * (kv * heads + 3 * q * tails) + 3 * (rows * q + keys * kv)
            outputs += rows * q
        assert found.copied[0, rank].tolist() == [forward, backward]
        assert found.transient[0, rank, 0] == outputs + steps * own * kv
    assert replace(PUBLISHED, baseline_copies=False) != PUBLISHED

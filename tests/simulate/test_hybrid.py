"""Simulated hybrid context parallelism: rounds of documents, by megatron-core's own scheduler."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from distca.cost.kernel_memory import kernel_token_bytes
from distca.cost.model_sizes import MODELS
from distca.cost.training_memory import Recompute
from distca.simulate import (
    BaselineLayout,
    Charges,
    Cluster,
    ModelCosts,
    divisions,
    simulate,
    simulate_baseline,
)
from distca.simulate.charges import exposed_reduction
from distca.simulate.sharing import Group, Shared, ring, ring_bytes
from distca.simulate.workload import Workload
from support.simulated import IDEAL, MODEL, costs_on, passes

pytest.importorskip("megatron.core")


def test_documents_run_one_after_the_other() -> None:
    """Four equal documents: each alone on a rank, or all in turn on four ranks."""
    costs, lengths = costs_on(IDEAL), np.full(4, 8192)
    apart, shared = (
        simulate_baseline("hybrid-cp", lengths, BaselineLayout(1, 4 // size, size, 1), costs)
        for size in (1, 4)
    )
    alone = sum(passes(costs, 8192, 4, True))
    assert apart.seconds == pytest.approx(alone)
    assert apart.computed.tolist() == pytest.approx([alone] * 4)
    assert not any(sent.any() for sent in apart.bytes_sent.values())
    # A quarter of each, with somewhat more tiles on the diagonal.
    assert shared.seconds == pytest.approx(alone, rel=0.05)
    shape = costs.shape
    rows = shape.q_row_bytes, shape.kv_row_bytes, shape.out_row_bytes
    there, back = ring_bytes(2048, 4, 1, *rows)
    assert shared.bytes_sent["shared forward"].tolist() == [4 * 4 * there] * 4
    assert shared.bytes_sent["shared backward"].tolist() == [4 * 4 * back] * 4
    state = costs.state_bytes(0, 1, 4)
    kept = (apart.memory_bytes - state)[0] / (shared.memory_bytes - state)[0]
    assert kept == pytest.approx(4, rel=0.05)
    again = replace(costs, recompute="full")
    longer = simulate_baseline("hybrid-cp", lengths, BaselineLayout(1, 4, 1, 1), again)
    assert longer.seconds - apart.seconds == pytest.approx(passes(costs, 8192, 4, False)[0])


def test_ranks_wait_for_a_long_document_and_all_charges_count() -> None:
    lengths = np.array([32_768, *[1024] * 8])
    costs = costs_on(IDEAL)
    layout = BaselineLayout(1, 4, 1, 1)
    outcome = simulate_baseline("hybrid-cp", lengths, layout, costs)
    assert outcome.seconds == pytest.approx(sum(passes(costs, 32_768, 4, True)))
    assert outcome.idle > 0.5
    assert (outcome.computed + outcome.exposed).tolist() == pytest.approx([outcome.seconds] * 4)
    charged = costs_on(replace(IDEAL, charges=Charges(half_waves=True)))
    more = simulate_baseline("hybrid-cp", lengths, layout, charged)
    assert more.seconds > outcome.seconds
    # Megatron makes no plan for an odd number of ranks.
    none = simulate_baseline("hybrid-cp", lengths, BaselineLayout(1, 3, 1, 1), costs)
    assert not none.fits
    for wrong in (BaselineLayout(2, 2, 1, 2), BaselineLayout(1, 2, 1, 2)):
        with pytest.raises(ValueError, match="hybrid-cp has no pipeline and no micro-batches"):
            simulate_baseline("hybrid-cp", lengths, wrong, costs)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("vocab_size", [100, 200_000])
@pytest.mark.parametrize("size", [1, 4])
def test_memory_is_of_the_largest_part_of_a_document(
    size: int, vocab_size: int, recompute: Recompute
) -> None:
    """Its activations, and the kernels' and recomputed rows, or its logits if they are more."""
    costs = replace(costs_on(IDEAL, vocab_size=vocab_size), recompute=recompute)
    # Of four ranks one has a token more than the others, for which all reserve room.
    lengths, tokens = np.full(4, 8193), -(-8193 // size)
    layout = BaselineLayout(1, 4 // size, size, 1)
    found = simulate_baseline("hybrid-cp", lengths, layout, costs)
    kernels = kernel_token_bytes(costs.shape) + costs.recomputed_bytes()
    assert (costs.logit_bytes() > kernels) == (vocab_size > 100)
    each = MODEL.layers * costs.activation_bytes() + max(kernels, costs.logit_bytes())
    of_documents = found.memory_bytes - costs.state_bytes(0, 1, 4)
    assert of_documents.tolist() == pytest.approx([tokens * each] * 4)
    if size > 1:
        rows = costs.shape.q_row_bytes, costs.shape.kv_row_bytes, costs.shape.out_row_bytes
        there, back = ring_bytes(tokens, 4, 1, *rows)
        runs = 2 if recompute == "full" else 1
        sent = MODEL.layers * len(lengths)
        assert found.bytes_sent["shared forward"].tolist() == [sent * runs * there] * 4
        assert found.bytes_sent["shared backward"].tolist() == [sent * back] * 4


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("size", [1, 4])
def test_what_a_rank_computes_beside_attention_and_matrices(
    size: int, recompute: Recompute
) -> None:
    """Launches, half-empty waves and copies, in every layer, forward, again and backward."""
    lengths, layout = np.full(4, 8192), BaselineLayout(1, 4 // size, size, 1)
    # Each rank has all documents or one.
    runs = np.array([2 if recompute == "full" else 1, 1])

    def computed(cluster: Cluster) -> float:
        costs = replace(costs_on(cluster), recompute=recompute)
        found = simulate_baseline("hybrid-cp", lengths, layout, costs)
        return float(found.computed.max())

    free = computed(IDEAL)
    launches = computed(replace(IDEAL, launch_seconds=0.01)) - free
    assert launches == pytest.approx(size * MODEL.layers * size * 0.01 * runs.sum())
    waves = replace(IDEAL, charges=Charges(half_waves=True))
    costs = replace(costs_on(waves), recompute=recompute)
    of_layer = np.add(costs.pre_launch_seconds(), costs.post_launch_seconds())
    of_document = MODEL.layers * of_layer @ runs + sum(costs.head_launch_seconds())
    assert computed(waves) - free == pytest.approx(size * of_document)
    copies = replace(IDEAL, copy_gb_per_s=1000.0, charges=Charges(baseline_copies=True))
    seconds = 0.0
    if size > 1:
        costs = replace(costs_on(copies), recompute=recompute)
        of_ranks = attention_of(8192, size, costs)
        for direction, factor in ((0, 1.0), (1, copies.backward_over_forward)):
            attention = factor * of_ranks.attention[0]
            slowest = (attention + of_ranks.copied[0, :, direction] / 1e12).max()
            seconds += runs[direction] * (slowest - attention.max())
        assert seconds > 0
    assert computed(copies) - free == pytest.approx(size * MODEL.layers * seconds)


def attention_of(length: int, size: int, costs: ModelCosts) -> Shared:
    """Core attention of a document on all of so many ranks."""
    cost, tokens = costs.cluster.attention_cost(costs.shape), np.full((1, size), length // size)
    return ring([np.array([length])], tokens, cost, Group(size, 1, size), costs)


@pytest.mark.parametrize("shared_ports", [0.0, 1.0])
def test_gradients_are_reduced_behind_the_last_rounds_backward_pass(shared_ports: float) -> None:
    slow = replace(IDEAL, network_gb_per_s=0.5, node_gb_per_s=0.5)
    slow = replace(slow, charges=replace(slow.charges, shared_ports=shared_ports))
    costs, lengths, layout = costs_on(slow), np.full(4, 8192), BaselineLayout(1, 1, 4, 1)
    found = simulate_baseline("hybrid-cp", lengths, layout, costs)
    # Four rounds of one document each.
    seconds = (found.computed + found.exposed)[0] / 4
    factor = slow.backward_over_forward
    hidden, needed = seconds * factor / (1 + factor), costs.gradient_seconds(0, 1, 4)
    held = MODEL.layers * attention_of(8192, 4, costs).held[0, 1]
    delay = exposed_reduction(hidden, needed, held, slow.charges)
    assert delay > 0
    assert found.seconds == pytest.approx(4 * seconds + delay)


def test_all_divisions_run() -> None:
    workload = Workload(MODEL, IDEAL, gpus=8, context=8192, sequences=8)
    batch = [np.array([8192]), *[np.full(8, 1024)] * 7]
    found = divisions("hybrid-cp", workload, [1, 2], [1, 2])
    assert {(c.tensor, c.stages, c.data, c.context) for c in found} == {
        *((1, 1, 8 // size, size) for size in (1, 2, 4, 8)),
        *((2, 1, 4 // size, size) for size in (1, 2, 4)),
    }
    for candidate in found:
        assert simulate(candidate, workload, batch).tokens == 8 * 8192


@pytest.mark.parametrize("sequences", [1, 2, 4, 6, 8, 12, 24])
def test_what_megatron_refuses_is_not_in_the_search(sequences: int) -> None:
    """megatron-core divides the samples of a batch by all ranks, which are data-parallel ones."""
    calculator = pytest.importorskip("megatron.core.num_microbatches_calculator")
    model = replace(MODEL, kv_heads=4)
    workload = Workload(model, IDEAL, gpus=24, context=8192, sequences=sequences)
    taken = set()
    for tensor in (1, 2, 4):
        with contextlib.suppress(AssertionError):
            calculator.ConstantNumMicroBatchesCalculator(
                sequences, 1, workload.gpus // tensor, False, 0
            )
            taken.add(tensor)
    assert {c.tensor for c in divisions("hybrid-cp", workload, [1, 2, 4], [1])} == taken
    latents = replace(workload, model=MODELS["deepseek-v3-like"], sequences=24)
    assert not divisions("hybrid-cp", latents, [1, 2, 4], [1])

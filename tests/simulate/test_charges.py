"""Charges of the simulator, each by a closed form, and on both sides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.cost.volume import Messages
from distca.schedule import ExecutionOptions
from distca.simulate import (
    CLUSTERS,
    PUBLISHED,
    UNCHARGED,
    BaselineLayout,
    Charges,
    Cluster,
    ModelCosts,
    Outcome,
    simulate_baseline,
    simulate_ticks,
)
from distca.simulate.charges import end_of_compute, exposed_reduction, half_wave_seconds
from distca.simulate.resources import Resources, Transfer
from support.simulated import IDEAL, costs_on, passes, planned


def test_work_under_an_exchange_is_slower_until_the_exchange_ends() -> None:
    # A quarter of compute is taken until 4: three of the five seconds are done by then.
    assert end_of_compute(0.0, 5.0, 4.0, 0.25) == pytest.approx(6.0)
    assert end_of_compute(1.0, 1.5, 9.0, 0.25) == pytest.approx(3.0)
    assert end_of_compute(5.0, 2.0, 4.0, 0.25) == 7.0
    assert end_of_compute(0.0, 5.0, 4.0, 0.0) == 5.0
    ends = end_of_compute(np.zeros(2), np.array([5.0, 1.5]), np.array([4.0, 4.0]), 0.25)
    assert ends.tolist() == pytest.approx([6.0, 2.0])


def test_a_reduction_shares_ports_and_compute_with_the_pass_that_hides_it() -> None:
    assert exposed_reduction(5.0, 3.0, 9.0, UNCHARGED) == 0.0
    assert exposed_reduction(5.0, 7.0, 9.0, UNCHARGED) == 2.0
    ports = Charges(shared_ports=True)
    assert exposed_reduction(5.0, 3.0, 4.0, ports) == 2.0
    # Three seconds of reduction take a quarter of compute each.
    assert exposed_reduction(5.0, 3.0, 9.0, Charges(interference=0.25)) == pytest.approx(0.75)
    # What others take of the pass is in its seconds.
    both = Charges(interference=0.25, shared_ports=True)
    assert exposed_reduction(5.0, 3.0, 1.0, both) == pytest.approx(0.75)
    assert exposed_reduction(5.0, 3.0, 4.0, both) == 2.0


def test_copy_engines_take_launches_and_no_compute() -> None:
    """Each message of a rank waits for one launch more; work under the exchange is not slowed."""
    cluster = replace(
        CLUSTERS["dgx-h200"],
        node_gb_per_s=1.0,
        node_latency=0.0,
        launch_seconds=0.5,
        charges=Charges(interference=0.25),
    )
    # Rank 0 sends to two, rank 1 to one, rank 2 to none.
    messages = Messages(
        np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([10**9, 2 * 10**9, 10**9]), 3
    )
    moved = Transfer.of_messages(messages, cluster.links(1))
    assert moved.messages_sent.tolist() == [2, 1, 0]
    kernels, engines = (Resources(3, cluster, np.ones(3)) for _ in range(2))
    assert kernels.exchange(moved, "dispatch")[0] == 3.0
    over = engines.exchange(moved, "dispatch", by_copy_engines=True)
    # Ranks 0 and 1 begin a second and half a second later; all leaves rank 0 together.
    assert over[0] == 4.0
    for resources, seconds in ((kernels, 2 / 0.75), (engines, 2.0)):
        resources.compute(np.full(3, 2.0))
        assert resources.clock[0] == pytest.approx(seconds)
    plan = planned([[3000] + [100] * 40] * 2, 1, 4, ExecutionOptions("tiles"))
    charged, free = (
        simulate_ticks(
            plan,
            costs_on(replace(CLUSTERS["dgx-h200"], charges=replace(PUBLISHED, copy_engines=each))),
        )
        for each in (False, True)
    )
    assert free.computed.sum() < charged.computed.sum()
    assert {*free.bytes_sent} == {*charged.bytes_sent}


def test_half_a_wave_is_what_a_last_wave_wastes_on_average() -> None:
    """Products of every number of rows up to whole waves waste that much, on the mean."""
    rate, many, inner, tiles = 1e12, 4, 64, np.arange(1, 4 * 4 * 10 + 1)
    of_tile = 2.0 * 128 * 256 * inner / (rate / many)
    wasted = np.ceil(tiles / many) * of_tile - tiles / many * of_tile
    # Whole tiles waste (many - 1) / many of the half wave that parts of tiles do.
    expected = half_wave_seconds(inner, many, rate) * (many - 1) / many
    assert wasted.mean() == pytest.approx(expected)


def test_linear_layers_are_slower_by_tensor_parallelism_and_in_few_tokens() -> None:
    cluster = replace(CLUSTERS["dgx-h200"], charges=Charges(half_waves=True))

    def shares(tensor: int, tokens: int) -> float:
        costs = ModelCosts(MODELS["llama-8b"], cluster, tensor)
        waste = costs.pre_launch_seconds()[0] + costs.post_launch_seconds()[0]
        useful = tokens * (costs.pre_seconds()[0] + costs.post_seconds()[0])
        return useful / (useful + waste)

    assert shares(1, 8192) > shares(8, 8192) > shares(8, 2048)
    assert shares(8, 65_536) > 0.98
    assert ModelCosts(MODELS["llama-8b"], CLUSTERS["dgx-h200"]).pre_launch_seconds() == (0, 0)
    # Each layer pays for it once a call, two nano-batches twice, and the output layer once.
    costs, ideal = costs_on(replace(IDEAL, charges=Charges(half_waves=True))), costs_on(IDEAL)
    layer, head = (
        sum(map(sum, each))
        for each in (
            (costs.pre_launch_seconds(), costs.post_launch_seconds()),
            (costs.head_launch_seconds(),),
        )
    )
    ours, bins = planned([[2048, 2048]], 1, 1, ExecutionOptions()), BaselineLayout(1, 1, 1, 1)
    ticks = [simulate_ticks(ours, each).seconds for each in (costs, ideal)]
    plain = [
        simulate_baseline("plain", np.array([2048, 2048]), bins, each).seconds
        for each in (costs, ideal)
    ]
    assert ticks[0] - ticks[1] == pytest.approx(4 * 2 * layer + head)
    assert plain[0] - plain[1] == pytest.approx(4 * layer + head)


BOUND = replace(CLUSTERS["dgx-h200"], gpus_per_node=2)
CHARGED_APART = {
    "link_efficiency": 0.5,
    "copy_efficiency": 0.5,
    "interference": 0.5,
    "half_waves": True,
    "shared_ports": True,
}


@pytest.mark.parametrize("name", CHARGED_APART)
def test_both_sides_are_charged(name: str) -> None:
    """Each charge makes an iteration longer, of DistCA and of Megatron's ring."""
    lengths = [16_384, *[2048] * 8]
    plan = planned([lengths], 1, 4, ExecutionOptions("tiles"))

    def both(charges: Charges) -> list[Outcome]:
        costs = costs_on(replace(BOUND, network_gb_per_s=5.0, charges=charges))
        layout = BaselineLayout(1, 1, 4, 1)
        return [
            simulate_ticks(plan, costs),
            simulate_baseline("cp-p2p", np.array(lengths), layout, costs),
        ]

    # A ring has copies that a charge of its own switches on.
    base = Charges(baseline_copies=True)
    charged = replace(base, **{name: CHARGED_APART[name]})  # type: ignore[arg-type]
    for plain, more in zip(both(base), both(charged), strict=True):
        assert more.seconds > plain.seconds * 1.0005
        assert more.bytes_sent.keys() == plain.bytes_sent.keys()


def test_charges_out_of_range_are_refused() -> None:
    for given in ({"link_efficiency": 0.0}, {"copy_efficiency": 1.1}, {"interference": 1.0}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} is"):
            Charges(**given)
    with pytest.raises(ValueError, match="at least 1 multiprocessor"):
        replace(IDEAL, multiprocessors=0)
    assert replace(IDEAL, charges=PUBLISHED).links(8).network_gb_per_s == pytest.approx(
        0.86 * IDEAL.network_gb_per_s
    )
    assert isinstance(IDEAL, Cluster)
    assert IDEAL.charges == UNCHARGED


@pytest.mark.parametrize("options", [ExecutionOptions("packed"), ExecutionOptions("tiles")])
def test_recomputed_layers_run_forward_twice_and_keep_their_input(
    options: ExecutionOptions,
) -> None:
    """On both sides, as a bound of memory that both may take."""
    costs = costs_on(IDEAL, vocab_size=1)
    again = replace(costs, recompute="full")
    windows, layout = [[2048] * 4] * 2, BaselineLayout(1, 2, 1, 2)
    pair = [simulate_ticks(planned(windows, 1, 2, options), each) for each in (costs, again)]
    ours = pair[1].seconds - pair[0].seconds
    lengths = np.array([2048] * 8)
    plain = [simulate_baseline("plain", lengths, layout, each) for each in (costs, again)]
    forward = 2 * 2 * passes(costs, 2048, 4, False)[0]
    assert ours == pytest.approx(forward)
    assert plain[1].seconds - plain[0].seconds == pytest.approx(forward)
    # All layers' activations go, but for one's; inputs stay.
    saved = 4096 * (3 * costs.activation_bytes() - 4 * again.activation_bytes())
    for one, other in (pair, plain):
        assert (one.memory_bytes - other.memory_bytes).tolist() == pytest.approx([saved] * 2)
    # Of an MLP, its matrix products; of its activations, those within it.
    model, mlp = costs.model, replace(costs, recompute="mlp")
    rate = IDEAL.peak_tflops * 1e12 * IDEAL.linear_mfu
    product = 2 * 3 * model.hidden_size * model.ffn_hidden_size / rate
    one = simulate_ticks(planned(windows, 1, 2, options), mlp)
    other = simulate_baseline("plain", lengths, layout, mlp)
    saved = 4096 * (model.layers - 1) * 3 * model.ffn_hidden_size * costs.dtype_bytes
    for tried, whole in ((one, pair[0]), (other, plain[0])):
        assert tried.seconds - whole.seconds == pytest.approx(2 * 4096 * model.layers * product)
        assert (whole.memory_bytes - tried.memory_bytes).tolist() == pytest.approx([saved] * 2)
    bins = [
        simulate_baseline(name, lengths, BaselineLayout(1, 1, 2, 2), again)
        for name in ("wlb-llm", "per-document-cp")
    ]
    assert (
        bins[0].bytes_sent["shared forward"].tolist()
        == (2 * bins[0].bytes_sent["shared backward"]).tolist()
    )
    assert bins[1].bytes_sent["shared forward"].max() == 4 * 4 * 8192 * costs.shape.kv_row_bytes / 2

"""The ideal WLB-LLM that simulated speed-ups are over: it must not be worse than it can be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS, ModelSize
from distca.simulate import (
    CLUSTERS,
    PUBLISHED,
    BaselineLayout,
    ModelCosts,
    Workload,
    divisions,
    simulate_baseline,
)
from distca.simulate.bins import PaperWork
from distca.simulate.one_f_one_b import order_of_1f1b

CLUSTER = CLUSTERS["dgx-h200"]
MODEL = ModelSize(4, 512, 8, 2, 64, 1024, 1000)
COSTS = ModelCosts(MODEL, CLUSTER)


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, vocab_size=20_000)])
def test_bins_have_equal_work_of_all_kinds(model: ModelSize) -> None:
    costs = ModelCosts(model, CLUSTER)
    # One bin has a long document, whose work is attention, the others short ones and more tokens.
    lengths = np.array([24_576, *[256] * 2800])
    outcome = simulate_baseline("wlb-llm", lengths, BaselineLayout(1, 4, 1, 1), costs)
    assert outcome.computed.max() < 1.005 * outcome.computed.mean()


def test_bins_are_as_large_as_memory_allows() -> None:
    # To balance the long document the other bin needs several times its tokens.
    lengths = np.array([32_768, *[1024] * 500])
    layout = BaselineLayout(1, 2, 1, 1)
    roomy = simulate_baseline("wlb-llm", lengths, layout, COSTS)
    assert roomy.fits
    assert roomy.computed.max() < 1.01 * roomy.computed.mean()
    state = COSTS.state_bytes(0, 1, 2)
    most_tokens = float((roomy.memory_bytes.max() - state) / COSTS.activation_bytes()) / 4
    assert most_tokens > 1.5 * lengths.sum() / 2
    # With less memory the largest bin is one that just fits.
    usable = 0.9 * float(roomy.memory_bytes.max())
    less = replace(CLUSTER, memory_gb=CLUSTER.reserved_gb + usable / 1e9)
    tight = simulate_baseline("wlb-llm", lengths, layout, ModelCosts(MODEL, less))
    assert tight.fits
    assert 0.99 * less.usable_bytes < tight.memory_bytes.max() <= less.usable_bytes
    assert tight.seconds > roomy.seconds


@pytest.mark.parametrize("stages", [2, 4])
def test_no_other_order_of_bins_is_much_faster(stages: int) -> None:
    links = {"node_gb_per_s": 1e12, "network_gb_per_s": 1e12, "node_latency": 0.0}
    cluster = replace(CLUSTER, network_latency=0.0, launch_seconds=0.0, **links)
    costs = ModelCosts(replace(MODEL, vocab_size=1), cluster)
    # Five bins, of which one has a document that cannot be balanced.
    lengths = np.array([24_576, *[256] * 1834])
    outcome = simulate_baseline("wlb-llm", lengths, BaselineLayout(stages, 1, 1, 5), costs)
    bins = [[24_576], *[[256] * 458] * 2, *[[256] * 459] * 2]
    layers = MODEL.layers // stages

    def passes(documents: list[int]) -> tuple[float, float]:
        one = BaselineLayout(1, 1, 1, 1)
        whole = simulate_baseline("plain", np.array(documents), one, costs).seconds
        own = np.array(documents)
        attention = costs.cluster.attention_cost(costs.shape)
        forward = float(attention.seconds(own, own, own * (own + 1) // 2).sum())
        linear = own.sum() * (costs.pre_seconds()[0] + costs.post_seconds()[0])
        forward = layers * (forward + linear)
        return forward, whole / stages - forward

    def ends(order: tuple[int, ...]) -> float:
        done: dict[tuple[int, bool, int], float] = {}
        clocks = [0.0] * stages
        left = [order_of_1f1b(stage, stages, len(bins)) for stage in range(stages)]
        while any(left):
            for stage in range(stages):
                while left[stage]:
                    forward, number = left[stage][0]
                    before = stage - 1 if forward else stage + 1
                    if 0 <= before < stages and (before, forward, number) not in done:
                        break
                    start = max(clocks[stage], done.get((before, forward, number), 0.0))
                    seconds = passes_of[order[number]][0 if forward else 1]
                    clocks[stage] = done[stage, forward, number] = start + seconds
                    left[stage].pop(0)
        return max(clocks)

    passes_of = [passes(documents) for documents in bins]
    found = {order: ends(order) for order in itertools.permutations(range(5))}
    assert outcome.seconds < 1.01 * min(found.values())
    # With the heaviest first it is slower.
    assert outcome.seconds < 0.97 * found[0, 1, 2, 3, 4]


def test_bins_may_be_smaller_than_sequences() -> None:
    workload = Workload(MODELS["llama-8b"], CLUSTER, 64, 131_072, 16)
    most = {
        system: max(c.micro_batches * c.data for c in divisions(system, workload, [8], [2]))
        for system in ("wlb-llm", "per-document-cp")
    }
    assert most == {"wlb-llm": 16 * 16, "per-document-cp": 16}
    assert (
        max(c.micro_batches for c in divisions("wlb-llm", workload, [8], [2])) > workload.sequences
    )


def test_the_papers_way_has_few_configurations_and_is_packed_without_a_model() -> None:
    """At most one bin a sequence, one micro-batch without a pipeline, and two group sizes then."""
    workload = Workload(MODELS["llama-8b"], CLUSTER, 256, 131_072, 16)
    three = divisions("wlb-llm-paper", workload, [8], [1])
    assert {(c.data, c.context, c.micro_batches) for c in three} == {(1, 32, 1), (2, 16, 1)}
    four = divisions("wlb-llm-paper", workload, [8], [1, 2])
    assert max(c.data * c.micro_batches for c in four) == 16
    assert {c.micro_batches for c in four if c.stages == 1} == {1}
    # Packed by the formula, whatever attention costs here.
    lengths = np.array([30_720, *[3840] * 15])
    balanced, papers = (
        simulate_baseline(name, lengths, BaselineLayout(1, 2, 1, 1), COSTS)
        for name in ("wlb-llm", "wlb-llm-paper")
    )
    assert papers.computed.max() > 1.03 * balanced.computed.max()
    documents = np.array([64_000, 32_000])
    pairs = documents * documents // 2
    assert PaperWork().seconds(documents, documents, pairs).tolist() == [2.0, 0.75]
    charged = ModelCosts(MODEL, replace(CLUSTER, charges=PUBLISHED))
    kept = [
        simulate_baseline(name, np.full(4, 8192), BaselineLayout(1, 2, 2, 1), charged)
        for name in ("wlb-llm", "wlb-llm-paper")
    ]
    more = MODEL.layers * 2 * 8192 * COSTS.shape.kv_row_bytes
    assert kept[1].memory_bytes - kept[0].memory_bytes == pytest.approx(more)

"""Simulated iterations on rollouts that share prompts."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from distca.cost.model_sizes import MODELS
from distca.cost.volume import plan_bytes
from distca.plan import validate_plan
from distca.plan.paths import LEAST_SHARED
from distca.schedule import ScheduleConfig
from distca.simulate import Workload, advise
from distca.simulate.cluster import CLUSTERS
from distca.simulate.groups import Group, draw_from, draw_groups, read_groups
from distca.simulate.rollouts import (
    TreeLayout,
    _plans,
    layouts,
    least_memory,
    least_seconds,
    one_by_one,
    shared,
    simulate_trees,
)

MODEL = replace(MODELS["llama-3.2-1b"], layers=2)


def job(gpus: int, context: int = 8192, sequences: int = 64) -> Workload:
    return Workload(MODEL, CLUSTERS["dgx-h200"], gpus, context, sequences, 0.05)


def test_groups_have_the_lengths_that_are_asked_for() -> None:
    assert draw_groups(100, 3, 7, 2) == [Group(100, (7, 7, 7))] * 2
    drawn = draw_groups(4000, 16, 500, 200, 0.5)
    assert np.mean([group.prompt for group in drawn]) == pytest.approx(4000, rel=0.1)
    each = [length for group in drawn for length in group.responses]
    assert np.mean(each) == pytest.approx(500, rel=0.05)
    assert np.std(np.log(each)) == pytest.approx(0.5, rel=0.05)
    assert draw_groups(4000, 16, 500, 200, 0.5, 1) != drawn
    assert min(length for g in draw_groups(1, 9, 1, 9, 3.0) for length in g.responses) == 1
    with pytest.raises(ValueError, match="responses 0: give at least 1"):
        draw_groups(1, 0, 1, 1)
    with pytest.raises(ValueError, match="spread -1: give 0 to 3"):
        draw_groups(1, 1, 1, 1, -1)
    with pytest.raises(
        ValueError, match="10,000,000 rollouts in all batches: give at most 1,048,576"
    ):
        draw_groups(1, 1000, 1, 10_000)
    for numbers in ((10**30, 1, 1, 1), (1 << 25, 9, 1 << 25, 9, 3.0)):
        with pytest.raises(ValueError, match="rollouts have more than 134,217,728 tokens"):
            draw_groups(*numbers)


def test_groups_are_read_from_a_file(tmp_path) -> None:
    known = [Group(4096, (512, 730)), Group(9, ()), Group(17, (1,))]
    objects = [{"prompt": g.prompt, "responses": list(g.responses)} for g in known]
    file = tmp_path / "groups"
    file.write_text("\n\n".join(map(json.dumps, objects)) + "\n")
    assert read_groups(file) == known
    file.write_text("\ufeff \n" + json.dumps(objects, indent=1))
    assert read_groups(file) == known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts: give lines such as"),
        ("[]", "has no prompts"),
        ("[1", "groups is not JSON"),
        ("{}\n{", "line 2 is not JSON"),
        ("[3]", "object 0: give a prompt and responses and nothing else"),
        ('{"prompt": 3}', "line 1: give a prompt and responses"),
        ('{"prompt": 3, "responses": [], "response": 1}', "nothing else"),
        ('{"prompt": 3, "responses": 4}', "responses are no list"),
        ('{"prompt": true, "responses": [4]}', "a prompt has True tokens: give a whole number of"),
        ('{"prompt": 3, "responses": [4, 0]}', "a response has 0 tokens"),
        ('{"prompt": 3, "responses": [4.5]}', "a response has 4.5 tokens"),
        ('{"prompt": 1e3, "responses": [4]}', "has 1000.0 tokens: give a whole number of at least"),
        ('{"prompt": NaN, "responses": [4]}', "a prompt has nan tokens: give a whole number of at"),
        ('{"prompt": 3, "prompt": 3, "responses": [4]}', 'an object has "prompt" twice: give it'),
        ('{\n"prompt": 3,\n"responses": [4]}', "give each object on one line, such as"),
        (
            '{"prompt": ' + "9" * 5000 + ', "responses": [4]}',
            "line 1 has a number of too many digits",
        ),
        ('{"prompt": 1, "responses": [2, 134217728]}', "rollouts have more than 134,217,728"),
    ],
)
def test_a_file_of_no_groups_is_refused(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "groups"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_groups(file)


def test_files_that_cannot_be_read_are_refused(tmp_path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    for name, message in (
        (".", "is a folder"),
        ("no", "does not exist"),
        ("binary", "not UTF-8"),
        ("binary/x", "does not exist"),
        ("x" * 300, "cannot be read: File name too long: give a file whose lines are"),
        ("/proc/self/mem", "mem cannot be read: Input/output error: give a file whose lines are"),
    ):
        with pytest.raises(ValueError, match=message):
            read_groups(tmp_path / name)


def test_batches_are_drawn_from_known_groups() -> None:
    known = [Group(n, (n,)) for n in range(1, 8)]
    (all_of_them,) = draw_from(known, 7, 1, 0)
    assert sorted(g.prompt for g in all_of_them) == list(range(1, 8))
    batches = draw_from(known, 3, 5, 1)
    assert [len(groups) for groups in batches] == [3] * 5
    drawn = [group for groups in batches for group in groups]
    # Each epoch has every group once.
    assert set(drawn[:7]) == set(drawn[7:14]) == set(known)
    assert draw_from(known, 3, 5, 1) == batches != draw_from(known, 3, 5, 2)
    for groups, count in ((10**9, 1), (1, 10**9)):
        with pytest.raises(ValueError, match="1,000,000,000 rollouts in all batches: give at most"):
            draw_from(known, groups, count, 0)
    # Of few groups with very many responses.
    with pytest.raises(ValueError, match="1,200,000 rollouts in all batches: give at most"):
        draw_from([Group(1, (1,) * 600_000)], 1, 2, 0)


def test_few_long_rollouts_in_many_sequences_are_filled_up() -> None:
    """Seven GPUs have seven sequences: five of them have no rollout."""
    context, ((*sequences,),) = one_by_one([draw_groups(1 << 26, 1, 9, 2)], 7)
    assert len(sequences) == 7
    assert {int(each.sum()) for each in sequences} == {context}
    assert max(map(len, sequences)) <= 4097


def test_rollouts_one_by_one_fill_sequences() -> None:
    batches = [draw_groups(9000, 4, 2000, 60, 0.5, seed) for seed in range(3)]
    for gpus, odd in ((64, 1), (24, 3)):
        context, packed = one_by_one(batches, gpus)
        for groups, sequences in zip(batches, packed, strict=True):
            assert len(sequences) % odd == 0
            assert (len(sequences) // odd).bit_count() == 1
            assert all(int(each.sum()) == context for each in sequences)
            rollouts = sorted(length for group in groups for length in group.rollouts)
            documents = np.concatenate(sequences)
            np.testing.assert_array_equal(np.sort(documents[documents > 256]), rollouts)
            assert sum(rollouts) > 0.95 * len(sequences) * context
    # One rollout is a sequence.
    context, packed = one_by_one([[Group(100, (5,))]], 8)
    assert [each.sum() for each in packed[0]] == [context] == [512]


def test_as_many_tokens_are_shared_as_in_training() -> None:
    """Prompts of fewer tokens than `share_prefixes` and --distca-share-prefixes take are not."""
    torch = pytest.importorskip("torch")
    from distca.library import Rollout, share_prefixes

    groups = [Group(127, (9, 40)), Group(128, (9, 40)), Group(1, (3,) * 8), Group(300, (7,))]
    fresh, rollouts = iter(range(10**6)), []
    for group in groups:
        prompt = [next(fresh) for _ in range(group.prompt)]
        for response in group.responses:
            tokens = [*prompt, *(next(fresh) for _ in range(response))]
            rollouts.append(Rollout(torch.tensor(tokens)))
    for least in (LEAST_SHARED, 1, 200):
        trees = share_prefixes(rollouts, least)
        found = shared(groups, least)
        assert sorted(each.tokens for each in found) == sorted(each.tokens for each in trees)
        lengths = [length for each in found for length in each.rollouts]
        assert lengths == [len(each.tokens) for each in rollouts]
    assert len(share_prefixes(rollouts)) == len(shared(groups, LEAST_SHARED)) == 12
    alone = shared([Group(1, (3,) * 8)] * 3, LEAST_SHARED)
    expected = simulate_trees([Group(2, (2,))] * 24, job(8), TreeLayout(1, 2))
    assert simulate_trees(alone, job(8), TreeLayout(1, 2)).seconds == pytest.approx(
        expected.seconds, rel=1e-3
    )


def test_sharing_nothing_gains_nothing() -> None:
    """One response to each prompt: a tree is a document, here beside DistCA's own search."""
    groups = draw_groups(16384, 1, 4096, 64, 0.3)
    context, packed = one_by_one([groups], 8)
    workload = job(8, context, len(packed[0]))
    (choice,) = advise(workload, packed, ["tiles"], [1], [1])
    share = sum(sum(group.rollouts) for group in groups) / workload.sequences / context
    ways = [TreeLayout(1, 1, size, half) for size in (None, 1) for half in (True, False)]
    trees = min(simulate_trees(groups, workload, way).seconds for way in ways)
    assert trees == pytest.approx(choice.seconds * share, rel=0.06)


@pytest.mark.parametrize("ranks_of_tree", [None, 4, 2, 1])
@pytest.mark.parametrize("ping_pong", [True, False])
def test_plans_of_rank_groups_are_valid(ranks_of_tree: int | None, ping_pong: bool) -> None:
    groups = draw_groups(2000, 5, 600, 9, 0.5)
    layout = TreeLayout(1, 1, ranks_of_tree, ping_pong)
    costs = job(8).costs(1)
    config = ScheduleConfig(0.05, costs.shape, block=128)
    plans = _plans(groups, layout, 8, config, MODEL.masks.masks, 1000.0)
    assert len(plans) == 1 + ping_pong
    tokens = 0
    for plan in plans:
        validate_plan(plan)
        tokens += int(plan.own_lengths.sum())
        size = ranks_of_tree or 8
        owner, server, _ = plan.kv_segments.moved()
        assert (owner // size == server // size).all()
        if ranks_of_tree == 1:
            assert plan_bytes(plan, costs.shape).total == 0
    assert tokens == sum(group.tokens for group in groups)


def test_bytes_are_the_plans() -> None:
    groups = draw_groups(3000, 8, 500, 4, 0.5)
    outcome = simulate_trees(groups, job(8), TreeLayout(1, 2))
    costs = job(8).costs(1)
    assert outcome.tokens == sum(sum(group.rollouts) for group in groups)
    kept = simulate_trees(groups, job(8), TreeLayout(1, 2, keeps_inputs=True))
    sent = [each.bytes_sent["dispatch_backward"].sum() for each in (kept, outcome)]
    assert sent[0] < sent[1]
    assert outcome.fits
    assert least_memory(groups, job(8), TreeLayout(1, 2)) < outcome.memory_bytes.max()
    assert set(outcome.bytes_sent) >= {"dispatch", "combine", "dispatch_backward"}
    # The same plans, layer by layer.
    links = job(8).cluster.links(1)
    cost_model = costs.cluster.attention_cost(costs.shape)
    config = ScheduleConfig(0.05, costs.shape, cost_model, links=links)
    from distca.simulate.rollouts import _dealt
    from distca.simulate.workload import token_pairs

    pairs = token_pairs(costs)
    expected = 0
    for some in _dealt(groups, 2, pairs):
        for plan in _plans(some, TreeLayout(1, 2), 8, config, MODEL.masks.masks, pairs):
            expected += 2 * plan_bytes(plan, costs.shape).total
    counted = sum(int(each.sum()) for name, each in outcome.bytes_sent.items() if name != "pass on")
    assert counted == expected


def test_shared_prompts_take_less_and_spread_trees_least() -> None:
    """Two long prompts on eight ranks: whole trees leave six ranks without work."""
    groups = [Group(16384, (1024,) * 8), Group(16384, (1024,) * 8)]
    shared = simulate_trees(groups, job(8), TreeLayout(1, 1, None, False)).seconds
    on_two = simulate_trees(groups, job(8), TreeLayout(1, 1, 4, False)).seconds
    apart = [Group(16384, (1024,)) for _ in range(16)]
    unshared = simulate_trees(apart, job(8), TreeLayout(1, 1, None, False)).seconds
    assert shared == pytest.approx(on_two, rel=0.1)
    assert unshared > 4 * shared


def test_no_iteration_is_faster_than_its_busiest_ranks_compute() -> None:
    groups = draw_groups(9000, 6, 1500, 16, 0.7)
    for size in (None, 1, 2, 4):
        for micro_batches in (1, 4):
            layout = TreeLayout(1, micro_batches, size, False)
            least = least_seconds(groups, job(8), layout)
            seconds = simulate_trees(groups, job(8), layout).seconds
            assert 0.75 * seconds < least < 1.03 * seconds


def test_layouts_divide() -> None:
    found = layouts(6, job(16), [1, 2, 3, 8])
    assert len(set(found)) == len(found)
    for layout in found:
        ranks = 16 // layout.tensor
        assert 6 % layout.micro_batches == 0
        if layout.ranks_of_tree is not None:
            assert ranks % layout.ranks_of_tree == 0
            assert 6 // layout.micro_batches >= ranks // layout.ranks_of_tree
    assert {layout.tensor for layout in found} == {1, 2, 8}
    experts = Workload(MODELS["qwen3-30b-a3b"], CLUSTERS["dgx-h200"], 8, 8192, 8)
    with pytest.raises(ValueError, match="without experts"):
        simulate_trees([Group(100, (10,))], experts, TreeLayout(1, 1))

"""Answers of several ranks are those of one process, turn by turn, for every family of models."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.serving.planned_steps import PlannedSteps
from distca.cost.link import Links
from distca.inference.machine import Machine
from distca.inference.messages import Completion, RequestOutput
from distca.inference.models import FAMILIES as SERVED
from distca.inference.models import ServedModel, read_model
from distca.inference.sampling import SamplingParams
from distca.inference.sequence_parallel import split_model
from distca.inference.tensor_parallel import slice_config
from distca.inference.verify import _no_further, compare
from distca.plan import Mask, SteppedPlan
from distca.schedule.serving import STRATEGIES
from distca.schedule.serving.batches import LayerPlans, PrefillBatch
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.layouts import LayoutChoice
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.partitions import Chain, search_partition
from distca.simulate.serving.prefill_chain import ChainCosts
from support.balanced import eager_tiles
from support.generated import Turns, generate_on_a_rank
from support.ranks import Ranks
from support.small_models import FAMILIES, VOCABULARY, save_small_model
from support.sparse_reference import sparse_logits

GREEDY, BLOCK = SamplingParams(max_tokens=8), 4
SEARCHED = tuple(
    search_partition(150, 3, ChainCosts(1e-6, 1e-7, 3, 256, (1.0, 1.0)).chain_seconds) / 150
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of small models by family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: str(save_small_model(family, folder)) for family in FAMILIES}


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


# A long prompt, a prompt of one token, one of fewer tokens than ranks; a later turn of one token.
TURNS: Turns = [
    {0: tokens(150, 0), 1: tokens(1, 1), 2: tokens(2, 2)},
    {0: tokens(40, 3), 1: tokens(1, 4)},
    {1: tokens(90, 5), 2: tokens(5, 6)},
]


def check(
    ranks: Ranks,
    path: str,
    world_size: int,
    strategy: Any,
    stripe: int = 4,
    dtype: torch.dtype = torch.float32,
    turns: Turns = TURNS,
    sampling: SamplingParams = GREEDY,
    tensor_parallel_size: int = 1,
    layout: LayoutChoice | None = None,
    nodes: int = 1,
    **changes: Any,
) -> list[RequestOutput]:
    """Answers turns on ranks, and holds them against one process."""
    model = read_model(path, dtype, tensor_parallel_size)
    split = None if layout is None else split_model(model, layout, nodes)
    if strategy == "auto":
        machine = Machine.described(False, None, None)
        strategy = machine.selector("simulated", model.shape, world_size)
    if strategy == "tiles":
        strategy = eager_tiles(model.shape)
    how = {"strategy": strategy, "stripe": stripe, "split": split} | changes
    results = ranks.run(
        generate_on_a_rank,
        *(model, world_size, sampling, turns, how),
        world_size=world_size * tensor_parallel_size,
    )
    first = results[0]
    assert first.planned == sum(each.sent for each in results)
    assert first.planned == sum(each.bytes_moved for turn in first.turns for each in turn.values())
    assert first.referenced == 0
    done = first.outputs(turns)
    found = compare(model, done, sampling.temperature == 0)
    assert found.holds, found.line
    return done


def test_all_families_are_tested() -> None:
    assert set(FAMILIES) == set(SERVED)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_one_processs_logits_and_tokens(
    ranks, models, full: bool, family: str
) -> None:
    cases = [(2, 2, "pass-q", 4)]
    if full:
        ways = product((1, 2, 3, 4), (*STRATEGIES, "auto"), (4, 16, 128))
        cases += [(2, 1, "pass-q", 4), (4, 1, "pass-q", 4), *((1, *way) for way in ways)]
    for tensor_parallel_size, *way in cases:
        if family == "gpt_oss":
            tensor_parallel_size = 1
        check(
            ranks,
            models[family],
            *way,
            sampling=SamplingParams(max_tokens=64) if full else GREEDY,
            tensor_parallel_size=tensor_parallel_size,
        )


def test_a_slice_has_the_heads_of_a_model_that_does_not_say_how_wide_they_are() -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert not hasattr(config, "head_dim")
    found = slice_config(config, 2)
    assert (found.head_dim, found.num_attention_heads, found.num_key_value_heads) == (16, 2, 1)
    assert slice_config(config, 4).num_key_value_heads == 1


def test_slices_share_everything_but_what_is_small(ranks, tmp_path: Path) -> None:
    """Two heads of keys for four ranks, projections with biases, and an odd vocabulary."""
    changes = {"attention_bias": True, "mlp_bias": True, "vocab_size": VOCABULARY - 1}
    path = str(save_small_model("llama", tmp_path, **changes))
    turns: Turns = [{0: tokens(30, 0)}]
    check(ranks, path, 1, "pass-kv", 16, turns=turns, tensor_parallel_size=4)
    whole = read_model(path, torch.float32).load(torch.device("cpu"), "eager")
    found = ranks.run(weights_of_a_rank, read_model(path, torch.float32, 4), world_size=4)
    expected = sum(
        weight.numel() / (2 if "k_proj" in name or "v_proj" in name else 4)
        for name, weight in whole.named_parameters()
        if weight.dim() > 1
    )
    small = sum(weight.numel() for weight in whole.parameters() if weight.dim() == 1)
    assert all(expected <= each <= expected + small + 64 for each in found)


def weights_of_a_rank(model: ServedModel) -> int:
    """Numbers that a rank keeps of a model that four share."""
    from distca.inference.tensor_parallel import join_ranks

    _, tensor_ranks = join_ranks(model.tensor_parallel_size, timedelta(minutes=2))
    loaded = model.load(torch.device("cpu"), "eager", tensor_ranks)
    return sum(weight.numel() for weight in loaded.parameters())


@pytest.mark.parametrize(
    ("family", "world_size", "strategy", "stripe"),
    [
        ("gemma2", 1, "pass-kv", 16),
        ("gemma3_text", 2, "pass-kv", 4),
        ("gpt_oss", 3, "pass-kv", 128),
        ("gemma3_text", 4, "pass-q", 16),
        ("gpt_oss", 2, "auto", 12),
        ("gemma2", 3, "all-gather", 16),
        ("gpt_oss", 3, "sp-ntp", 16),
    ],
)
def test_ranks_strategies_and_stripes(
    ranks, models, full: bool, family: str, world_size: int, strategy: str, stripe: int
) -> None:
    """Windows on some layers, with a soft cap of scores and with sinks, too."""
    sampling = SamplingParams(max_tokens=64) if full else GREEDY
    check(ranks, models[family], world_size, strategy, stripe, sampling=sampling)


@pytest.mark.parametrize(
    ("family", "world_size", "tensor_parallel_size"),
    [
        *(("llama", 2, 2), ("qwen3", 3, 1), ("gemma2", 2, 1), ("gemma3_text", 4, 1)),
        *(("gpt_oss", 3, 1), ("qwen3_moe", 4, 1)),
    ],
)
def test_prompts_of_ranks_share_attention_in_tiles(
    ranks, models, full: bool, family: str, world_size: int, tensor_parallel_size: int
) -> None:
    """Windows, soft caps, sinks and experts; prompts of one token, and later turns that begin
    where others lie."""
    sampling = SamplingParams(max_tokens=64) if full else GREEDY
    size = {"tensor_parallel_size": tensor_parallel_size}
    for chunk in (4096, 48):
        done = check(
            *(ranks, models[family], world_size, "tiles"),
            sampling=sampling,
            max_num_batched_tokens=chunk,
            max_num_seqs=32,
            **size,
        )
        assert sum(each.outputs[0].bytes_moved for each in done) > 0
    short: Turns = [{n: tokens(4 + n, n) for n in range(5)}]
    strategy = eager_tiles(read_model(models[family], torch.float32).shape, latency=1.0)
    done = check(ranks, models[family], world_size, strategy, turns=short)
    assert [each.outputs[0].bytes_moved for each in done] == [0] * 5


@pytest.mark.parametrize(
    ("family", "shares", "evens_out"),
    [
        # Searched, at random and moved, even: behind the first turn's tokens anywhere.
        ("llama", SEARCHED, False),
        ("gemma3_text", (0.1, 0.4, 0.15, 0.35), True),
        ("qwen2", (0.5, 0.5), False),
    ],
)
def test_chains(
    ranks, models, full: bool, family: str, shares: tuple[float, ...], evens_out: bool
) -> None:
    check(
        ranks,
        models[family],
        len(shares),
        "pass-kv",
        sampling=SamplingParams(max_tokens=64) if full else GREEDY,
        chain=Chain(len(shares), shares),
        evens_out=evens_out,
    )


@pytest.mark.parametrize(
    ("family", "world_size", "kv_heads"),
    [("llama", 4, 1), ("qwen3", 3, 2), ("qwen2", 2, 4), ("phi3", 4, 2)],
)
def test_heads_scattered(
    ranks, tmp_path: Path, full: bool, family: str, world_size: int, kv_heads: int
) -> None:
    """One head of keys for all ranks, two for four and for three that divide no heads, and more."""
    path = str(save_small_model(family, tmp_path, num_key_value_heads=kv_heads))
    sampling = SamplingParams(max_tokens=64) if full else GREEDY
    check(ranks, path, world_size, "sp-ntp", 4, sampling=sampling)


def near_to_far(model: ServedModel, ranks: int, per_node: int, drop: float) -> NearToFar:
    """Keys from near to far, two micro-partitions of each level; of every other head more stay."""
    levels = Levels(Links(per_node), ranks)
    sizes = len(model.windows), model.kv_heads
    less, more = (
        Sparsity.of_drop_ratio(each, *sizes, drop_of_queries=each / 2) for each in (drop, drop / 2)
    )
    keys, queries = (
        tuple(
            tuple((one, other)[head % 2][head] for head in range(sizes[1]))
            for one, other in zip(*tables, strict=True)
        )
        for tables in ((less.keys, more.keys), (less.queries, more.queries))
    )
    return NearToFar(levels, Sparsity(keys, queries), model.windows, (2,))


@pytest.mark.parametrize(("family", "world_size"), [("llama", 4), ("gemma3_text", 3)])
def test_near_to_far_is_exact_where_nothing_is_dropped(
    ranks, models, family: str, world_size: int
) -> None:
    model = read_model(models[family], torch.float32)
    strategy = near_to_far(model, world_size, 2, 0.0)
    check(ranks, models[family], world_size, strategy, chain=strategy.levels)


@pytest.mark.parametrize(("world_size", "tensor_parallel_size"), [(2, 2), (4, 1)])
def test_sparse_answers_are_those_of_the_pairs_that_are_kept(
    ranks, tmp_path: Path, world_size: int, tensor_parallel_size: int
) -> None:
    """Bytes are as planned, and later turns go on, on keys that lie anywhere. Heads keep different
    shares, whichever ranks they are on. Decoding, beside short prompts, attends to all keys."""
    path = str(save_small_model("llama", tmp_path, num_hidden_layers=4))
    model = read_model(path, torch.float32, tensor_parallel_size)
    strategy = near_to_far(model, world_size, 2, 0.7)
    how = {"strategy": strategy, "chain": strategy.levels}
    sampling = SamplingParams(max_tokens=3)
    count = world_size * tensor_parallel_size
    case = model, world_size, sampling, TURNS, how
    results = ranks.run(generate_on_a_rank, *case, world_size=count)
    answers = results[0].turns
    assert results[0].planned == sum(each.sent for each in results)
    steps = PlannedSteps(model.masks, world_size, BLOCK)
    (first, *_) = steps.plan({0: 150, 1: 1, 2: 2}, strategy, strategy.levels).parts
    assert isinstance(first, PrefillBatch)
    plans = first.plans
    of_first = {layer: only_first(plan) for layer, plan in plans.sparse.items()}
    assert [*of_first] == [1, 2]
    plans = LayerPlans({Mask(): only_first(plans.by_mask[Mask()])}, of_first)
    answer = answers[0][0]
    whole = TURNS[0][0], world_size, answer.token_ids[:-1]
    expected = sparse_logits(model, plans, *whole)
    dense = sparse_logits(model, LayerPlans(plans.by_mask), *whole)
    found = torch.stack(answer.logits).double()
    assert (found - expected).abs().max() < 1e-5
    assert ((found - dense).abs().amax(1) > 1e-3).all()


def only_first(stepped: SteppedPlan) -> SteppedPlan:
    """A plan of the first document alone."""
    found = stepped.select(stepped.plan.tasks.document == 0)
    placement, lengths = found.plan.placement, found.plan.lengths[:1]
    placement = placement.select(placement.document == 0)
    prefix = np.zeros(1, dtype=np.int64)
    return replace(
        found, plan=replace(found.plan, lengths=lengths, placement=placement, cached_prefix=prefix)
    )


@pytest.mark.parametrize(
    ("family", "layout", "ranks_of", "kv_heads", "nodes"),
    [
        ("llama", "sp-tp", 4, 1, 2),
        ("qwen3_moe", "sp-tp", 2, 2, 1),
        ("qwen2", "sp-ntp", 2, 4, 1),
        ("phi3", "sp-ntp", 4, 2, 2),
        ("gemma3_text", "bytes", 4, 2, 1),
    ],
)
def test_layouts_of_split_weights(
    ranks,
    tmp_path: Path,
    full: bool,
    family: str,
    layout: Any,
    ranks_of: int,
    kv_heads: int,
    nodes: int,
) -> None:
    """Rows shared by sequence, on one node and on two, where ranks split the weights."""
    path = str(save_small_model(family, tmp_path, num_key_value_heads=kv_heads))
    sampling = SamplingParams(max_tokens=64) if full else GREEDY
    shared = {"tensor_parallel_size": ranks_of, "layout": layout, "nodes": nodes}
    check(ranks, path, 1, "pass-kv", 4, sampling=sampling, **shared)


def test_ranks_without_keys_and_a_rank_with_all(ranks, tmp_path: Path) -> None:
    """One head of keys; prompts and turns of one token, and prompts that one rank has whole."""
    path = str(save_small_model("llama", tmp_path, num_key_value_heads=1))
    short: Turns = [{0: tokens(1, 0)}, {0: tokens(1, 1)}]
    check(ranks, path, 4, "pass-q", 16, turns=short)
    longer: Turns = [{0: tokens(70, 2)}, {0: tokens(30, 3)}, {0: tokens(1, 4)}]
    once, on_one = SamplingParams(max_tokens=1), Chain(3, (1.0, 0.0, 0.0))
    for strategy in STRATEGIES:
        check(ranks, path, 3, strategy, turns=longer, sampling=once, chain=on_one)
    check(ranks, path, 3, "pass-q", turns=longer, threshold=1000)


def test_long_prompts_are_fed_in_chunks_beside_answers(ranks, models) -> None:
    """Ten prompts of which four run, in iterations of 40 tokens, with few blocks to spare."""
    turns: Turns = [{n: tokens(20 + 13 * n, n) for n in range(10)}]
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 40}
    check(ranks, models["qwen3"], 2, "pass-kv", turns=turns, **few)


@pytest.mark.parametrize("layout", [None, "sp-ntp", "sp-tp"])
def test_bfloat16_is_no_further_from_float32_than_one_process(
    ranks, models, full: bool, layout: LayoutChoice | None
) -> None:
    sampling = SamplingParams(max_tokens=64 if full else 16, temperature=1.0)
    check(
        ranks,
        models["llama"],
        1 if full or layout else 2,
        "pass-q",
        16,
        torch.bfloat16,
        sampling=sampling,
        tensor_parallel_size=4 if full else 2,
        layout=layout,
    )


def test_seeds_repeat_whatever_the_ranks_are(ranks, models) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    answers = [
        [
            each.outputs[0].token_ids
            for each in check(ranks, models["llama"], size, "pass-kv", sampling=sampling)
        ]
        for size in (1, 3)
    ]
    greedy = check(ranks, models["llama"], 2, "pass-kv", sampling=SamplingParams(max_tokens=10))
    assert answers[0] == answers[1] != [each.outputs[0].token_ids for each in greedy]


def test_every_token_is_drawn_anew() -> None:
    """Else all positions, and all sequences, would have the same one of equally likely tokens."""
    sampling, logits = SamplingParams(temperature=1.0), torch.zeros(VOCABULARY)
    assert len({sampling.choose(logits, 0, position) for position in range(50)}) > 30
    assert len({sampling.choose(logits, sequence, 0) for sequence in range(50)}) > 30
    assert len({SamplingParams(64, 1.0, seed).choose(logits, 0, 0) for seed in range(50)}) > 30


def test_one_token_that_is_far_off_is_found_in_bfloat16() -> None:
    """It makes the spread so large that the mean could be chance."""
    theirs = torch.tensor([31.0, 32, 28, 40, 33, 36, 34, 32]) * 1e-4
    ours = theirs[[1, 2, 3, 4, 5, 6, 7, 0]]
    assert _no_further(ours, theirs, routed=False).holds
    ours[1] = 0.06
    assert not _no_further(ours, theirs, routed=False).holds
    assert _no_further(ours, theirs, routed=True).holds, "rounding may choose another expert"
    few = torch.tensor([0.1, math.inf])
    assert not _no_further(torch.tensor([0.1, 0.2]), few, routed=False).holds


def test_a_wrong_answer_is_found(models) -> None:
    """The comparison sees another token and other logits."""
    model = read_model(models["llama"], torch.float32)
    prompt = tokens(5, 9)
    with torch.no_grad():
        logits = model.load(torch.device("cpu"), "eager")(torch.tensor([prompt])).logits[0, -1]
    best = logits.topk(2).indices.tolist()
    for token, row, holds in (
        (best[0], logits, True),
        (best[1], logits, False),
        (best[0], logits + 1e-3, False),
    ):
        found = compare(
            model, [RequestOutput(prompt, [Completion([token], logits=[row])])], greedy=True
        )
        assert found.holds == holds, found.line


def test_bfloat16_further_than_one_processs_is_found(models) -> None:
    model, ids = read_model(models["llama"], torch.bfloat16), tokens(41, 9)
    with torch.no_grad():
        theirs, exact = (
            replace(model, dtype=dtype)
            .load(torch.device("cpu"), "sdpa")(torch.tensor([ids[:-1]]))
            .logits[0]
            .float()
            for dtype in (torch.bfloat16, torch.float32)
        )
    for first in (1, 36):
        for times, holds in ((1.0, True), (1.3 if first == 1 else 2.5, False)):
            off = [*(exact + times * (theirs - exact))[first - 1 :]]
            answer = Completion(ids[first:], logits=off)
            found = compare(model, [RequestOutput(ids[:first], [answer])], greedy=False)
            assert found.holds == holds, found.line


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    import transformers

    for number, (config, why) in enumerate(
        (
            (transformers.DeepseekV3Config(), "multi-latent attention"),
            (transformers.GPT2Config(), "is a gpt2"),
        )
    ):
        config.save_pretrained(tmp_path / str(number))
        with pytest.raises(ValueError, match=why):
            read_model(str(tmp_path / str(number)), torch.float32)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_model(str(tmp_path / "empty"), torch.float32)


def test_positions_end_where_rotary_frequencies_change(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rotary = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    changes = {"rope_parameters": rotary | {"rope_theta": 1e4}}
    path = save_small_model("phi3", tmp_path, original_max_position_embeddings=1024, **changes)
    model = read_model(str(path), torch.float32)
    assert (model.positions, model.frequencies) == (1024, "those of transformers' code")


def test_windows_do_not_count_the_query_itself(models) -> None:
    model: ServedModel = read_model(models["gemma3_text"], torch.float32)
    assert model.windows == (23, None, 23)

"""Models with multi-latent attention in the simulator: sizes, seconds, memory."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from distca.commands.command_line import Parser
from distca.commands.described import add_model_flags, model_of
from distca.commands.main import main
from distca.cost.model_sizes import MODELS, Latents, ModelSize
from distca.cost.volume import PHASES, AttentionShape, plan_bytes
from distca.schedule import ExecutionOptions, ScheduleConfig
from distca.simulate import (
    CLUSTERS,
    Candidate,
    ModelCosts,
    Workload,
    plan_global_batch,
    simulate,
    simulate_ticks,
    training_flags,
)
from distca.simulate.advice import advise
from distca.simulate.variants import (
    with_kept_inputs,
    with_less_memory,
)
from support.simulated import MODEL

CLUSTER = CLUSTERS["dgx-h200"]
SLOW = replace(CLUSTER, linear_mfu=CLUSTER.linear_mfu / 4)
"""Expanding latents takes longer than putting wider rows in messages and out."""
LATENT = replace(MODEL, kv_heads=8, head_dim=96, latents=Latents(128, 32, 64, 192))
"""Of 8 heads and a width of 512."""


def test_sizes_are_those_of_the_report() -> None:
    """37B parameters for a token; its first three of 61 layers are dense, and here none is."""
    model = MODELS["deepseek-v3-like"]
    used = model.layers * model.layer_parameters + 2 * model.vocabulary_parameters
    assert used / 1e9 == pytest.approx(37, rel=0.01)
    layers = 58 * model.total_layer_parameters
    dense = 3 * (model.layer_parameters - model.mlp_parameters + 3 * 7168 * 18_432)
    assert (layers + dense + 2 * model.vocabulary_parameters) / 1e9 == pytest.approx(671, rel=0.002)
    assert model.attention_shape(8) == AttentionShape(16, 16, 192, 2, 128)


def test_parameters_and_operations() -> None:
    queries, keys = 512 * 192 + 192 * 8 * 96, 512 * (128 + 32) + 128 * 8 * (64 + 64)
    assert LATENT.pre_parameters == queries + keys
    assert LATENT.post_parameters == 8 * 64 * 512 + 3 * 512 * 1024
    whole = replace(LATENT, latents=replace(LATENT.latents, q_rank=None))
    assert whole.pre_parameters == 512 * 8 * 96 + keys
    linear = 2 * (LATENT.layers * LATENT.layer_parameters + LATENT.vocabulary_parameters)
    pairs = LATENT.layers * 2 * 8 * (96 + 64)
    assert LATENT.training_flops(10, 30) == 3 * (10 * linear + 30 * pairs)


def test_kept_bytes_and_fixed_times() -> None:
    costs = ModelCosts(LATENT, CLUSTER, 2)
    kept = 4 * 512 + 8 * (96 + 64) * 2 + 192 + 128 + 32
    without_mlp = replace(costs, recompute="mlp").activation_bytes()
    assert without_mlp == (kept * 2 + 4 * 8) / 2
    # The latents of both are not shared, and what they are expanded to is.
    outputs = 192 + 128 + 32 + 8 * (96 + 64 + 64) / 2
    found = costs._half_waves(512 + 192 + 512 + 128, outputs)
    assert costs.pre_launch_seconds() == found


def test_a_job_is_simulated_and_rows_are_as_wide_as_expanded() -> None:
    batch = [np.array([6000, 2192]), np.array([1024] * 8)] * 4
    found = []
    for model in (LATENT, replace(MODEL, kv_heads=8, head_dim=96)):
        workload = Workload(model, CLUSTER, 8, 8192, 8, 0.1, "mlp")
        outcome = simulate(Candidate("tiles", 1, 1, 8, 1, 1), workload, batch)
        assert outcome.fits
        found.append(outcome)
    # Values and outputs are narrower than keys and queries.
    assert found[0].seconds < found[1].seconds


def test_what_latents_need() -> None:
    with pytest.raises(ValueError, match="a key for each of its 8 heads"):
        replace(LATENT, kv_heads=2)
    with pytest.raises(ValueError, match="more than the 96 elements that are rotated"):
        replace(LATENT, latents=replace(LATENT.latents, rotated_dim=96))


def described(flags: str, training: bool = True) -> ModelSize:
    parser = Parser("simulate", "", "")
    add_model_flags(parser, training)
    return model_of(parser.parse(flags.split()))


def test_flags() -> None:
    preset = MODELS["deepseek-v3-like"]
    assert described("--model deepseek-v3-like") == preset
    narrow = described("--model deepseek-v3-like --v-head-dim 64 --layers 30")
    assert narrow == replace(preset, layers=30, latents=replace(preset.latents, v_head_dim=64))
    whole = described(
        "--model llama-8b --kv-heads 32 --kv-lora-rank 512 --qk-pos-emb-head-dim 64 --v-head-dim 80"
    )
    assert whole.latents == Latents(512, 64, 80)
    for flags, message in (
        ("--kv-lora-rank 512", "latent attention needs --qk-pos-emb-head-dim, --v-head-dim, too"),
        ("--kv-lora-rank 0", "--kv-lora-rank 0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            described(f"--model llama-8b --kv-heads 32 {flags}")
    with pytest.raises(ValueError, match="with latents: only their training is simulated"):
        described("--model deepseek-v3-like", training=False)


def test_a_plan_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--distribution pretrain --servers 4 --tokens-per-server 4096 --json --latent-rows off"
    plans = []
    for model in ("--model deepseek-v3-like", "--v-head-dim 128", ""):
        heads = [] if "--model" in model else ["--heads", "128", "--head-dim", "192"]
        assert main(["plan", *flags.split(), *heads, *model.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        # But for the time that planning took.
        plans.append({name: value for name, value in found.items() if "seconds" not in name})
    assert plans[0] == plans[1] != plans[2]


def test_a_plan_sends_latents_where_that_takes_less_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--distribution pretrain --servers 4 --tokens-per-server 4096 --json"
    flags += " --model deepseek-v3-like --tensor-model-parallel-size 8"
    moved = []
    for more in ("", "--latent-rows on", "--latent-rows off"):
        assert main(["plan", *flags.split(), *more.split()]) == 0
        moved.append(json.loads(capsys.readouterr().out)["bytes_total"])
    # A latent is a ninth of keys and values.
    assert moved[0] == moved[1] < moved[2] / 5


def test_simulated_bytes_of_latents_are_the_plans() -> None:
    costs = ModelCosts(LATENT, CLUSTER, sends_latents=True)
    shape = costs.comm_shape
    config = ScheduleConfig(shape=shape, cost_model=CLUSTER.attention_cost(costs.shape))
    windows = [np.array([6000, 2192, *[1024] * 8])]
    planned = plan_global_batch(windows, 1, 8, config, ExecutionOptions("tiles"))
    outcome = simulate_ticks(planned, costs)
    for phases, tick in zip((PHASES[:2], PHASES[2:]), planned.ticks, strict=True):
        for phase in phases:
            sent = sum(plan_bytes(plan, shape).phases[phase].sum(axis=1) for plan in tick.plans)
            assert outcome.bytes_sent[phase].tolist() == (LATENT.layers * sent).tolist()
    assert outcome.bytes_sent["combine_backward"].any()


def test_simulated_latents_are_fewer_bytes_and_more_products() -> None:
    batch = [np.array([6000, 2192]), np.array([1024] * 8)] * 4
    candidate = Candidate("tiles", 1, 1, 8, 1, 1)
    sent, computed = [], []
    for rows in ("on", "off"):
        workload = Workload(LATENT, SLOW, 8, 8192, 8, 0.1, "mlp", latent_rows=rows)  # type: ignore[arg-type]
        costs = workload.costs_of(candidate)
        assert costs.sends_latents == (rows == "on")
        outcome = simulate(candidate, workload, batch)
        sent.append(sum(int(each.sum()) for each in outcome.bytes_sent.values()))
        computed.append(float(outcome.computed.sum()))
    # Keys of 768 and values of 512 elements, or latents of 128 and 32.
    assert sent[0] < sent[1] / 4
    assert computed[0] > computed[1]
    flags = training_flags(candidate, replace(workload, latent_rows="on"))
    assert "--distca-latent-rows on" in flags
    assert "--distca-latent-rows off" in training_flags(candidate, workload)
    # Other stages' servers have not the weights.
    pooled = Candidate("tiles", 1, 2, 4, 1, 4)
    assert not replace(workload, latent_rows="on").costs_of(pooled).sends_latents


@pytest.mark.parametrize(("gpus_per_node", "latents_are_faster"), [(8, False), (1, True)])
def test_advice_sends_what_is_faster(gpus_per_node: int, latents_are_faster: bool) -> None:
    """Expanding takes time that fast links do not need for keys and values."""
    # No pool of one rank has its share of the work, so that rows travel.
    batch = [np.array([8192]), np.array([1024] * 8)] * 4
    cluster = replace(SLOW, gpus_per_node=gpus_per_node)
    workload = Workload(LATENT, cluster, 8, 8192, 8, 0.1, "mlp")
    seconds = {
        (ping_pong, latents): simulate(
            Candidate("tiles", 1, 1, 8, 1, 1, ping_pong=ping_pong, may_send_latents=latents),
            *(workload, batch),
        ).seconds
        for ping_pong in (False, True)
        for latents in (False, True)
    }
    assert (seconds[True, True] < seconds[True, False]) == latents_are_faster
    best = advise(workload, [batch], ["tiles"], [1], [1], 1)[0]
    assert best.candidate is not None
    # Without ping-pong, exchanges cost latents less of a lead.
    assert best.seconds <= min(seconds.values())
    assert best.candidate.may_send_latents == min(seconds, key=lambda each: seconds[each])[1]


def test_keys_and_values_travel_where_latents_do_not_fit() -> None:
    workload = Workload(LATENT, CLUSTER, 8, 8192, 8, 0.1, "mlp")
    latents = Candidate("tiles", 1, 1, 8, 1, 1)
    found, shared = with_less_memory(latents, workload)
    assert found == replace(latents, may_send_latents=False)
    assert not workload.costs_of(found).sends_latents
    assert shared.head_parallel == 8
    assert not workload.costs_of(shared).sends_latents
    assert with_less_memory(found, workload) == [replace(found, head_parallel=8)]
    assert not with_less_memory(replace(found, head_parallel=8), workload)
    # Latents are expanded again, so that there is no use in keeping what they became.
    kept = [bool(with_kept_inputs(each, workload)) for each in (latents, found)]
    assert kept == [False, True]
    # What is asked to travel does.
    assert not with_less_memory(latents, replace(workload, latent_rows="on"))

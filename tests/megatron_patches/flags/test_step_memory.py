"""Memory of a step by training's flags, beside the simulator's of the same job."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from distca.cost.model_sizes import Experts, Latents, ModelSize
from distca.cost.training_memory import Recompute
from distca.simulate import CLUSTERS, Candidate, Workload
from distca.simulate.flags import training_flags
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.planning import PlannerConfig
from megatron_patches.flags.step_memory import JobMemory, step_memory
from support.arguments import parse

MODEL = ModelSize(8, 512, 8, 4, 64, 1536, 1024)
JOB = Workload(MODEL, CLUSTERS["dgx-h200"], 16, 8192, 8)
LAYERS = (
    "--swiglu --untie-embeddings-and-output-weights --num-layers 8 --hidden-size 512 "
    "--num-attention-heads 8 --ffn-hidden-size 1536 --vocab-size 1023"
)


def memory_of(flags: str, world_size: int = 16) -> JobMemory:
    args = parse(*shlex.split(flags), world_size=world_size)
    config = DistcaConfig.from_args(args)
    planning = PlannerConfig.from_args(config, args, args.data_parallel_size)
    costs = step_memory(config, args, planning.schedule.shape, planning.layer_groups).costs
    assert isinstance(costs, JobMemory)
    return costs


@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
@pytest.mark.parametrize(
    ("model", "more", "sizes"),
    [
        (MODEL, "--kv-channels 64 --group-query-attention --num-query-groups 4", {"tensor": 2}),
        (
            replace(MODEL, experts=Experts(8, 2, 256)),
            "--kv-channels 64 --group-query-attention --num-query-groups 4 --num-experts 8 "
            "--moe-router-topk 2 --moe-ffn-hidden-size 256 "
            "--moe-shared-expert-intermediate-size 1536",
            {"data": 16, "pool_size": 16},
        ),
        (
            replace(MODEL, kv_heads=8, head_dim=96, latents=Latents(128, 32, 64, 192)),
            "--multi-latent-attention --kv-lora-rank 128 --q-lora-rank 192 --qk-head-dim 64 "
            "--qk-pos-emb-head-dim 32 --v-head-dim 64",
            {"stages": 2},
        ),
    ],
    ids=["grouped", "experts", "latents"],
)
def test_it_is_the_simulators(
    model: ModelSize, more: str, sizes: dict[str, int], recompute: Recompute
) -> None:
    """Of what `distca simulate` prints."""
    job = replace(JOB, model=model, recompute=recompute, expert_parallel=4 if model.experts else 1)
    candidate = replace(Candidate("tiles", 1, 1, 8, 1, 2, pool_size=2), **sizes)
    expected = job.costs_of(candidate)
    flags = " ".join(training_flags(candidate, job))
    assert f"--distca-memory-gb {job.cluster.usable_bytes / 1e9:g}" in flags
    found = memory_of(
        f"{LAYERS} {more} {flags}", candidate.tensor * candidate.stages * candidate.data
    )
    assert found.activation_bytes() == pytest.approx(expected.activation_bytes())
    assert found.recomputed_bytes() == pytest.approx(expected.recomputed_bytes())
    assert found.logit_bytes() == expected.logit_bytes()
    assert found.kept_logit_bytes() == expected.kept_logit_bytes()
    for stage in range(candidate.stages):
        ours, theirs = (
            each.state_bytes(stage, candidate.stages, candidate.data) for each in (found, expected)
        )
        assert ours == pytest.approx(theirs)


def test_flags_that_the_simulator_has_not() -> None:
    base = f"{LAYERS} --kv-channels 64 --bf16 --distca --distca-pool-size 16 --seq-length 256"
    base += " --global-batch-size 32 --use-distributed-optimizer"
    usual = memory_of(base)
    parameters = usual.stage_parameters(0, 1)
    vocabulary, mlps = 1024 * 512, 8 * 512 * 1536

    def of(more: str, without: str = "--none") -> JobMemory:
        return memory_of(f"{base.replace(without, '')} {more}")

    tied = of("", "--untie-embeddings-and-output-weights")
    assert parameters - tied.stage_parameters(0, 1) == vocabulary
    assert tied.stage_parameters(0, 2) == usual.stage_parameters(0, 2)
    plain = of("", "--swiglu")
    assert parameters - plain.stage_parameters(0, 1) == mlps
    # One of its three activations is none.
    assert usual.activation_bytes() - plain.activation_bytes() == 1536 * 2
    assert of("", "--use-distributed-optimizer").state_bytes(0, 1, 16) == 18 * parameters
    assert usual.state_bytes(0, 1, 16) == (6 + 12 / 16) * parameters
    alternating = of("--num-experts 4 --moe-router-topk 2 --moe-layer-freq 2")
    every = of("--num-experts 4 --moe-router-topk 2")
    assert alternating.stage_expert_parameters(1) == every.stage_expert_parameters(1) / 2
    shared = "--distca-pool-size 8 --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
    apart = of(shared).activation_bytes() - of(f"{shared} --sequence-parallel").activation_bytes()
    assert apart == 4 * 512 * 2 / 2
    full = "--recompute-granularity full --recompute-method"
    pairs = of(f"{full} uniform --recompute-num-layers 2")
    assert pairs.activation_bytes() == 512 * 2 / 2
    assert pairs.recomputed_bytes() == 2 * usual.activation_bytes()
    blocks = of(f"{full} block --recompute-num-layers 2")
    assert blocks.activation_bytes() == (2 * 512 * 2 + 6 * usual.activation_bytes()) / 8
    assert blocks.recomputed_bytes() == usual.activation_bytes()

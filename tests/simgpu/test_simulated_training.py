"""Training with `--distca` on simulated GPUs: losses and gradients of CPUs, and nothing races."""

from __future__ import annotations

import json
import pickle
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.models import StepsDone, train, whole_gradients
from support.parity import RECOMPUTE, WHOLE, relative
from support.pipelines import WINDOW, documents
from support.pretraining import FLAGS, LOSS, TOKENIZER, run
from support.simgpu.machine import Machine, built_or_skip
from support.simgpu.order import out_of_order
from support.simgpu.packages import WITHOUT_PACKAGES

RANKS = 2
WAITS = re.compile(r" at (distca/|megatron_patches/(?!model/cuda_graphs))")
"""Waits of our own, whose place is in the project."""
BUDGETS: dict[str, dict[str, int]] = json.loads(
    (Path(__file__).parent / "training_budgets.json").read_text()
)
"""Most launches of all ranks together, and waits of one, in a step of each job."""

LENGTHS = [*(1, 300, 5, 1, 129, 588), *(200, 700, 124), 1024, *([128] * 8)]
GROUPED = "--group-query-attention --num-query-groups 2".split()
WHOLE_WINDOWS = [*GROUPED, *"--seq-length 1024 --global-batch-size 4".split()]
HALVES = [*GROUPED, *"--seq-length 512 --global-batch-size 8".split()]
STAGES = f"""
    --seq-length {WINDOW} --global-batch-size 3 --num-layers 4 --pipeline-model-parallel-size 2
""".split()
LATENT = f"""
    --seq-length {WINDOW // 2} --global-batch-size 6 --multi-latent-attention --q-lora-rank 24
    --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm
    --rotary-scaling-factor 4 --mscale-all-dim 0.7
""".split()
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-layer-freq [1]*2
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.5 --expert-model-parallel-size 2 --distca-placement sequential
""".split()
OVERLAPPING = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel".split()
KEEP, WINDOWS = ["--distca-backward", "keep"], ["--window-size", "100,0"]


@dataclass(frozen=True)
class Job:
    """See `support.simgpu.training.Job`."""

    ranks: int
    flags: list[str]
    lengths: list[int]
    steps: int = 1
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] = (9, 0)


def job(*flags: str, ranks: int = RANKS, steps: int = 1, windows: bool = False) -> Job:
    """A job with `--distca`; `windows`: its documents are those of pipelines."""
    return Job(ranks, ["--distca", *flags], (documents(3) if windows else LENGTHS) * steps, steps)


PACKAGES = ("flash-attn-3", "flash-attn-4")
SHORT_WINDOWS = [*GROUPED, *"--seq-length 256 --global-batch-size 4".split()]
BOTH = replace(job(*HALVES), packages=PACKAGES)


JOBS = {
    "one rank": job(*WHOLE_WINDOWS, ranks=1),
    "ping-pong": job(*HALVES),
    "keep, windows, whole": job(*HALVES, *KEEP, *WINDOWS, WHOLE),
    "greedy, recomputed": job(*HALVES, "--distca-scheduler", "greedy", *RECOMPUTE),
    "TP2-SP": job(*WHOLE_WINDOWS, *SPLIT),
    "PP2": job(*GROUPED, *STAGES, windows=True),
    "token prediction, PP2": job(*GROUPED, *STAGES, "--mtp-num-layers", "1", windows=True),
    "dedicated": job(*WHOLE_WINDOWS, "--distca-servers", "dedicated:1"),
    "latents, keep": job(*LATENT, *KEEP, windows=True),
    "experts": job(*HALVES, *EXPERTS),
    "graphs": job(*HALVES, "--distca-cuda-graphs"),
    "sharded optimizer": job(*HALVES, *OVERLAPPING, steps=2),
    "FlashAttention 3": BOTH,
    "FlashAttention 4 on Blackwell": replace(BOTH, capability=(10, 0)),
    "calls, ping-pong": job(*SHORT_WINDOWS, steps=3),
    "calls, whole": job(*SHORT_WINDOWS, WHOLE, steps=3),
}
ONLY_FULL = "calls, ping-pong", "calls, whole"
"""Jobs whose launches are counted for a page alone."""
EACH = [pytest.param(name, marks=pytest.mark.full if name in ONLY_FULL else ()) for name in JOBS]
NORMS_APART = {"token prediction, PP2": 5e-4}
"""Where gradient norms differ more than elsewhere: there are three more norms behind each other."""
KERNELS = {
    "FlashAttention 3": {"flash_attn_3::fwd", "flash_attn_3::bwd"},
    "FlashAttention 4 on Blackwell": {"flash_attn_4::fwd", "flash_attn_4::bwd"},
}
"""Operators of attention where not torch's own run."""


MORE = "--train-iters 5 --hidden-dropout 0 --bf16 --transformer-impl local".split()


def test_a_checkpoint_of_gpus_is_loaded_on_a_cpu(corpus: str, tmp_path: Path) -> None:
    """The whole loop, as a user starts it; the losses after the checkpoint are the same."""
    built_or_skip()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "pretrain_gpt.py", *TOKENIZER, *FLAGS]
    command += ["--data-path", corpus, "--distca", *MORE, *WITHOUT_PACKAGES]
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    ran = Machine(RANKS).run([*command, *save], seconds=500, PYTHONUNBUFFERED="1")
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    losses = {int(number): float(loss) for number, loss in LOSS.findall(ran.stdout)}
    load = ["--load", str(tmp_path), "--ckpt-step", "2"]
    continued, _ = run(1, corpus, "--distca", *MORE, *load)
    assert {int(number): float(loss) for number, loss in continued.items()} == {
        number: pytest.approx(losses[number], rel=2e-3) for number in (3, 5)
    }


@pytest.fixture(scope="module")
def on_gpus(full: bool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw of each job; all run in the same processes."""
    built_or_skip()
    folder = tmp_path_factory.mktemp("trained")
    jobs = {name: asdict(each) for name, each in JOBS.items() if full or name not in ONLY_FULL}
    command = [sys.executable, "-m", "support.simgpu.training"]
    Machine(RANKS).run_ranks(
        [[*command, json.dumps([jobs, rank, str(folder)])] for rank in range(RANKS)],
        # Megatron refuses tensor parallelism without.
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    return [pickle.loads((folder / f"rank {rank}").read_bytes()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def on_cpus() -> dict[str, list[StepsDone]]:
    """What ranks without GPUs found, by their flags and documents."""
    return {}


def _expected(ranks: Any, on_cpus: dict[str, list[StepsDone]], each: Job) -> list[StepsDone]:
    """What as many ranks find on CPUs, which run what several jobs have in common once."""
    flags = ["--bf16", *(flag for flag in each.flags if flag != "--distca-cuda-graphs")]
    its = flags, each.lengths, each.steps
    key = repr((its, each.ranks))
    if key not in on_cpus:
        on_cpus[key] = ranks.run(train, *its, world_size=each.ranks)
    return on_cpus[key]


@pytest.mark.parametrize("name", EACH)
def test_losses_and_gradients_are_the_cpus_and_nothing_races(
    ranks: Any, on_gpus: list[dict[str, Any]], on_cpus: dict[str, list[StepsDone]], name: str
) -> None:
    each = JOBS[name]
    expected = _expected(ranks, on_cpus, each)
    found = [its[name] for its in on_gpus[: each.ranks]]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.races == []
        assert mine.done.bytes_counted == theirs.bytes_counted
        # Norms round differently in their backward pass, so later steps differ more.
        assert mine.done.losses[:1] == pytest.approx(theirs.losses[:1], rel=1e-6)
        apart = NORMS_APART.get(name, 3e-4)
        assert mine.done.grad_norms[:1] == pytest.approx(theirs.grad_norms[:1], rel=apart)
        assert mine.done.losses == pytest.approx(theirs.losses, rel=1e-3)
    if not expected[0].gradients:
        return
    gradients = whole_gradients([its.done for its in found])
    wanted = whole_gradients(expected)
    assert gradients.keys() == wanted.keys()
    differences = {key: relative(gradients[key], wanted[key]) for key in wanted}
    assert max(differences.values()) < 0.01, differences


@pytest.mark.parametrize("name", [each for each in EACH if JOBS[str(each.values[0])].ranks > 1])
def test_ranks_ask_nccl_in_one_order(on_gpus: list[dict[str, Any]], name: str) -> None:
    calls = {its[name].process: its[name].calls for its in on_gpus}
    assert all(calls.values())
    assert out_of_order(calls) == []


@pytest.mark.parametrize("name", EACH)
def test_the_kernel_of_the_gpu_runs(on_gpus: list[dict[str, Any]], name: str) -> None:
    """The fastest of those that are installed, in both passes."""
    torchs = {"_flash_attention_forward", "_flash_attention_backward"}
    for its in on_gpus[: JOBS[name].ranks]:
        assert its[name].kernels == KERNELS.get(name, torchs)


@pytest.mark.parametrize("name", EACH)
def test_a_step_keeps_to_its_budget(on_gpus: list[dict[str, Any]], name: str) -> None:
    """A change that costs more launches or waits shows as a larger number in the file.

    What waits in a step is Megatron's, and nothing of ours but the capture of graphs.
    """
    ranks = [its[name] for its in on_gpus[: JOBS[name].ranks]]
    # A dedicated server has no steps.
    found = [its for its in ranks if its.done.losses]
    spent = {
        "launches": sum(its.launches for its in found),
        "syncs": max(sum(its.syncs.values()) for its in found),
        # Of two steps, in which nothing is made for the first time.
        "two schedule calls": max(sum(its.scheduled[-2:]) for its in found),
    }
    budget = BUDGETS[name]
    assert all(spent[kind] <= most for kind, most in budget.items()), (spent, budget)
    ours = {place for its in found for place in its.syncs if WAITS.search(place)}
    assert not ours, ours

"""Models with latent attention and with experts in whole runs, through checkpoints.

Each gradient is held against a run without `--distca`. For checkpoints the reference is a run
without it in one process, with megatron-core's dense core attention: other runs load the weights
that it began with, on two ranks with `--distca` and documents that span them, and have its losses
and the norm of its gradients.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.own_loop import OwnLoop, sizes
from support.pretraining import LOSS, run_command, separate
from support.whole_runs import write_documents

GRADIENTS = re.compile(r"iteration +(\d+)/.*? grad norm: (\S+) \|")
FLAGS = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --max-position-embeddings 512 --lr 3e-3 --lr-decay-style constant
    --weight-decay 0.1 --train-iters 5 --tokenizer-type NullTokenizer --vocab-size 100
    --make-vocab-size-divisible-by 64 --split 100,0,0 --log-interval 1 --eval-iters 0
""".split()
LATENTS = """
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm --rotary-scaling-factor 4
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
    --moe-token-dispatcher-type alltoall
"""
# Averaged over a micro-batch's tokens on all ranks.
BALANCED = """
    --moe-layer-freq [0,1] --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.5
    --moe-z-loss-coeff 0.1
"""
# Without losses of the router's, which megatron-core weighs by the tensor-parallel size up to 0.18;
# and so placement is free.
UNBALANCED = "--moe-layer-freq [0,1,1,1] --moe-router-load-balancing-type none"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1".split()
EP2 = ["--expert-model-parallel-size", "2"]
SHARDED = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1".split()
)
LAYOUTS = {
    "DP2-PP2-VPP2-EP2, chain": (4, [*sizes(128, 2, chain=2), *VIRTUAL, *EP2]),
    # Experts that tensor-parallel ranks have all of, megatron-core trains wrong up to 0.18.
    "TP2-SP-PP2-VPP2-EP2": (4, [*sizes(512), *VIRTUAL, *SHARDED, *EP2]),
    "DP2": (2, sizes(256, 2)),
}
WINDOW, HALF = ("--seq-length 512 --global-batch-size 2", "--seq-length 256 --global-batch-size 4")
# Documents stay in their micro-batch, over which losses of balance are averaged.
SHARED_EXPERTS = f"""
    {HALF} --distca-placement sequential --no-distca-ping-pong --expert-model-parallel-size 2
"""
# The optimizers of one process and of ranks that share experts keep different things.
WEIGHTS = "--no-load-optim --no-load-rng"


@dataclass(frozen=True)
class Seen:
    """What a run printed, by iteration."""

    losses: dict[int, float]
    norms: dict[int, float]

    def check(self, expected: Seen, begin: int) -> None:
        """They are those of another run from an iteration on, of which there are two or more."""
        assert min(self.losses) == begin
        for iteration in (begin, begin + 1):
            wanted = expected.losses[iteration]
            assert abs(self.losses[iteration] / wanted - 1) < 2e-6, iteration
            assert self.norms[iteration] == pytest.approx(expected.norms[iteration], abs=0.0011)


def train(processes: int, *flags: str) -> Seen:
    arguments = [*FLAGS, *f"{LATENTS} {EXPERTS} {BALANCED}".split()]
    output = run_command(processes, [*arguments, *" ".join(flags).split()])
    losses, norms = (
        {int(number): float(value) for number, value in pattern.findall(output)}
        for pattern in (LOSS, GRADIENTS)
    )
    return Seen(separate(losses), norms)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    return "--data-path " + write_documents(folder / "documents", [500, 130, 256, 70] * 20)


def saved_at(folder: Path, iteration: int) -> str:
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return f"--load {folder}"


def reference(data: str, folder: Path) -> tuple[Seen, str]:
    """A run's third step and those after it, and the flags that load what it had before."""
    plain = f"{data} {WINDOW} --attention-backend unfused"
    train(1, plain, f"--train-iters 2 --save {folder} --save-interval 2")
    load = f"{saved_at(folder, 2)} {WEIGHTS}"
    return train(1, plain, load), load


def test_all_gradients(tmp_path: Path, full: bool) -> None:
    """Also with virtual stages, and micro-batches smaller than a document."""
    loop = OwnLoop(tmp_path, f"{LATENTS} {EXPERTS} {UNBALANCED}".split())
    for part in ("linear_kv_up_proj", "experts", "router"):
        assert any(part in name for name in loop.expected), part
    for processes, flags in list(LAYOUTS.values())[: None if full else 1]:
        loop.check(processes, "--distca", *flags)


def test_experts_go_on_from_a_checkpoint(data, tmp_path) -> None:
    shared = f"{data} {SHARED_EXPERTS} --distca"
    expected, load = reference(data, tmp_path / "one")
    save = f"--save {tmp_path / 'two'} --save-interval 3"
    train(2, shared, save, load).check(expected, 3)
    train(2, shared, saved_at(tmp_path / "two", 3)).check(expected, 4)

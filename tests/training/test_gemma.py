"""Layers of Gemma 2 and 3 with `--distca`, against a dense mask on one process."""

from __future__ import annotations

import pytest

from support.models import StepsDone, parse, start_processes, train
from support.parity import RECOMPUTE, WHOLE
from support.pipelines import SIZES, WINDOW, check, documents, flags_of
from support.ranks import forget_megatron

MICRO_BATCHES = 3
LAYERS = {
    "gemma 2": "--spec support.own_layers SMALL_CAPS",
    "gemma 3": "--spec megatron_patches.model.gemma GEMMA3_27B --qk-layernorm "
    "--rotary-seq-len-interpolation-factor 4 --rotary-base 100000",
}
COMMON = (
    "--apply-layernorm-1p --window-size 99,0 --window-attn-skip-freq 2 --kv-channels 24".split()
)
PLAIN = [*SIZES, "--seq-length", str(WINDOW), "--global-batch-size", str(MICRO_BATCHES)]
HALVES = [*SIZES, "--seq-length", str(WINDOW // 2), "--global-batch-size", str(2 * MICRO_BATCHES)]
CHAIN = 3
CHAINED = [*SIZES, "--seq-length", str(WINDOW // 2 // CHAIN), "--distca", "--distca-chain"]
CHAINED += [str(CHAIN), "--global-batch-size", str(2 * CHAIN * MICRO_BATCHES)]


def run(ranks, family: str, flags: list[str], world_size: int) -> list[StepsDone]:
    given = [*flags, *LAYERS[family].split(), *COMMON]
    # Embeddings are tied in all models of the families.
    return ranks.run(train, given, documents(MICRO_BATCHES), 1, True, world_size=world_size)


@pytest.fixture(scope="module")
def plain(ranks) -> dict[str, StepsDone]:
    """Megatron's dense attention, with what the families add."""
    flags = [*PLAIN, "--attention-backend", "unfused"]
    return {family: run(ranks, family, flags, 1)[0] for family in LAYERS}


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, PLAIN, id="packed documents"),
        pytest.param(2, [*HALVES, "--distca", "--distca-backward", "keep"], id="kept inputs"),
        pytest.param(3, [*HALVES, "--distca", "--distca-servers", "dedicated:1"], id="dedicated"),
        pytest.param(*flags_of("TP2-SP-PP2", MICRO_BATCHES), id="TP2-SP-PP2"),
        pytest.param(
            *(2, [*HALVES, "--distca", WHOLE, *RECOMPUTE]), id="recomputed", marks=pytest.mark.full
        ),
        pytest.param(
            *(2, [*PLAIN, "--distca", "--tensor-model-parallel-size", "2"]),
            id="TP2",
            marks=pytest.mark.full,
        ),
        pytest.param(2, CHAINED, id="chain", marks=pytest.mark.full),
    ],
)
def test_losses_gradients_and_bytes(
    ranks, plain: dict[str, StepsDone], family: str, world_size: int, flags: list[str]
) -> None:
    check(run(ranks, family, flags, world_size), plain[family], flags)


def replicas(flags: list[str]) -> set[tuple[int, int]]:
    """What number a checkpoint gives this rank's copies of the norms, and its own."""
    from megatron.core import parallel_state

    from megatron_patches.parts import build_model

    args = parse(flags)
    start_processes(args)
    found = build_model(args).sharded_state_dict(prefix="")
    rank = parallel_state.get_tensor_model_parallel_rank()
    forget_megatron()
    return {(each.replica_id[1], rank) for name, each in found.items() if "norm.weight" in name}


def test_one_rank_saves_a_norm_that_all_have(ranks) -> None:
    flags = [*PLAIN, *LAYERS["gemma 2"].split(), "--tensor-model-parallel-size", "2"]
    assert ranks.run(replicas, flags, world_size=2) == [{(0, 0)}, {(1, 1)}]


def built_with_megatrons_attention(flags: list[str]) -> str:
    """The error of layers that Megatron-LM's own script builds."""
    from megatron.core.models.gpt import GPTModel
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_patches.model.gemma import GEMMA2

    args = parse(flags)
    start_processes(args)
    try:
        GPTModel(core_transformer_config_from_args(args), GEMMA2, 256, 64)
    except ValueError as error:
        return str(error)
    finally:
        forget_megatron()
    return ""


def test_megatrons_own_attention_is_refused(ranks) -> None:
    (said,) = ranks.run(built_with_megatrons_attention, PLAIN, world_size=1)
    assert "need DistCA's core attention and embeddings: run DistCA's pretrain_gpt.py" in said

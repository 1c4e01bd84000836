"""Global batches that grow, with `--distca` and without: sizes, losses, learning rate, resuming."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core import num_microbatches_calculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from support.versions import EVALUATES_BY_ITS_OWN_SIZE
from support.whole_runs import RunSeen, whole_run, write_documents

WORLD_SIZE, LENGTH = 2, 128
SAMPLES, WARMUP, DECAY = 44, 9, 40
# Sizes of the iterations: four up to the sample 14, eight up to 26, then twelve.
SIZES = [4, 4, 4, 4, 8, 8, 12]
HAS_RAMPUP = hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")
GROWTH = (
    "--global-batch-size 12 --rampup-batch-size 4 4 27".split()
    if HAS_RAMPUP
    else ["--step-batch-size-schedule", f"0:4 {14 * LENGTH}:8 {27 * LENGTH}:12"]
)
SAVED = 5
FLAGS = f"""
    --seq-length {LENGTH} --split 60,30,10 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
    --lr-warmup-samples {WARMUP} --lr-decay-samples {DECAY} --train-samples {SAMPLES}
    --eval-interval 3 --eval-iters 1 {"--eval-global-batch-size 8" * EVALUATES_BY_ITS_OWN_SIZE}
    --distca-max-document-length {LENGTH // 2}
""".split()


@dataclass(frozen=True)
class Runs:
    """What each rank saw of a whole run, and of its rest after a checkpoint while batches grew."""

    whole: list[RunSeen]
    resumed: list[RunSeen]


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory) -> dict[str, Runs]:
    folder = tmp_path_factory.mktemp("growing")
    # In pieces of half a sample, none of which plain Megatron would cut where a rank's tokens end.
    lengths = LENGTH // 2 * np.random.default_rng(1).integers(1, 6, 200)
    prefix = write_documents(folder / "documents", lengths.tolist())
    flags = [*FLAGS, *GROWTH, "--data-path", prefix]
    seen = {}
    for name, more in {
        "plain": [],
        "distca": ["--distca"],
        "stages": ["--distca", "--pipeline-model-parallel-size", "2"],
    }.items():
        saved = str(folder / name)
        save = ["--save", saved, "--save-interval", str(SAVED)]
        whole = ranks.run(whole_run, [*flags, *more, *save], world_size=WORLD_SIZE)
        load = ["--load", saved, "--ckpt-step", str(SAVED)]
        seen[name] = Runs(
            whole, ranks.run(whole_run, [*flags, *more, *load], world_size=WORLD_SIZE)
        )
    return seen


@pytest.mark.parametrize("name", ["plain", "distca", "stages"])
def test_sizes_are_megatron_s(runs, name: str) -> None:
    for rank in runs[name].whole:
        assert list(rank.samples.values()) == SIZES
    for rank in runs[name].resumed:
        assert rank.samples == {i: SIZES[i - 1] for i in range(SAVED + 1, len(SIZES) + 1)}


def test_losses_are_plain_megatron_s(runs) -> None:
    """Each batch has the same documents, so each step and evaluation the same loss."""
    plain, distca = runs["plain"].whole[0], runs["distca"].whole[0]
    assert list(distca.losses.values()) == pytest.approx(list(plain.losses.values()), rel=1e-5)
    assert [where for where, _ in distca.validation] == [where for where, _ in plain.validation]
    ours, theirs = ([loss for _, loss in rank.validation] for rank in (distca, plain))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(set(theirs)) == len(theirs) == 4


@pytest.mark.parametrize("name", ["plain", "distca", "stages"])
def test_resuming_while_they_grow_changes_nothing(runs, name: str) -> None:
    for whole, resumed in zip(runs[name].whole, runs[name].resumed, strict=True):
        rest = range(SAVED + 1, len(SIZES) + 1)
        assert resumed.losses == {i: whole.losses[i] for i in rest}
        assert resumed.rates_used == {i: whole.rates_used[i] for i in rest}
        assert resumed.validation == whole.validation[1:]


@pytest.mark.parametrize("name", ["plain", "distca"])
def test_learning_rates_follow_the_samples(runs, name: str) -> None:
    group: dict[str, float] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=DECAY,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=SAMPLES,
        wd_incr_style="constant",
    )
    for iteration, size in enumerate(SIZES, 1):
        scheduler.step(increment=size)
        for rank in runs[name].whole:
            assert rank.rates_logged[iteration] == group["lr"]
    assert group["lr"] == 1e-3

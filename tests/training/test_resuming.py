"""A run that is resumed goes on as if it had never stopped: losses, learning rates, validation.

Tensor and sequence parallelism with dropout, whose masks come from the random-number tracker that
Megatron keeps for each tensor-parallel rank.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from support.whole_runs import RunSeen, whole_run, write_documents

LAST, SAVED, WORLD_SIZE = 6, 3, 2
MICRO_BATCHES, MICRO_BATCH, WARMUP, DECAY = 2, 2, 4, 8
FLAGS = f"""
    --distca --seq-length 128 --tensor-model-parallel-size 2 --sequence-parallel
    --hidden-dropout 0.1 --split 60,30,10
    --micro-batch-size {MICRO_BATCH} --global-batch-size {MICRO_BATCHES * MICRO_BATCH}
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-init 1e-4
    --lr-warmup-iters {WARMUP} --lr-decay-iters {DECAY} --train-iters {LAST}
    --eval-interval 2 --eval-iters 1
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resuming")


@pytest.fixture(scope="module")
def runs(ranks, folder) -> tuple[list[RunSeen], list[RunSeen]]:
    """What each rank saw of six iterations, and of the last three after a checkpoint of a third."""
    lengths = np.random.default_rng(1).integers(1, 300, 200)
    flags = [*FLAGS, "--data-path", write_documents(folder / "documents", lengths.tolist())]
    save = ["--save", str(folder), "--save-interval", str(SAVED)]
    whole = ranks.run(whole_run, [*flags, *save], world_size=WORLD_SIZE)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = ranks.run(whole_run, [*flags, "--load", str(folder)], world_size=WORLD_SIZE)
    return whole, resumed


def test_losses_equal_the_uninterrupted_run_s_to_the_bit(runs) -> None:
    """The dropout masks are the same, too: the tracker's states were saved and restored."""
    for whole, resumed in zip(*runs, strict=True):
        assert sorted(whole.losses) == list(range(1, LAST + 1))
        assert resumed.losses == {i: whole.losses[i] for i in range(SAVED + 1, LAST + 1)}


def test_validation_losses_equal_the_uninterrupted_run_s_to_the_bit(runs) -> None:
    """Each evaluation has batches of its own, also the first one after resuming."""
    at_end = [f"iteration {LAST} on {split} set" for split in ("validation", "test")]
    for whole, resumed in zip(*runs, strict=True):
        places = [f"iteration {i}" for i in (2, 4, 6)] + at_end
        assert [where for where, _ in whole.validation] == places
        assert resumed.validation == whole.validation[1:]
        losses = [loss for _, loss in whole.validation]
        assert len(set(losses)) == len(losses)


def test_a_checkpoint_says_where_the_data_goes_on_at_other_sizes(ranks, folder, runs) -> None:
    data = ["--data-path", str(folder / "documents"), "--load", str(folder)]
    other = "--tensor-model-parallel-size 1 --seq-length 384 --exit-interval 1".split()
    flags = [*FLAGS, *data, *other]
    samples = MICRO_BATCHES * MICRO_BATCH
    expected = SAVED * samples * 128, SAVED // 2 * samples * 128, 128
    # Weights alone do not go on anywhere.
    for more, place in (["--no-load-optim"], expected), (["--finetune"], (0, 0, None)):
        found = ranks.run(whole_run, [*flags, *more], world_size=WORLD_SIZE)
        assert [rank.place for rank in found] == [place] * WORLD_SIZE


def test_a_plain_run_goes_on_with_distca_and_plain_again(ranks, tmp_path) -> None:
    """Losses, rates and evaluations as if it had been plain all the time: its windows are the same.

    Dropout is off, since nano-batches draw their masks apart.
    """
    lengths = np.random.default_rng(2).integers(1, 300, 200)
    flags = [flag for flag in FLAGS if flag != "--distca"] + ["--hidden-dropout", "0"]
    flags += ["--data-path", write_documents(tmp_path / "documents", lengths.tolist())]
    whole = ranks.run(whole_run, flags, world_size=WORLD_SIZE)
    folder = str(tmp_path)
    parts = [*flags, "--exit-interval", "2", "--save", folder, "--load", folder]
    parts += ["--save-interval", "2"]
    for begun, more in ((0, []), (2, ["--distca"]), (4, [])):
        found = ranks.run(whole_run, [*parts, *more], world_size=WORLD_SIZE)
        for part, expected in zip(found, whole, strict=True):
            steps = [begun + 1, begun + 2]
            assert list(part.losses) == steps
            assert list(part.losses.values()) == pytest.approx(
                [expected.losses[step] for step in steps], rel=1e-5
            )
            assert part.rates_used == {step: expected.rates_used[step] for step in steps}
            assert part.samples == {step: expected.samples[step] for step in steps}
            # The evaluation at the last of these steps, of batches that come after those before.
            where, loss = part.validation[0]
            assert dict(expected.validation)[where] == pytest.approx(loss, rel=1e-5)


def test_learning_rates_are_megatron_s_by_iteration(runs) -> None:
    """Counted in samples, as in Megatron-LM: warm-up, decay, and what is added after each step."""
    expected = driven_by_hand()
    for seen, first in zip(runs, (1, SAVED + 1), strict=True):
        for rank in seen:
            # The line of an iteration shows the rate of the next one, in Megatron-LM, too.
            assert rank.rates_logged == {i: expected[i] for i in range(first, LAST + 1)}
            assert list(rank.rates_used) == list(range(first, LAST + 1))
            for i, groups in rank.rates_used.items():
                # One group decays, norms do not.
                assert sorted(groups) == [(expected[i - 1], 0.0), (expected[i - 1], 0.1)]


def driven_by_hand() -> list[float]:
    """Megatron's scheduler, driven as Megatron-LM's loop does it: the rate after each step."""
    samples, group = MICRO_BATCHES * MICRO_BATCH, {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=1e-4,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=WARMUP * samples,
        lr_decay_steps=DECAY * samples,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=LAST * samples,
        wd_incr_style="constant",
    )
    rates = [group["lr"]]
    for _ in range(LAST):
        scheduler.step(increment=MICRO_BATCHES * MICRO_BATCH)
        rates.append(group["lr"])
    # A line up to the peak, then down.
    assert rates[: WARMUP + 1] == pytest.approx([1e-4 + 9.9e-3 * i / WARMUP for i in range(5)])
    assert 1e-2 > rates[WARMUP + 1] > rates[LAST] > 1e-3
    return rates

"""Global batches that grow: their sizes, and how many iterations they make."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import pytest
from megatron.core import num_microbatches_calculator as calculators

from megatron_patches.flags import batch_sizes
from megatron_patches.flags.batch_sizes import BatchSizes, samples_of_training
from support.arguments import parse

HAS_RAMPUP = hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator")
rampup_only = pytest.mark.skipif(not HAS_RAMPUP, reason="megatron-core 0.18 took it away")
steps_only = pytest.mark.skipif(HAS_RAMPUP, reason="megatron-core 0.18 brought it")


def micro_batches_by_sample(args: Namespace) -> Callable[[int], int]:
    return BatchSizes.from_args(args).micro_batches_by_sample()


def number_of_iterations(args: Namespace, consumed: int = 0) -> int:
    return BatchSizes.from_args(args).iterations(args.train_samples, consumed)


def sizes(args: Namespace, samples: int) -> list[int]:
    count = micro_batches_by_sample(args)
    unit = args.micro_batch_size * args.data_parallel_size
    return [count(sample) * unit for sample in range(samples)]


def test_batches_that_do_not_grow() -> None:
    args = parse("--global-batch-size", "8", length="--train-samples 30")
    assert sizes(args, 3) == [8, 8, 8]
    # The last six samples make no batch.
    assert number_of_iterations(args) == 3
    assert (samples_of_training(args), BatchSizes.from_args(args).evaluated) == (30, 8)


@rampup_only
def test_rampup() -> None:
    flags = "--global-batch-size 16 --rampup-batch-size 4 4 20"
    args = parse(*flags.split(), length="--train-samples 60")
    # Three increments, one each 20 / 3 samples.
    assert sizes(args, 30) == [4] * 7 + [8] * 7 + [12] * 6 + [16] * 10
    # At the samples 0, 4, 8, 16, 28 and 44, where 60 is left over.
    assert number_of_iterations(args) == 6
    longer = parse(*flags.split(), length="--train-samples 62")
    assert number_of_iterations(longer) == 6


@steps_only
def test_steps() -> None:
    """Thresholds are tokens, of 256 in a sample."""
    steps = "0:4 1792:8 3584:16"
    args = parse("--step-batch-size-schedule", steps, length="--train-samples 60")
    assert args.global_batch_size == 4
    assert sizes(args, 20) == [4] * 7 + [8] * 7 + [16] * 6
    # At the samples 0, 4, 8, 16, 32 and 48: the last one is too long.
    assert number_of_iterations(args) == 6


@pytest.mark.parametrize(("train_samples", "start"), [(60, 4), (61, 4), (5, 4), (3, 4), (200, 8)])
def test_iterations_are_those_of_a_loop(train_samples: int, start: int) -> None:
    """While they grow, the last batch may be too long; then no incomplete one is run."""
    growth = (
        ["--global-batch-size", "16", "--rampup-batch-size", str(start), "4", "20"]
        if HAS_RAMPUP
        else ["--step-batch-size-schedule", f"0:{start} {7 * 256}:12 {20 * 256}:16"]
    )
    args = parse(*growth, length=f"--train-samples {train_samples}")
    count, consumed, iterations = micro_batches_by_sample(args), 0, 0
    while consumed <= min(20, train_samples) if HAS_RAMPUP else consumed < train_samples:
        consumed, iterations = consumed + 4 * count(consumed), iterations + 1
    if HAS_RAMPUP:
        iterations += max(0, train_samples - consumed) // 16
    assert number_of_iterations(args) == iterations


def test_the_other_version_s_flag_names_this_one_s() -> None:
    if HAS_RAMPUP:
        with pytest.raises(ValueError, match="there is no --step-batch-size-schedule"):
            parse("--step-batch-size-schedule", "0:4 1792:8", length="--train-samples 60")
    else:
        message = r"give --step-batch-size-schedule '0:4 1792:8 3584:12 5120:16' \(tokens:size\)"
        flags = "--global-batch-size 16 --rampup-batch-size 4 4 20"
        with pytest.raises(ValueError, match=message):
            parse(*flags.split(), length="--train-samples 60")


@rampup_only
def test_steps_that_replace_a_rampup_are_the_same_sizes() -> None:
    flags = "--global-batch-size 36 --rampup-batch-size 4 4 67"
    args = parse(*flags.split(), length="--train-samples 99")
    steps = batch_sizes._rampup_sizes((4, 4, 67), 36)
    assert sizes(args, 80) == [
        max(size for first, size in steps if first <= sample) for sample in range(80)
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rampup-batch-size 4 4 x", "--rampup-batch-size: invalid int value: 'x'"),
        ("--rampup-batch-size 4 5 20", "positive steps of 5 from 4 to --global-batch-size 16"),
        ("--rampup-batch-size 16 4 20", "from 16 to --global-batch-size 16"),
        ("--rampup-batch-size 2 2 20", "global batch size 2 is not a multiple of --micro-batch"),
    ],
)
@rampup_only
def test_bad_rampups(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse("--global-batch-size", "16", *flags.split(), length="--train-samples 60")


@pytest.mark.parametrize("schedule", ["", "4", "256:4", "0:4 0:8", "0:0", "0:four"])
@steps_only
def test_bad_steps(schedule: str) -> None:
    with pytest.raises(ValueError, match="give pairs of tokens and sizes"):
        parse("--step-batch-size-schedule", schedule, length="--train-samples 60")


def test_growing_batches_are_counted_in_samples() -> None:
    growth, message = "--step-batch-size-schedule 0:4", "counts in samples: give --train-samples"
    if HAS_RAMPUP:
        growth = "--global-batch-size 16 --rampup-batch-size 4 4 20"
        message = "Megatron-LM refuses the flags: .* rampup for iteration-based training"
    with pytest.raises(ValueError, match=message):
        parse(*growth.split())


def test_samples_of_a_run_count_batches_of_other_sizes_before() -> None:
    args = parse("--global-batch-size", "4", length="--train-iters 10")
    assert samples_of_training(args) == 40
    args.iteration, args.consumed_train_samples = 3, 24
    assert samples_of_training(args) == 24 + 7 * 4
    of_samples = parse("--global-batch-size", "4", length="--train-samples 30")
    assert samples_of_training(of_samples) == 30
    assert [number_of_iterations(of_samples, consumed) for consumed in (0, 12, 27)] == [7, 4, 0]

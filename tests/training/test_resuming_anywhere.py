"""Any sequence of runs, each resumed with other flags, against one run that never stopped.

A document is as long as the shortest sample, so none is cut and a step's loss depends on its tokens
alone, whatever ranks, samples and micro-batches they are in. The reference is a single process that
is driven by hand: a forward and backward pass over as many tokens, and a step at the same rate.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.ranks import Ranks
from support.whole_runs import whole_run, write_documents

DOCUMENT, BEGUN, RATE = 128, 2, 3e-3
FEW, ALL = 5, 100
"""Sequences of runs for each kind of optimizer, without and with `--full`."""
BASE = f"""
    --split 100,0,0 --eval-iters 0 --eval-interval 1000 --distca-max-document-length {DOCUMENT}
    --max-position-embeddings 512 --save-interval 1000
""".split()


@dataclass(frozen=True)
class Progress:
    """What a checkpoint holds.

    Attributes:
        iteration: its iteration.
        consumed: training samples consumed, whatever their lengths were.
        steps: samples of the whole run, by its schedule.
        rate: learning rate.
    """

    iteration: int
    consumed: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Segment:
    """A run that goes on from a checkpoint.

    Attributes:
        stages, shards, replicas: pipeline-, tensor- and data-parallel size.
        distca: whether `--distca`.
        micro_batch: samples of a micro-batch on a rank.
        micro_batches: micro-batches of a global batch.
        seq_length: tokens of a sample.
        rate: `--lr`.
        iterations: iterations until it stops, by `--exit-interval`.
        more: iterations of `--train-iters` after that.
        schedule: flag that chooses between schedules; none: they must be equal.
    """

    stages: int
    shards: int
    replicas: int
    distca: bool
    micro_batch: int
    micro_batches: int
    seq_length: int
    rate: float
    iterations: int
    more: int
    schedule: str

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.replicas * self.micro_batches

    @property
    def world_size(self) -> int:
        return self.stages * self.shards * self.replicas

    @property
    def pool_size(self) -> int | None:
        """Ranks of a server pool; None: the run has none."""
        return 1 if self.distca and self.replicas > 1 and self.micro_batches != 2 else None

    def steps(self, begun: Progress) -> int:
        """Samples of the whole run by its schedule, as Megatron-LM counts them."""
        return (begun.iteration + self.iterations + self.more) * self.global_batch

    def refusal(self, begun: Progress) -> str | None:
        """What the run must say instead of going on; none: it goes on."""
        if self.iterations + self.more < 0:
            return r"more than --train-iters"
        if not self.schedule and (self.steps(begun), self.rate) != (begun.steps, begun.rate):
            return "has another schedule than this run: .*--override-opt_param-scheduler"
        if begun.consumed % (self.micro_batch * self.replicas):
            return f"{begun.consumed} samples were consumed before, which is not a whole number of"
        return None

    def after(self, begun: Progress) -> Progress:
        done = Progress(
            begun.iteration + self.iterations,
            begun.consumed + self.iterations * self.global_batch,
            self.steps(begun),
            self.rate,
        )
        if self.schedule.startswith("--use-checkpoint"):
            done = replace(done, steps=begun.steps, rate=begun.rate)
        return done

    def flags(self, begun: Progress, sharded: bool) -> list[str]:
        stop = begun.iteration + self.iterations
        given = {
            "--pipeline-model-parallel-size": self.stages,
            "--tensor-model-parallel-size": self.shards,
            "--micro-batch-size": self.micro_batch,
            "--global-batch-size": self.global_batch,
            "--seq-length": self.seq_length,
            "--lr": self.rate,
            "--train-iters": stop + self.more,
            "--exit-interval": max(stop, 1),
        }
        if self.pool_size is not None:
            given["--distca-pool-size"] = self.pool_size
        switches = {
            "--distca": self.distca,
            "--sequence-parallel": self.shards > 1,
            "--use-distributed-optimizer": sharded,
            self.schedule: bool(self.schedule),
        }
        valued = [word for name, value in given.items() for word in (name, str(value))]
        return [*BASE, *valued, *(name for name, on in switches.items() if on)]


NOTHING = Progress(0, 0, 0, RATE)
FIRST = Segment(1, 1, 1, False, 1, 8, DOCUMENT, RATE, BEGUN, 4, "")


def random_segment(rng: random.Random, begun: Progress) -> Segment:
    """Draws a run that mostly goes on, and sometimes has flags that do not fit."""
    stages, shards = rng.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)])
    segment = Segment(
        stages=stages,
        shards=shards,
        replicas=rng.choice([n for n in (1, 2, 4) if n * stages * shards <= 4]),
        distca=rng.random() < 0.6,
        micro_batch=rng.choice([1, 1, 2]),
        micro_batches=rng.choice([1, 2, 3]),
        seq_length=DOCUMENT * rng.choice([1, 2, 4]),
        rate=rng.choice([begun.rate, begun.rate / 2, 2 * begun.rate]),
        iterations=rng.choice([1, 2]) if rng.random() < 0.9 else -begun.iteration,
        more=rng.choice([0, 3]),
        schedule=rng.choice(["", *2 * ["--override-opt_param-scheduler"]]),
    )
    if segment.iterations < 0:
        # A run that was to end before.
        return replace(segment, more=1)
    if rng.random() < 0.25:
        return replace(segment, schedule="--use-checkpoint-opt_param-scheduler")
    return segment


def outcome(flags: list[str]) -> dict[int, float] | str:
    """Losses of a run by iteration, or what it says; collective."""
    said: list[str] = []
    handler = logging.Handler(logging.CRITICAL)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_patches.loop.preflight")
    logger.addHandler(handler)
    try:
        return whole_run(flags).losses
    except ValueError as error:
        return str(error)
    except SystemExit:
        return "".join(said)
    finally:
        logger.removeHandler(handler)


def by_hand(flags: list[str], consumed: int, steps: list[tuple[int, float]]) -> list[float]:
    """Losses of steps, each of a number of samples and a rate, in one process that goes on."""
    from support.models import parse
    from support.training import build_whole_run, initialize

    args = initialize(parse(flags))
    # Data is opened before the checkpoint is loaded.
    args.consumed_train_samples = consumed
    run = build_whole_run(args)
    iterators = run.iterators("train")
    losses = []
    for samples, rate in steps:
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.begin_step()
        with _micro_batches(samples):
            reports = run.forward_backward(iterators)
        run.optimizer.step()
        total, count = sum(report["lm loss"] for report in reports)
        losses.append(float(total / count))
    run.data.close()
    return losses


@contextlib.contextmanager
def _micro_batches(count: int) -> Iterator[None]:
    name = "megatron.core.num_microbatches_calculator.get_num_microbatches"
    with mock.patch(name, return_value=count):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("documents")
    return ["--data-path", write_documents(folder / "documents", [DOCUMENT] * 500)]


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "distributed"])
def begun(
    request: pytest.FixtureRequest, ranks: Ranks, data: list[str], tmp_path_factory: Any
) -> tuple[bool, Path, Progress]:
    """The first steps, of a single process, with and without the distributed optimizer."""
    folder, sharded = tmp_path_factory.mktemp("begun"), request.param
    flags = [*FIRST.flags(NOTHING, sharded), *data, "--save", str(folder)]
    ranks.run(whole_run, flags, world_size=1)
    return sharded, folder, FIRST.after(NOTHING)


def random_segments(seed: int, begun: Progress) -> list[tuple[Progress, Segment]]:
    """Draws four runs, each with what the checkpoint holds when it begins."""
    rng, progress, drawn = random.Random(seed), begun, []
    for _ in range(4):
        segment = random_segment(rng, progress)
        drawn.append((progress, segment))
        if segment.refusal(progress) is None:
            progress = segment.after(progress)
    return drawn


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.full] * (n >= FEW)) for n in range(ALL)]
)
def test_losses_are_those_of_a_run_that_never_stopped(
    ranks: Ranks, data: list[str], begun: Any, seed: int, tmp_path: Path
) -> None:
    sharded, folder, first = begun
    shutil.copytree(folder, save := tmp_path / "checkpoints")
    losses, steps = [], []
    segments = random_segments(2 * seed + sharded, first)
    for progress, segment in segments:
        flags = [*segment.flags(progress, sharded), *data]
        flags += ["--load", str(save), "--save", str(save)]
        found = ranks.run(outcome, flags, world_size=segment.world_size)
        if (refusal := segment.refusal(progress)) is not None:
            # Ranks other than the first leave it to that one.
            assert re.search(refusal, str(found[0])), (segments, found)
            assert "\n" not in found[0]
            continue
        assert not isinstance(found[0], str), (segments, found)
        losses += [found[0][i] for i in sorted(found[0])]
        assert len(found[0]) == segment.iterations, segments
        samples = segment.global_batch * segment.seq_length // DOCUMENT
        steps += [(samples, segment.after(progress).rate)] * segment.iterations
    plain = Segment(1, 1, 1, False, 1, 50, DOCUMENT, RATE, 1, 50, "--override-opt_param-scheduler")
    flags = [*plain.flags(first, sharded), *data, "--load", str(folder)]
    (expected,) = ranks.run(by_hand, flags, first.consumed, steps, world_size=1)
    assert losses == pytest.approx(expected, rel=1e-4), segments


@pytest.mark.parametrize("seeds", [2 * FEW, 2 * ALL])
def test_what_is_drawn(seeds: int) -> None:
    """Each run may change each of these, and most runs go on."""
    begun = FIRST.after(NOTHING)
    drawn = [each for seed in range(seeds) for each in random_segments(seed, begun)]
    gone_on = [(before, run) for before, run in drawn if run.refusal(before) is None]
    assert len(drawn) / 3 < len(gone_on) < len(drawn) * 0.9
    runs = [run for _, run in gone_on]
    for name in ("stages", "shards", "replicas", "distca", "micro_batch", "seq_length"):
        assert len({getattr(run, name) for run in runs}) > 1, name
    assert {run.pool_size for run in runs} == {None, 1}
    assert len({run.global_batch for run in runs}) > 3
    assert len({run.rate / before.rate for before, run in gone_on}) == 3
    assert {run.steps(before) > before.steps for before, run in gone_on} == {True, False}
    assert {run.schedule for run in runs} > {"--override-opt_param-scheduler"}
    assert len({(run.refusal(before) or "")[:8] for before, run in drawn}) > 2

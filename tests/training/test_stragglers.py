"""`--log-straggler`: a rank that is slow has the longest forward pass, though all wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from megatron.core import utils

from megatron_patches import cpu
from megatron_patches.batches import micro_batch
from support.models import train
from support.whole_runs import RunSeen, whole_run, write_documents

SECONDS = 0.05
"""For which a layer of the second rank sleeps, in each nano-batch."""
RUN = "--train-iters 2 --split 100,0,0 --log-interval 1 --seq-length 128 --global-batch-size 4"


class FakeEvent:
    """An event of a GPU that takes no time."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return 0.0


class FakeTorch:
    """torch without GPUs as the detector sees it on a machine with GPUs."""

    cuda = SimpleNamespace(
        Event=FakeEvent,
        is_available=lambda: True,
        synchronize=lambda: None,
        **dict.fromkeys(
            ("current_device", "temperature", "power_draw", "utilization", "clock_rate"), int
        ),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu.TORCH_ON_CPU, name)


@contextmanager
def detecting() -> Iterator[Any]:
    """Turns Megatron-LM's detector on."""
    detector = micro_batch._STRAGGLERS
    with (
        mock.patch.object(utils, "torch", FakeTorch()),
        mock.patch.object(type(detector), "_configured", False),
        mock.patch.object(detector, "_controller"),
    ):
        try:
            detector.configure(dist.get_world_size(), dist.get_rank(), prefill=0, enabled=True)
            yield detector
        finally:
            detector.__init__()


def forward_seconds(flags: list[str]) -> tuple[float, float, int]:
    """Seconds of the forward passes of a step as the detector adds them up, then of the data, and
    the number of intervals; a layer of the second rank is slow. Collective."""
    from megatron.core.transformer.mlp import MLP

    forward = MLP.forward

    def slow(*given: Any, **named: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(SECONDS)
        return forward(*given, **named)

    with detecting() as detector, mock.patch.object(MLP, "forward", slow):
        train(flags, [200, 40, 272] * 4, 1)
        intervals = len(detector.start_gemm_tm)
        assert len(detector.start_data_tm) == 2
        milliseconds, of_data, *_ = detector.elapsed()
    return milliseconds / 1e3, of_data / 1e3, intervals


@pytest.mark.parametrize("nano_batches", ["--distca-ping-pong", "--no-distca-ping-pong"])
def test_waits_are_left_out(ranks, nano_batches: str) -> None:
    flags = ["--seq-length", "256", "--global-batch-size", "4", "--distca", nano_batches]
    ranks.run(train, flags, [512] * 4, 1, world_size=2)
    (fast, _, intervals), (slow, *_) = ranks.run(forward_seconds, flags, world_size=2)
    # Two micro-batches, two layers.
    sleeps = 4 * SECONDS * (2 if nano_batches == "--distca-ping-pong" else 1)
    assert slow > sleeps
    assert fast < 0.6 * slow
    assert intervals > 2


def test_plain_megatron_s_passes_are_timed_whole(ranks) -> None:
    flags = ["--seq-length", "256", "--global-batch-size", "4"]
    (fast, _, intervals), (slow, *_) = ranks.run(forward_seconds, flags, world_size=2)
    assert intervals == 2
    assert slow > 4 * SECONDS
    assert fast < slow


def report_of(flags: list[str]) -> tuple[RunSeen, list[str]]:
    """What a rank sees of a whole run with GPUs, and the detector's lines. Collective."""
    lines: list[str] = []
    with (
        detecting(),
        mock.patch.object(utils.logger, "info", side_effect=lambda line, *_: lines.append(line)),
    ):
        return whole_run(flags), lines


def test_the_loop_reports(ranks, tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", [100, 300, 20, 500, 7, 90] * 4)
    given = [*RUN.split(), "--data-path", corpus, "--distca"]
    plain = ranks.run(whole_run, given, world_size=2)[0]
    (seen, lines), (_, of_second) = ranks.run(report_of, [*given, "--log-straggler"], world_size=2)
    assert seen.losses == plain.losses
    assert [line for line in of_second if "Rtt" in line] == []
    assert len([line for line in lines if "MxRtt/Rnk" in line and "MnEtpt/Rnk" in line]) == 2

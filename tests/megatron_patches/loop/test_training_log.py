"""The log line of the lean loop."""

from __future__ import annotations

import io
import logging
import sys
from argparse import Namespace
from collections.abc import Sequence

import pytest
import torch.distributed as dist


def _args() -> Namespace:
    return Namespace(
        tensorboard_dir=None,
        tensorboard_log_interval=1,
        wandb_project=None,
        train_iters=4,
        log_interval=2,
        seq_length=8,
        consumed_train_samples=0,
    )


def lines_of(cpu_seconds: Sequence[Sequence[float]]) -> list[str]:
    """What this rank logs of iterations that took each rank so long; collective."""
    from megatron_patches.loop.lean import logs

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logs.logger.addHandler(handler)
    logs.logger.setLevel(logging.INFO)
    log = logs.TrainingLog(_args(), 0)
    for iteration, of_ranks in enumerate(cpu_seconds, 1):
        log.iteration_done(
            iteration,
            {"lm loss": 1.0},
            samples=2,
            learning_rate=0.1,
            loss_scale=1.0,
            grad_norm=None,
            skipped=False,
            cpu_seconds=of_ranks[dist.get_rank()],
        )
    log.close()
    logs.logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("terminal", [False, True])
def test_messages_go_around_the_bar_where_there_is_one(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_patches.loop.lean import logs

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    error = io.StringIO()
    monkeypatch.setattr(error, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", error)
    root, plain = logging.getLogger(), logging.StreamHandler(error)
    monkeypatch.setattr(root, "handlers", [plain])
    log = logs.TrainingLog(_args(), 0)
    assert (root.handlers == [plain]) is not terminal
    log.close()
    assert root.handlers == [plain]


def test_the_busiest_rank_is_another_one_in_each_iteration(ranks) -> None:
    first, second = ranks.run(lines_of, [(3, 1), (1, 5), (2, 2), (2, 4)], world_size=2)
    assert second == [], "rank 0 speaks for all"
    for line, busiest, mean in zip(first, ("4.000", "3.000"), ("2.500", "2.500"), strict=True):
        assert f" | CPU seconds of the busiest rank: {busiest} | " in line
        assert f" | CPU seconds of the mean rank: {mean} | " in line


@pytest.mark.parametrize("rank", [0, 1])
def test_where_messages_go(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The first rank's notes as they are, warnings of others by rank, errors to standard error."""
    from megatron_patches.loop.lean.logs import setup_logging

    root = logging.getLogger()
    before = root.level, root.handlers[:]
    # The handlers of pytest would be closed.
    root.handlers = []
    try:
        setup_logging(rank)
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("anywhere").log(level, "at %d", level)
    finally:
        root.level, root.handlers = before
    out, err = capsys.readouterr()
    assert out == ("at 20\nat 30\n", "[rank 1] at 30\n")[rank]
    assert err == f"[rank {rank}] at 40\n"

"""The log line of an interval, and the figures that boards get."""

from __future__ import annotations

import re
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.loop import step_log
from megatron_patches.loop.step_log import StepLog, measured_step, short_line
from megatron_patches.pipeline.progress import Progress
from support.pretraining import FLAGS, TOKENIZER, run_command
from support.versions import COUNTS_PAIRS
from support.whole_runs import write_documents

THEIRS = (
    " [2026-11-24 18:00:00.000001] iteration    12345/  250000 | consumed samples:      3160320 | "
    "elapsed time per iteration (ms): 1234.5 | learning rate: 9.755283E-04 | global batch size:   "
    "256 | lm loss: 2.843438E+00 | loss scale: 1.0 | "
    "grad norm: 1.310 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
FIGURES = {
    "s": 1.2345,
    step_log.SPEED: 912345.6,
    step_log.MFU: 0.4123,
    step_log.ATTENTION_BUSIEST: 0.8432,
    step_log.ATTENTION_MEAN: 0.801,
    step_log.WAIT: 0.041,
    step_log.ALLOCATED: 61.24,
    step_log.RESERVED: 70.06,
}


def test_the_line_fits_a_terminal() -> None:
    line = short_line(THEIRS, FIGURES)
    assert line == (
        "iteration 12345/250000 | lm loss: 2.843438 | grad norm: 1.310 | s: 1.23 | tokens/s: "
        "912346 | MFU: 41% | attention s: 0.843/0.801 | wait: 4% | GB: 61.2/70.1 |"
    )
    assert len(line) < 160


def test_what_flags_add_and_what_goes_wrong_stays_in_the_line() -> None:
    wrong = THEIRS.replace("skipped iterations:   0", "skipped iterations:   1")
    more = f"{wrong} z_loss: 1.234567E-05 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
    line = short_line(more, {})
    assert line.endswith(
        "grad norm: 1.310 | number of skipped iterations: 1 | z_loss: "
        "1.234567e-05 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
    )
    assert "nan iterations" not in line
    assert short_line(THEIRS.replace("2.843438E+00", "NAN"), {}).split(" | ")[1] == "lm loss: NAN"
    other = "  successfully saved checkpoint | lm loss value: 2.843438E+00 |"
    assert short_line(other, FIGURES) == other


@pytest.mark.parametrize("which", ["", "-0", "-second"])
def test_an_evaluation_has_its_numbers_as_a_step_has_them(which: str) -> None:
    """Which is of one validation set, or of several, by number or by name."""
    line = (
        f" validation{which} loss at iteration 5 on validation set | lm loss value: "
        "6.756518E+00 | lm loss PPL: 8.596398E+02 | mtp_1 loss value: NAN | "
    )
    assert short_line(line, FIGURES) == (
        f" validation{which} loss at iteration 5 on validation set | lm loss value: "
        "6.756518 | lm loss PPL: 859.6 | mtp_1 loss value: NAN | "
    )


@pytest.mark.parametrize("scheme", ["--distca", "plain"])
def test_a_run_logs_what_it_measured(scheme: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    corpus = write_documents(tmp_path / "corpus", [2000, *[40] * 60] * 4)
    flags = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--train-iters", "3"]
    flags += ["--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-log-interval", "1"]
    flags += ["--distca"] if scheme == "--distca" else []
    output = run_command(2, flags)
    # Another rank may print into the line.
    lines = re.findall(r"iteration \d/3 \|.*?\| GB: \d\.\d \|", output)
    assert len(lines) == 3, output[-3000:]
    assert max(map(len, lines)) < 140
    # Of torch about Megatron-LM's calls.
    assert "FutureWarning" not in output
    assert output.count("log lines: s is the time of a step") == 1
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    found = {name: [e.value for e in board.Scalars(name)] for name in board.Tags()["scalars"]}
    for line, busiest, mean in zip(
        lines, found[step_log.ATTENTION_BUSIEST], found[step_log.ATTENTION_MEAN], strict=True
    ):
        assert 0 < mean <= busiest
        assert f"| attention s: {busiest:.3g}/{mean:.3g} |" in line
        assert re.search(r"\| s: \S+ \| tokens/s: \d+ \| attention", line)
    assert ("| wait: " in lines[-1]) == (scheme == "--distca")
    if scheme == "--distca":
        assert all(0 < share < 1 for share in found[step_log.WAIT])
        assert {"load max/mean", "MB moved", "plan wait ms"} <= found.keys()
    assert min(found[step_log.RESIDENT]) > 0.1
    if COUNTS_PAIRS:
        assert min(found[step_log.TFLOPS]) > 0


class Board(dict[str, float]):
    """Both kinds of writers for boards."""

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        assert iteration == 7
        self[name] = value

    def log(self, figures: dict[str, float], iteration: int) -> None:
        self.update(figures)


def test_boards_get_every_figure(monkeypatch) -> None:
    boards = Board(), Board()
    for name, board in zip(("tensorboard", "wandb"), boards, strict=True):
        monkeypatch.setattr(f"megatron.training.global_vars.get_{name}_writer", lambda b=board: b)
    StepLog(shared=dict(FIGURES)).write(7)
    for board in boards:
        assert board.keys() == {*FIGURES} - {"s"} | {"attention, busiest rank over mean"}
        assert board["attention, busiest rank over mean"] == pytest.approx(0.8432 / 0.801)


def test_mfu_counts_the_pairs_that_documents_have(monkeypatch) -> None:
    args = Namespace(micro_batch_size=2, world_size=3, bf16=True, fp16=False)

    def operations(args: Namespace, batch_size: int, seqlen_squared_sum_in_batch: float) -> float:
        return batch_size * 1e12 + seqlen_squared_sum_in_batch

    monkeypatch.setattr("megatron.training.training.num_floating_point_operations", operations)
    # Four micro-batches of two samples and half a million pairs, twice.
    samples, pairs = 16, 2 * 8 * 0.5
    rate = 2 * (8e12 + 2 * 4 * 0.5e6) / 2.0 / 4 / 1e12
    found = step_log._utilization(samples, pairs, 2.0, args, 1)
    assert found == {step_log.TFLOPS: pytest.approx(rate)}
    monkeypatch.setattr(step_log.cpu, "without_cuda", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    found = step_log._utilization(samples, pairs, 2.0, args, 1)
    assert found == {step_log.MFU: pytest.approx(rate / 990)}


def test_steps_are_measured_without_a_collective(monkeypatch) -> None:
    args = Namespace(seq_length=10, curr_iteration=3)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    monkeypatch.setattr(
        "megatron.core.num_microbatches_calculator.get_current_global_batch_size", lambda: 4
    )
    monkeypatch.setattr(step_log, "ending_unless_finite", lambda step: step)
    figures_of_batch = {step_log.PAIRS: 1.0}
    ours = types.SimpleNamespace(take_figures=lambda: figures_of_batch)
    iterator = types.SimpleNamespace(iterable=ours)

    def theirs(model: Any, data_iterator: Any) -> tuple[dict[str, torch.Tensor], int]:
        return {"lm loss": torch.ones(1)}, 0

    run: Any = types.SimpleNamespace(progress=Progress(), log=StepLog())
    # No process group is there: a collective would raise.
    figures, _ = measured_step(theirs, run)([], [iterator, iterator])
    # Megatron-LM shares each figure that it is given by a collective of its own, in every step.
    assert figures.keys() == {"lm loss"}
    (step,) = run.log.steps
    assert (step.tokens, step.samples, step.of_batch) == (40, 4, figures_of_batch)
    assert (run.progress.iteration, run.progress.begun) == (4, 1)

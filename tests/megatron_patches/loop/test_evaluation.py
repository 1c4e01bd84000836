"""Evaluation: without dropout, and training goes on as if there had been none."""

from __future__ import annotations

import pytest

from support.models import parse
from support.ranks import forget_megatron
from support.whole_runs import write_documents

FLAGS = """
    --seq-length 128 --global-batch-size 4 --split 60,30,10
    --train-iters 2 --eval-interval 1 --eval-iters 1
""".split()


@pytest.fixture(scope="module", params=[[], ["--distca"]], ids=["plain", "distca"])
def losses(request, ranks, tmp_path_factory) -> list[list[tuple[str, float]]]:
    """Of `evaluations_and_steps` with dropout and evaluations, without one, without the other."""
    prefix = write_documents(tmp_path_factory.mktemp("data") / "documents", [150, 3, 70] * 20)
    flags = [*FLAGS, "--data-path", prefix, *request.param]
    dropout = [*flags, "--hidden-dropout", "0.1"]
    runs = [(dropout, True), (flags, True), (dropout, False)]
    return ranks.run(evaluations_and_steps, runs, world_size=1)[0]


def test_dropout_is_off_in_evaluation_and_on_again_afterwards(losses) -> None:
    with_dropout, without, _ = losses
    assert [name for name, _ in with_dropout] == ["valid", "train", "valid", "train"]
    # The same weights.
    assert with_dropout[0] == without[0]
    for step in (1, 3):
        assert with_dropout[step] != without[step]


def test_evaluating_changes_nothing_of_the_training(losses) -> None:
    """Neither the weights nor the data nor the random numbers: the same losses to the bit."""
    with_evaluations, _, alone = losses
    assert [each for each in with_evaluations if each[0] == "train"] == alone


def evaluations_and_steps(runs: list[tuple[list[str], bool]]) -> list[list[tuple[str, float]]]:
    """Losses of two steps of each run, and of an evaluation before each where it is asked for."""
    from support import training

    results = []
    for flags, evaluates in runs:
        args = parse(flags)
        training.initialize(args)
        run = training.build_whole_run(args)
        seen = []
        for _ in range(2):
            if evaluates:
                seen.append(("valid", training.evaluate(run, "valid")["lm loss"]))
            seen.append(("train", training.train_step(run)[0]["lm loss"]))
        run.data.close()
        results.append(seen)
        forget_megatron()
    return results

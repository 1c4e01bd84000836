"""The demo's report, of made-up figures of two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data import demo_corpus, demo_report
from distca.plan import Mask
from distca.schedule import plain_loads

DISTCA = {
    "lm loss": {step: 5.0 - step / 10 for step in range(1, 21)},
    "load max/mean before": {5: 9.0, 10: 1.8, 15: 2.4, 20: 9.0},
    "load max/mean": dict.fromkeys((5, 10, 15, 20), 1.25),
    "CPU seconds of the busiest rank": {5: 9.0, 10: 1.0, 15: 2.0, 20: 9.0},
    "CPU seconds of the mean rank": {5: 9.0, 10: 1.0, 15: 1.0, 20: 9.0},
    "million pairs of a micro-batch": {5: 90.0, 10: 14.0, 15: 8.0, 20: 90.0},
}
PLAIN = {
    "lm loss": {step: 5.0 - step / 10 for step in range(1, 16)},
    "CPU seconds of the busiest rank": {5: 9.0, 10: 4.0, 15: 2.0},
    "CPU seconds of the mean rank": {5: 9.0, 10: 1.5, 15: 0.5},
    "million pairs of a micro-batch": {5: 90.0, 10: 12.0, 15: 8.0},
}


def test_steps_of_both_runs_are_compared_after_they_warmed_up() -> None:
    found = demo_report.compare(DISTCA, PLAIN)
    assert found is not None
    assert (found.first, found.last) == (6, 15)
    assert (found.plain, found.distca) == ((3.0, 1.0), (1.5, 1.0))
    assert (found.ratio, found.after) == (2.0, 1.25)
    assert found.before == pytest.approx(2.1)
    lines = [line.split()[-2:] for line in found.table().splitlines()]
    assert lines[1:5] == [["3.00", "1.50"], ["1.00", "1.00"], ["3.00", "1.50"], ["2.10", "1.25"]]
    assert lines[5] == ["10.00", "11.00"]
    assert "DistCA's core attention has 1.10 times the query-key pairs" in found.table()


@pytest.mark.parametrize(
    ("mean", "said"),
    [
        (1.2, "CPU seconds are 1.20 times as many with DistCA."),
        (1.02, "CPU seconds are about the same in both."),
        (0.8, "CPU seconds are 0.80 times as many with DistCA."),
    ],
)
def test_sentences_follow_the_figures(mean: float, said: str) -> None:
    found = demo_report.Comparison(6, 15, (2.0, 1.0), (2.5, mean), 2.0, 1.1, (10.0, 10.01))
    table = found.table()
    assert said in table
    # Equal pairs are not worth a sentence.
    assert "times the query-key pairs" not in table
    assert "busiest rank takes 0.80 times as long" in table


@pytest.mark.parametrize("plain", [{}, {name: {5: 1.0} for name in PLAIN}])
def test_runs_may_be_too_short_to_compare(plain: dict[str, dict[int, float]]) -> None:
    assert demo_report.compare(DISTCA, plain) is None


def write_figures(folder: Path, scalars: demo_report.Scalars) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(folder)) as board:
        for name, values in scalars.items():
            for step, value in values.items():
                board.add_scalar(name, value, step)


def test_the_report_is_of_what_the_runs_wrote(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    prefixes = demo_corpus.build_demo_corpus(tmp_path, 600, 0.1)
    data = [str(part) for pair in zip((1, 3), prefixes, strict=True) for part in pair]
    flags = """--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --lr 1e-3
        --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 4 --train-iters 20
        --distca-max-document-length 512 --attention-dropout 0 --hidden-dropout 0
        --split 90,8,2 --tokenizer-type HuggingFaceTokenizer""".split()
    flags += ["--tokenizer-model", str(tmp_path / "tokenizer"), "--data-path", *data]
    folders = [str(tmp_path / name) for name in ("distca", "plain")]
    arguments = ["--distca", folders[0], "--plain", folders[1], "--output"]
    arguments += [str(tmp_path / "report.svg"), "--", *flags]
    assert demo_report.main(arguments) == 2
    assert "holds no TensorBoard files" in capsys.readouterr().err
    # Runs before leave their files.
    for figures in (PLAIN, DISTCA):
        write_figures(Path(folders[0]), figures)
    write_figures(Path(folders[1]), {"lm loss": PLAIN["lm loss"]})
    assert demo_report.main(arguments) == 0
    assert "no report: " in capsys.readouterr().out
    write_figures(Path(folders[1]), PLAIN)
    assert demo_report.main(arguments) == 0
    out = capsys.readouterr().out
    assert "2.00 times as long" in out
    assert f"Picture: {tmp_path / 'report.svg'}" in out
    assert "plain Megatron 3.00, DistCA 1.50 (steps 6 to 15)" in (
        (tmp_path / "report.svg").read_text()
    )

    plan, before = demo_report.first_window(flags, 4)
    assert plan.placement.tokens_per_rank().tolist() == [512] * 4
    assert plan.lengths.max() == 512
    assert before.tolist() == plain_loads(plan.lengths, np.full(4, 512), Mask()).tolist()

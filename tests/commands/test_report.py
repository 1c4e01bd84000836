"""`distca report` compares two real runs, and reads runs from their logs alone."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from distca.commands import report
from distca.commands.main import main
from distca.commands.report_losses import LossComparison
from distca.plan import load_plan
from distca.run_figures import (
    AFTER,
    ATTENTION_MEAN,
    BUSIEST,
    LOSS,
    RESERVED,
    SECONDS,
    SPEED,
    WAIT,
    board_files,
    read_boards,
    read_log,
)
from distca.timeline import write_trace
from support.pretraining import FLAGS, TOKENIZER, run_command
from support.report_pages import Page, assert_usable, shown_by_browser
from support.whole_runs import write_documents

DISTCA = """
 [2026-01-01 00:00:00] iteration        1/      80 | consumed samples:            4 |
iteration 5/80 | lm loss: 7.500000 | grad norm: 2.656 | s: 9.5 | tokens/s: 100 | MFU: 41% | \
attention s: 0.02/0.01 | wait: 43% | GB: 0.8/1.1 |
[rank 1] iteration 10/80 | lm loss: 7.250000 | s: 2.5 | tokens/s: 400 | attention s: 0.2/0.1 | \
wait: 13% |
iteration 15/80 | lm loss: 7.000000 | s: 1.5 | tokens/s: 600 | attention s: 0.2/0.1 | wait: 15% |
""".replace("\\\n", "")
PLAIN = """
 [2026-01-01] iteration        5/      80 | consumed samples:           20 | elapsed time per \
iteration (ms): 9000.0 | lm loss: 7.500000E+00 | loss scale: 1.0 |
 [2026-01-01] iteration       10/      80 | consumed samples:           40 | elapsed time per \
iteration (ms): 4000.0 | lm loss: 7.250000E+00 | loss scale: 1.0 |
""".replace("\\\n", "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with `--distca` and of one without, and of the first one's report."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_documents(folder / "corpus", [2000, *[40] * 60] * 4)
    flags = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--train-iters", "3"]
    for name, own in (
        ("ours", ["--distca", "--distca-trace", str(folder / "boards" / "trace.json")]),
        ("plain", []),
    ):
        boards = str(folder / "boards" / name)
        run_command(2, [*flags, *own, "--tensorboard-dir", boards, "--tensorboard-log-interval=1"])
    return folder


@pytest.fixture(scope="module")
def printed(trained: Path) -> dict[str, Any]:
    """What `--json` prints of both runs; it also writes `page.html`."""
    with pytest.MonkeyPatch.context() as patched:
        lines: list[str] = []
        patched.setattr(report.sys.stdout, "write", lines.append)
        given = ["report", str(trained / "boards"), "--json", "--html", str(trained / "page.html")]
        assert main(given) == 0
    return json.loads("".join(lines))


def test_figures_are_the_medians_of_the_boards(trained: Path, printed: dict[str, Any]) -> None:
    assert [*printed["runs"]] == ["ours", "plain"]
    for name, run in printed["runs"].items():
        boards = read_boards(board_files(trained / "boards" / name))
        medians = run["medians"]
        assert {SPEED, BUSIEST} <= medians.keys()
        for figure, median in medians.items():
            values = [value for _, value in sorted(boards[figure].items())]
            assert median == statistics.median(values[1:])
        assert (run["first_iteration"], run["last_iteration"]) == (1, 3)
        assert run["last_loss"] == boards[LOSS][3]
    assert {AFTER, WAIT} <= printed["runs"]["ours"]["medians"].keys()
    assert AFTER not in printed["runs"]["plain"]["medians"]


def test_runs_are_compared_in_the_steps_that_both_logged() -> None:
    """As the demo does, whose second run is shorter: its report says the same."""
    busiest = {"ours": {5: 9.0, 10: 2.0, 15: 3.0, 20: 1.0}, "plain": {5: 9.0, 10: 5.0, 15: 7.0}}
    runs = [report.Run(name, {BUSIEST: each, LOSS: each}) for name, each in busiest.items()]
    found = [run.medians()[BUSIEST] for run in report._comparable(runs)]
    assert found == [2.5, 6.0]
    # Alone, and where nothing is shared, all count except the first.
    assert [run.medians()[BUSIEST] for run in report._comparable(runs[:1])] == [2.0]
    apart = [runs[0], report.Run("later", {BUSIEST: {30: 1.0, 31: 4.0}})]
    assert [run.medians()[BUSIEST] for run in report._comparable(apart)] == [2.0, 4.0]


def test_the_page_has_these_figures(trained: Path, printed: dict[str, Any]) -> None:
    page = Page((trained / "page.html").read_text())
    assert page.figures == printed
    (answer,) = page.texts["h1"]
    seconds = {name: run["medians"][BUSIEST] for name, run in printed["runs"].items()}
    first, other = sorted(seconds, key=lambda name: seconds[name])
    assert (
        f"A step of {first} needs {seconds[first]:.3g} CPU seconds on its busiest rank; {other} "
        f"needs {seconds[other]:.3g} ({seconds[other] / seconds[first]:.2f} times as many)."
    ) in answer
    # On CPUs, where the ranks share this machine's cores.
    assert report.ON_CPUS in answer
    head, *rows = page.table("Medians")
    assert head == ["figure", "ours", "plain"]
    for figure, *cells in rows:
        for name, cell in zip(head[1:], cells, strict=True):
            value = printed["runs"][name]["medians"].get(figure)
            assert cell == ("" if value is None else f"{value:.4g}")
    losses = {name: dict(each) for name, each in printed["losses"].items()}
    for step, ours, plain in page.table("Loss from")[1:]:
        assert float(ours) == pytest.approx(losses["ours"][int(step)], rel=1e-5)
        assert float(plain) == pytest.approx(losses["plain"][int(step)], rel=1e-5)


def test_the_timeline_adds_up(trained: Path, printed: dict[str, Any]) -> None:
    seconds = printed["timeline_seconds"]
    trace = json.loads((trained / "boards" / "trace.json").read_text())["traceEvents"]
    assert len(seconds) == 2
    for rank, (name, parts) in enumerate(seconds.items()):
        assert name.startswith(f"rank {rank}: ")
        its = [each for each in trace if each["ph"] == "X" and each["pid"] == rank]
        whole = max(each["ts"] + each["dur"] for each in its) - min(each["ts"] for each in its)
        assert sum(parts.values()) == pytest.approx(whole / 1e6)
        assert min(parts["core attention"], parts["other layers"]) > 0
    page = Page((trained / "page.html").read_text())
    lanes = [
        each
        for each in trace
        if each["ph"] == "X" and each["cat"] in ("ticks", "exchange", "kernels")
    ]
    assert sum(tag == "rect" for tag, _ in page.elements) == len(lanes)


def test_the_first_plan_is_saved_and_shown(trained: Path, printed: dict[str, Any]) -> None:
    plan, saved = load_plan(trained / "boards" / "ours" / "first_plan.json")
    assert not (trained / "boards" / "plain" / "first_plan.json").exists()
    assert " --distca " in str(saved["command"])
    page = Page((trained / "page.html").read_text())
    assert str(saved["command"]) in page.texts["pre"]
    assert len(page.table("Loads are")) == 1 + plan.world_size == 3
    assert len(page.table("MB that")) == 3


def test_the_report_is_usable_and_a_browser_shows_it(
    trained: Path, printed: dict[str, Any], tmp_path: Path
) -> None:
    path = trained / "page.html"
    assert_usable(path)
    text = path.read_text()
    shown = shown_by_browser(path, tmp_path)
    for element in ("<rect", "<polyline", "<td"):
        assert shown.count(element) == text.count(element) > 0


def test_losses_are_compared_and_differences_explained(
    trained: Path, printed: dict[str, Any]
) -> None:
    """The corpus has documents that are longer than a rank's tokens, which plain Megatron cuts."""
    losses = {name: dict(each) for name, each in printed["losses"].items()}
    apart = {step: abs(losses["ours"][step] - losses["plain"][step]) for step in (1, 2, 3)}
    compared = printed["compared_losses"]
    assert (compared["first"], compared["last"], compared["count"]) == (1, 3, 3)
    assert compared["largest_difference"] == max(apart.values()) > 1e-3
    assert apart[compared["at_iteration"]] == max(apart.values())
    assert compared["last_losses"] == {name: each[3] for name, each in losses.items()}
    for name, mean in compared["mean_losses"].items():
        assert mean == pytest.approx(statistics.mean(losses[name].values()))
    page = (trained / "page.html").read_text()
    assert f"Losses differ by {max(apart.values()):.2g} at most" in page
    assert "losses differ where documents cross these ends" in page


def test_only_runs_of_two_kinds_that_differ_by_more_than_rounding_are_explained() -> None:
    ours, near, far = {1: 7.0, 2: 6.0}, {2: 6.0001, 3: 5.0}, {1: 7.0, 2: 6.5}

    def said(planned: list[str], **losses: dict[int, float]) -> str:
        compared = LossComparison.of(losses, planned)
        assert compared is not None
        return compared.sentence()

    assert said(["a"], a=ours) == ""
    assert said(["a"], a=ours, b=near) == "Losses differ by 0.0001 at most, in iteration 2."
    assert said(["a", "b"], a=ours, b=far) == "Losses differ by 0.5 at most, in iteration 2."
    assert said(["a"], a=ours, b=far).startswith(
        "Losses differ by 0.5 at most, in iteration 2. Without --distca documents end where"
    )
    assert said(["a"], a=ours, b=far, c={}).startswith("Losses differ by 0.5 at most")
    # What is not finite is the largest difference.
    broken = LossComparison.of({"a": ours, "b": {1: float("nan"), 2: 6.0}}, ["a"])
    assert broken is not None
    assert (broken.at_iteration, broken.why) == (1, "")
    assert broken.figures()["largest_difference"] is None
    assert LossComparison.of({"a": {1: 1.0}, "b": {2: 1.0}}, []) is None


def test_logs_are_read_where_there_are_no_boards(tmp_path: Path, capsys) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "ours.log").write_text(DISTCA)
    (tmp_path / "logs" / "plain.out").write_text(PLAIN)
    (tmp_path / "logs" / "rank-0.log").write_text("Megatron prints this\n")
    assert main(["report", str(tmp_path)]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first == (
        "logs/ours.log: iterations 5 to 15, loss 7.5 to 7, 400 tokens/s. A step of "
        "logs/ours.log needs 2.5 seconds; logs/plain.out needs 4 (1.60 times as many)."
    )
    # The loss of both, in the iterations that both have.
    (differ,) = [line for line in table if line.startswith("Losses")]
    assert differ == "Losses differ by 0 at most, in iteration 5."
    assert "mean loss, iterations 5 to 10" in table[-2]
    assert [line.split()[-2:] for line in table[-3:-1]] == [["7.25"] * 2, ["7.375"] * 2]
    table = table[:-3]
    width = len("mean loss, iterations 5 to 10")
    width = max(width, *map(len, report.SHOWN))
    rows = {line[:width].strip(): line[width:].split() for line in table[1:]}
    assert table[0].split()[-2:] == ["logs/ours.log", "logs/plain.out"]
    assert report.ON_CPUS not in first
    assert rows["s"] == ["2.5", "4"]
    ours, plain = read_log(tmp_path / "logs" / "ours.log"), read_log(tmp_path / "logs/plain.out")
    assert ours[SECONDS] == {5: 9.5, 10: 2.5, 15: 1.5}
    assert (ours[WAIT][10], ours["MFU"][5], ours[RESERVED][5]) == (0.13, 0.41, 1.1)
    assert ours[ATTENTION_MEAN] == {5: 0.01, 10: 0.1, 15: 0.1}
    assert plain[SECONDS] == {5: 9.0, 10: 4.0}
    assert plain[LOSS] == {5: 7.5, 10: 7.25}


def test_a_timeline_alone_is_a_report(tmp_path: Path, capsys) -> None:
    event = {"ph": "X", "pid": 0, "tid": 0, "tdur": 0.0, "args": {}}
    spans = [
        event | {"name": "forward: micro-batch 0", "cat": "ticks", "ts": 0.0, "dur": 6e6},
        event | {"name": "core attention", "cat": "kernels", "ts": 1e6, "dur": 2e6},
        event | {"name": "wait for combine", "cat": "exchange", "ts": 3e6, "dur": 1e6},
        event | {"name": "pass on", "cat": "pipeline", "ts": 6e6, "dur": 4e6},
    ]
    write_trace(tmp_path / "trace.json", [("rank 0", spans)])
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "core attention 2, waits 1, other layers 3, between ticks 4" in capsys.readouterr().out
    assert_usable(tmp_path / "page.html")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "is not a folder: give the one that a run wrote to"),
        ("empty", "has no figures of a run: train with --tensorboard-dir or --distca-trace"),
    ],
)
def test_folders_without_runs_are_refused(tmp_path: Path, capsys, made, said: str) -> None:
    if made is not None:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "broken.json").write_text("{")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "x")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

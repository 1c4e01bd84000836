"""Grafana's dashboards: every panel shows something of what a real Prometheus scrapes from a real
run."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest

from distca.run_figures import AFTER, LOSS, MFU, MOVED, SPEED, board_files, read_boards
from megatron_patches.loop.metrics_file import METRICS, format_metrics, write_metrics
from support.ports import free_port
from support.pretraining import FLAGS, TOKENIZER, run_command
from support.prometheus import program, prometheus, queries_of, running
from support.whole_runs import write_documents


def test_every_panel_of_training_shows_a_real_run(tmp_path: Path) -> None:
    exporter = program("prometheus-node-exporter")
    corpus = write_documents(tmp_path / "corpus", [2000, *[40] * 60] * 4)
    file = tmp_path / "metrics" / "run.prom"
    flags = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--train-iters", "2", "--distca"]
    flags += ["--distca-metrics", str(file), "--tensorboard-dir", str(tmp_path / "boards")]
    run_command(2, [*flags, "--tensorboard-log-interval", "1"])
    assert [path.name for path in file.parent.iterdir()] == ["run.prom"]
    port = free_port()
    command = [exporter, "--collector.disable-defaults", "--collector.textfile"]
    command += [f"--collector.textfile.directory={file.parent}"]
    with (
        (tmp_path / "exporter.log").open("w") as log,
        running([*command, f"--web.listen-address=127.0.0.1:{port}"], log),
        prometheus(tmp_path, [port]) as server,
    ):
        server.wait_for("distca_training_iteration == 2")
        for title, queries in queries_of("training").items():
            empty = [query for query in queries if not server.ask(query)]
            assert len(empty) < len(queries), title
            # Of the two measures of utilization a machine has one.
            assert not empty or title == "Utilization", empty
        boards = read_boards(board_files(tmp_path / "boards"))
        for figure, unit in ((SPEED, 1), (AFTER, 1), (MOVED, 1e6), (LOSS, 1)):
            metric = METRICS[figure]
            label = f"{{{metric.label}}}" if metric.label else ""
            (found,) = server.ask(f"distca_training_{metric.name}{label}")
            assert float(found["value"][1]) == pytest.approx(boards[figure][2] * unit, rel=1e-5)


def test_a_run_without_distca_has_metrics_too(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", [2000, *[40] * 60] * 4)
    flags = [*TOKENIZER, *FLAGS, "--data-path", corpus, "--train-iters", "2"]
    run_command(2, [*flags, "--distca-metrics", str(tmp_path / "run.prom")])
    text = (tmp_path / "run.prom").read_text()
    assert "\ndistca_training_iteration 2.0\n" in f"\n{text}"
    assert "distca_training_tokens_per_second " in text
    assert "load_max_over_mean" not in text


def test_metrics_are_in_prometheus_format(tmp_path: Path) -> None:
    checker = program("promtool")
    figures = {name: number / 3 for number, name in enumerate(METRICS)}
    done = subprocess.run(
        [checker, "check", "metrics"], input=format_metrics(figures), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    text = format_metrics({LOSS: math.nan, SPEED: math.inf, "other": 1.0})
    assert re.findall(r"^distca\S+ (\S+)$", text, re.M) == ["NaN", "+Inf"]
    write_metrics(tmp_path / "x.prom", figures)
    assert (tmp_path / "x.prom").read_text() == format_metrics(figures)
    assert f"distca_training_mfu {figures[MFU]}" in format_metrics(figures)


def test_dashboards_name_metrics_that_there_are() -> None:
    text = "\n".join(query for each in queries_of("training").values() for query in each)
    named = set(re.findall(r"distca_training_(\w+)", text))
    # What stands in for seconds on CPUs is no figure of a GPU's run.
    assert named == {metric.name for metric in METRICS.values()} - {"cpu_seconds"}
    source = (Path(__file__).parents[2] / "distca" / "vllm" / "stats.py").read_text()
    pages = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    for queries in queries_of("vllm").values():
        for name in re.findall(r"vllm:(distca_\w+?)(?:_bucket)?\b(?=\{)", " ".join(queries)):
            assert f"vllm:{name}" in pages
            assert name.removeprefix("distca_").removesuffix("_total").split("_")[0] in source


@pytest.mark.parametrize("name", ["training", "vllm"])
def test_queries_are_prometheus_queries(name: str, tmp_path: Path) -> None:
    checker = program("promtool")
    rules = [
        f"  - {{record: 'checked:{number}', expr: {query!r}}}"
        for number, query in enumerate(q for each in queries_of(name).values() for q in each)
    ]
    (tmp_path / "rules.yml").write_text("\n".join(["groups:", "- name: all", "  rules:", *rules]))
    done = subprocess.run(
        [checker, "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr

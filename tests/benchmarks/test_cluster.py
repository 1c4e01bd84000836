"""The paper's experiments on simulated clusters: what is run, remembered and picked."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cluster import paper, sweep, tables
from benchmarks.cluster.sweep import Case, Runner, Unit, paper_distribution
from benchmarks.cluster.tables import AS_THE_PAPER, GROUPS, TOLERANCES, Group, _range, speed_up
from benchmarks.published_lengths import papers
from benchmarks.sources import imported_files, stale_pages
from distca.documents.lengths import draw
from distca.simulate import (
    CLUSTERS,
    PUBLISHED,
    Candidate,
    Choice,
    advise,
    space,
    training_flags,
    variants,
)
from distca.simulate.advice import Extent
from distca.simulate.speed_up import SpeedUp
from distca.simulate.variants import (
    sizes_of,
)

CASE = Case("llama-8b", "pretrain", 131_072, 8, 64)


def test_batches_are_sequences_of_the_papers_documents() -> None:
    batch = CASE.batch(3)
    assert [int(sequence.sum()) for sequence in batch] == [131_072] * 8
    again = CASE.batch(3)
    assert all((one == other).all() for one, other in zip(batch, again, strict=True))
    for longest in (131_072, 524_288):
        shares = {}
        for name in ("pretrain", "prolong"):
            lengths = draw(paper_distribution(name, longest), 2**28, 0)
            assert lengths.max() <= longest
            shares[name] = float(lengths[lengths >= 32_768].sum() / lengths.sum())
        # ProLong's mixture has 60% of its tokens in long documents.
        assert shares["prolong"] == pytest.approx(0.6, abs=0.03)


def test_what_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    candidate = Candidate("wlb-llm", 8, 1, 4, 2, 1)
    units = [Unit(CASE, candidate, seed) for seed in range(2)]
    first = Runner(path, 1).run(units, "test")
    assert all(row["fits"] and row["tokens"] == 2**20 for row in first)
    # The last line was not written to its end.
    path.write_text(path.read_text()[:-5])

    def count(unit: Unit) -> dict[str, Any]:
        return {"key": unit.key, "seconds": -1.0}

    monkeypatch.setattr(sweep, "run_unit", count)
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", ThreadPoolExecutor)
    again = Runner(path, 1).run([*units, Unit(CASE, candidate, 7)], "test")
    assert sum(row["seconds"] < 0 for row in again) == 2
    assert sum(row in first for row in again) == 1
    assert len([json.loads(line) for line in path.open()]) == 3


def test_the_search_is_that_of_the_command(tmp_path: Path) -> None:
    """With server pools, too."""
    case = Case("llama-8b", "pretrain", 131_072, 16, 128, charges=PUBLISHED)
    runner, batches = Runner(tmp_path / "runs.jsonl", 1), [case.batch(seed) for seed in range(2)]
    systems = ["cp-p2p", "wlb-llm", "tiles"]
    choices = advise(case.workload, batches, systems, [8], [1], 4, TOLERANCES)
    extent = Extent([8], [1], 4, TOLERANCES)
    assert [runner.best(case, system, extent, 2) for system in systems] == choices
    ran = [json.loads(line) for line in (tmp_path / "runs.jsonl").open()]
    simulated = {json.dumps(row, sort_keys=True) for row in ran}
    assert len(simulated) == len(ran)
    assert choices[-1].candidate is not None
    assert choices[-1].candidate.pool_size is not None
    assert choices[-1].candidate.keeps_inputs


def test_the_papers_scheduler_runs_as_the_paper_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At all sizes and tolerances, and without what the paper has not."""
    case = replace(CASE, charges=PUBLISHED)
    ran: list[Candidate] = []

    class Counted(Runner):
        def run(self, units: Sequence[Unit], title: str) -> list[dict[str, Any]]:
            ran.extend(unit.candidate for unit in units)
            return [unit.run() for unit in units]

    def tried(way: bool) -> set[Candidate]:
        ran.clear()
        extent = Extent([8], [1], 1, TOLERANCES, in_the_papers_way=way)
        best = Counted(Path(), 1).best(case, "greedy", extent, 1)
        assert best.candidate in ran
        return set(ran)

    as_the_paper = tried(True)
    assert {candidate.tolerance for candidate in as_the_paper} == {None, *TOLERANCES}
    assert all(replace(c, tolerance=None) == sizes_of(c) for c in as_the_paper)
    assert any(candidate.keeps_inputs for candidate in tried(False))


@pytest.mark.parametrize("uneven", [True, False])
def test_where_nothing_fits_parts_become_smaller(
    monkeypatch: pytest.MonkeyPatch, uneven: bool
) -> None:
    """A job of Table 3, which fits in the first batch as it is, and in others not: micro-batches
    are smaller than a sequence, or without these buffers are smaller."""
    if not uneven:
        for module in (space, variants):
            monkeypatch.setattr(module, "with_uneven_micro_batches", lambda *_: [])
    case = Case("llama-34b", "pretrain", 524_288, 2, 64, charges=PUBLISHED)

    class OfLargeBatches(Runner):
        """The 15th and the 28th batch, in which servers would receive most, after the first."""

        def run(self, units: Sequence[Unit], title: str) -> list[dict[str, Any]]:
            return [replace(unit, seed=(0, 14, 27)[unit.seed]).run() for unit in units]

    best = OfLargeBatches(Path(), 1).best(case, "tiles", Extent([8], [1], 4, TOLERANCES), 3)
    assert best.candidate is not None
    assert (best.tried, best.out_of_memory) == (2, 1)
    bound = best.candidate.max_buffer_bytes
    assert best.memory_gb <= 145.0
    if uneven:
        assert bound is None
        assert best.candidate.micro_batches > case.workload.sequences
        return
    assert bound is not None
    assert f"--distca-max-buffer-bytes {bound}" in training_flags(best.candidate, case.workload)
    unbounded = Unit(case, replace(best.candidate, max_buffer_bytes=None), 27).run()
    assert not unbounded["fits"]
    # A bound that no plan keeps to is none that fits.
    none = Unit(case, replace(best.candidate, max_buffer_bytes=1), 27).run()
    assert not none["fits"]


def test_results_are_of_one_program_and_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(CASE, Candidate("wlb-llm", 8, 1, 4, 2, 1), 0)
    key = unit.key
    assert key == replace(unit).key != replace(unit, seed=1).key
    monkeypatch.setitem(
        CLUSTERS,
        "dgx-h200",
        replace(CLUSTERS["dgx-h200"], memory_gb=CLUSTERS["dgx-h200"].memory_gb + 1),
    )
    other = unit.key
    assert other != key
    monkeypatch.setattr(sweep, "digest_of_script", lambda script: "of another version")
    assert unit.key not in (key, other)


def test_results_are_of_one_list_of_published_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "L,cp,tp,duration_per_doc\n65536,1,1,200.0\n131072,1,1,800.0\n"
    (tmp_path / "attention_forward_h100.csv").write_text(rows)
    unit = Unit(replace(CASE, published=str(tmp_path)), Candidate("wlb-llm", 8, 1, 4, 2, 1), 0)
    keys = []
    for longest in (100_000, 50_000):
        unit.case.published_lengths.write_text(json.dumps([100, 20_000, longest]))
        sweep.digest_of.cache_clear()
        keys.append(unit.key)
    assert keys[0] != keys[1] == unit.key
    # What draws from them is part of the program.
    assert {"published_lengths.py", "lengths.py", "index.py", "tick_schedule.py"} <= {
        path.name for path in imported_files(sweep.PROGRAM)
    }


def test_documents_drawn_as_the_papers_experiments_do(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([1000] * 160 + [40_000] * 40 + [70_000] * 20))
    pretrain, prolong = (
        Counter(papers(path, name)(2**30, 131_072, 0).tolist()) for name in ("pretrain", "prolong")
    )
    # Lengthened by two; then those of 64K or more four times, and half of the others.
    assert pretrain[80_000] == pytest.approx(2 * pretrain[131_072], rel=0.05)
    assert pretrain[2000] == pytest.approx(pretrain[131_072], rel=0.3)
    assert pretrain[1000] == 0
    # As they are, but for some of the longest.
    assert prolong[1000] == pytest.approx(4 * prolong[40_000], rel=0.05)
    assert prolong[40_000] == pytest.approx(2 * (prolong[70_000] + prolong[131_072]), rel=0.05)
    assert prolong[70_000] > prolong[131_072] > 0


def test_a_command_in_a_report_names_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = json.dumps([100, 20_000, 131_072] * 100)
    for name in ("wlbllm", "prolong"):
        (tmp_path / f"document_lengths_{name}.json").write_text(lengths)
    rows = "L,cp,tp,duration_per_doc\n65536,1,1,200.0\n131072,1,1,800.0\n"
    (tmp_path / "attention_forward_h100.csv").write_text(rows)
    command = ["paper.py", f"--published={tmp_path}", "fig3", "--output", str(tmp_path)]
    command += ["--batches", "1", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", command)
    paper.main()
    text = (tmp_path / "fig3_published.md").read_text()
    made_by = "python benchmarks/cluster/paper.py fig3 --batches 1 --published DIR --output DIR"
    assert f"`{made_by}`" in text
    monkeypatch.setattr(sys, "argv", [*command, "--papers-documents"])
    paper.main()
    other = (tmp_path / "fig3_published_papers_documents.md").read_text()
    assert "--papers-documents" in other
    assert "lengthened, repeated and left out" in other
    assert "lengths published with WLB-LLM" in text
    assert str(tmp_path) not in text
    assert "(fig3_published.png)" in text
    assert not (tmp_path / "fig3.md").exists()


@pytest.mark.parametrize("name", ["appendix", "fig3"])
def test_an_experiment_writes_its_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["paper.py", name, "--output", str(tmp_path), "--batches", "1", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", command)
    paper.main()
    text = (tmp_path / f"{name}.md").read_text()
    assert text.startswith(capsys.readouterr().out.strip())
    assert f"`python benchmarks/cluster/paper.py {name} --batches 1 --output DIR`" in text
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").open()))
    if name == "appendix":
        assert [int(float(row["shards"])) for row in rows] == [31, 30, 29]
        return
    kept, anew = (
        [float(row[f"all-gather share, {way}"]) for row in rows]
        for way in ("kept", "gathered again")
    )
    # The paper: 3% on 2 nodes, nearly 40% on 32, with keys that are kept.
    assert kept == sorted(kept)
    assert 0.02 < kept[0] < 0.04
    assert 0.35 < kept[-1] < 0.45
    assert all(one < other for one, other in zip(kept, anew, strict=True))
    assert f"| 32 | {kept[-1]:.1%} | {anew[-1]:.1%} | " in text
    assert (tmp_path / "fig3.png").stat().st_size > 5000
    keys = [json.loads(line)["key"] for line in (tmp_path / "runs.jsonl").open()]
    assert len(keys) == len(np.unique(keys)) == 10


def test_no_loss_in_a_job_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job, as both pages have it; its page says what was gained, and where nothing was."""
    job = {("llama-8b", 128): [(8, 64)]}
    systems = ("per-document-cp", "wlb-llm", "wlb-llm-paper", "greedy", "tiles")
    group = Group("A job", "table3", job, (4, 8), (1,), systems, True)
    monkeypatch.setitem(GROUPS, "table3", group)
    command = ["paper.py", "table3", "--models", "llama-8b", "--documents", "pretrain"]
    command += ["--output", str(tmp_path), "--batches", "4", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--finalists", "2"])
    paper.main()
    (row,) = csv.DictReader((tmp_path / "table3.csv").open())
    assert row["tiles configuration"].startswith("TP4 PP1 DP16, 1 micro")
    assert 0.99 <= float(row["tiles speed-up"]) < 1.1
    text = (tmp_path / "table3.md").read_text()
    assert f"`tiles` is at least {float(row['tiles speed-up']):.3f} (" in text
    assert "times as fast as WLB-LLM in all 1 jobs. No other system is faster in any job." in text
    theirs, ours = (float(row[f"{name}, MLPs again tokens/s"]) for name in AS_THE_PAPER)
    gain = rf"{ours / theirs:.2f} to {ours / theirs:.2f} ± 0\.\d+"
    assert re.search(rf"\| {gain} \| 1.07 to 1.20 \|", text)
    # The mean of four batches and its range.
    assert re.search(rf"\| {float(row['tiles speed-up']):.3f} \(\d\.\d+ to \d\.\d+\) \|", text)
    assert len(row["tiles seconds"].split()) == 4
    assert theirs < float(row["wlb-llm-paper tokens/s"])


def test_a_ratio_of_a_table_has_its_range() -> None:
    """Of the same batches; a stored row without them has the ratio alone."""
    row = {"a tokens/s": 2.0, "b tokens/s": 1.6, "a seconds": "1 1", "b seconds": "1 1.5"}
    gain = speed_up(row, "a", "b")
    assert gain == SpeedUp.of([1.0, 1.0], [1.0, 1.5])
    assert _range([row], "a", "b") == f"1.25 to 1.25 ± {gain.high - gain.mean:.3f}"
    for more in ({"b seconds": "1"}, {"a seconds": "", "b seconds": ""}):
        alone = speed_up(row | more, "a", "b")
        assert str(alone) == "1.250"
        assert _range([row | more], "a", "b") == "1.25 to 1.25"
    out = row | {"a tokens/s": float("nan")}
    assert speed_up(out, "a", "b") is None
    assert _range([row, out], "a", "b").endswith("(1 of 2 not comparable)")


def test_some_systems_of_a_table_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All other figures stay, and the page says so and has no digest of today's code."""
    job = {("llama-8b", 128): [(8, 64)]}
    group = Group("A job", "", job, (8,), (1,), ("hybrid-cp", "wlb-llm", "tiles"), False)
    monkeypatch.setitem(GROUPS, "beyond", group)
    monkeypatch.setattr(tables, "STORED", tmp_path)
    seconds = iter([1.0, 2.0, 4.0, 8.0])

    def found(runner: Runner, case: Case, system: str, extent: Extent, batches: int) -> Choice:
        speed = next(seconds)
        return Choice(system, Candidate(system, 8, 1, 8, 1, 1), 1.0, speed, 1.0, 0.5, 0.25, 1, 1, 0)

    monkeypatch.setattr(Runner, "best", found)
    command = ["paper.py", "beyond", "--models", "llama-8b", "--documents", "pretrain"]
    command += ["--output", str(tmp_path), "--processes", "1", "--batches"]
    rows = []
    page = tmp_path / "beyond.md"
    dated = "Made by the code of commit 9236283, 2026-11-23."
    for more in (["4"], ["2", "--systems", "hybrid-cp"]):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        paper.main()
        (row,) = csv.DictReader((tmp_path / "beyond.csv").open())
        rows.append(row)
        if len(rows) == 1:
            page.write_text(f"{page.read_text()}\n{dated}\n")
    speeds = [[float(row[f"{system} speed-up"]) for system in group.systems] for row in rows]
    assert speeds == [[0.5, 1.0, 2.0], [4.0, 1.0, 2.0]]
    assert {name for name in rows[0] if rows[0][name] != rows[1][name]} == {
        "hybrid-cp tokens/s",
        "hybrid-cp speed-up",
    }
    text = (tmp_path / "beyond.md").read_text()
    assert f"Simulated again: hybrid-cp.\nAll other figures made by{dated[7:]}\n" in text
    assert text.count("beyond --batches 4 --models llama-8b --documents pretrain --output") == 1
    assert stale_pages(tmp_path) == ([], {"beyond.md": "9236283"})
    monkeypatch.setattr(sys, "argv", [*command, "2", "--systems", "cp-p2p"])
    with pytest.raises(SystemExit):
        paper.main()
    assert "beyond has only hybrid-cp, wlb-llm, tiles" in capsys.readouterr().err


def test_some_jobs_of_a_table_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of few sequences; the page names the commit that stored the others."""
    jobs = {("llama-8b", 128): [(8, 64), (16, 128)], ("llama-8b", 256): [(4, 64)]}
    group = Group("Some jobs", "", jobs, (8,), (1,), ("wlb-llm", "tiles"), False)
    monkeypatch.setitem(GROUPS, "beyond", group)
    monkeypatch.setattr(tables, "STORED", tmp_path)
    ran: list[tuple[str, int]] = []

    def found(runner: Runner, case: Case, system: str, extent: Extent, batches: int) -> Choice:
        ran.append((system, case.gpus * case.sequences))
        speed = float(len(ran))
        return Choice(system, Candidate(system, 8, 1, 8, 1, 1), 1.0, speed, 1.0, 0.5, 0.25, 1, 1, 0)

    monkeypatch.setattr(Runner, "best", found)
    command = ["paper.py", "beyond", "--models", "llama-8b", "--documents", "pretrain"]
    command += ["--output", str(tmp_path), "--processes", "1", "--batches", "4"]
    rows = []
    for more in ([], ["--most-sequences", "8"]):
        ran.clear()
        monkeypatch.setattr(sys, "argv", [*command, *more])
        paper.main()
        rows.append(list(csv.DictReader((tmp_path / "beyond.csv").open())))
        if len(rows) == 1:
            git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
            for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a page"]):
                subprocess.run([*git, *words], cwd=tmp_path, check=True)
            commit = subprocess.check_output(
                ["git", "log", "-1", "--format=%h, %as"], cwd=tmp_path, text=True
            ).strip()
    assert ran == [("wlb-llm", 512), ("wlb-llm", 256), ("tiles", 512), ("tiles", 256)]
    # The job of 16 sequences has its stored figures, the others have what was found now.
    assert [row["tiles speed-up"] for row in rows[0]] == ["4.0", "2.5", "2.0"]
    assert [float(row["tiles speed-up"]) for row in rows[1]] == [3.0, 2.5, 2.0]
    assert rows[0][1] == rows[1][1]
    text = (tmp_path / "beyond.md").read_text()
    assert "Simulated again: 2 of 3 jobs, of at most 8 sequences.\n" in text
    assert f"All other figures made by the code of commit {commit}." in text
    assert stale_pages(tmp_path) == ([], {"beyond.md": commit.split(",")[0]})
    monkeypatch.setattr(sys, "argv", [*command, "--most-sequences", "3"])
    with pytest.raises(SystemExit):
        paper.main()
    assert "--most-sequences 3: no job has fewer than 4" in capsys.readouterr().err
    # A system that is younger than the stored table.
    wider = replace(group, systems=("wlb-llm", "dynamic-cp", "tiles"))
    monkeypatch.setitem(GROUPS, "beyond", wider)
    for words in (["--most-sequences", "8"], ["--systems", "tiles"]):
        monkeypatch.setattr(sys, "argv", [*command, *words])
        with pytest.raises(SystemExit):
            paper.main()
        why = f"{words[0]}: the stored beyond has no dynamic-cp: make all of it"
        assert why in capsys.readouterr().err


def test_a_page_names_the_jobs_in_which_a_peer_is_faster() -> None:
    job = {"model": "m", "documents": "d", "longest": "1K", "batch": 2, "GPUs": 8}
    speeds = {"tiles": 2.0, "wlb-llm": 1.0, "cp-p2p": 4.0, "hybrid-cp": float("nan")}
    row = job | {f"{system} tokens/s": speed for system, speed in speeds.items()}
    alone = row | {"wlb-llm tokens/s": float("nan"), "cp-p2p tokens/s": 1.0}
    over = {system: tables.OVER[system] for system in ("cp-p2p", "hybrid-cp", "wlb-llm")}
    first, _, *slower = tables._least([row, alone], over)
    assert first.startswith("`tiles` is at least 2.000 times as fast as WLB-LLM in 1 jobs. In the ")
    assert slower == ["* 0.500 times as fast as ring CP: m, d, 1K, batch of 2, 8 GPUs"]
    (text,) = tables._least([row], {"wlb-llm": "WLB-LLM"})
    assert text.endswith("in all 1 jobs. No other system is faster in any job.")
    assert tables._least([alone], over) == [
        "There is no job that both `tiles` and WLB-LLM can run."
    ]

"""`distca simulate`: advice for a workload, and the search behind it."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca import progress
from distca.commands import simulate as simulate_command
from distca.commands.main import main
from distca.commands.simulate_progress import simulating
from distca.commands.simulate_report import PARTS
from distca.cost.model_sizes import MODELS, ModelSize
from distca.simulate import (
    CLUSTERS,
    DISTCA_SYSTEMS,
    SYSTEMS,
    Breakdown,
    Candidate,
    Outcome,
    Workload,
    advise,
    break_down,
    candidates,
    divisions,
    pack_sequences,
    simulate,
    trials,
)
from distca.simulate.bounds import Bounds
from distca.simulate.space import estimate
from distca.simulate.variants import (
    with_fewer_in_flight,
    with_kept_inputs,
    with_or_without_ping_pong,
    with_pools,
)
from support.commands import Command

MEGATRON = importlib.util.find_spec("megatron") is not None
"""Hybrid context parallelism is compared where Megatron's scheduler is."""

SMALL = """
    --context 8192 --sequences 4 --layers 4 --hidden-size 512 --heads 8 --kv-heads 4 --head-dim 64
    --ffn-hidden-size 1024 --vocab-size 1000 --cluster dgx-a100 --gpus 8 --batches 2
    --tensor-model-parallel-sizes 1 2 --pipeline-model-parallel-sizes 1 2 --finalists 2
""".split()
MODEL = ModelSize(4, 512, 8, 4, 64, 1024, 1000)
WORKLOAD = Workload(MODEL, CLUSTERS["dgx-a100"], gpus=8, context=8192, sequences=4)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command("simulate", capsys)


@pytest.fixture
def lengths_file(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([20000, 9000, 100, 1, *[400] * 50]))
    return str(path)


def test_a_table_and_its_files(command, lengths_file: str, tmp_path: Path) -> None:
    plot, trace = tmp_path / "advice.png", tmp_path / "trace.json"
    files = ["--plot", str(plot), "--trace", str(trace)]
    text = command.run("--lengths", lengths_file, *SMALL, *files)
    lines = text.splitlines()
    assert lines[1].startswith("8 GPUs of dgx-a100, 4 sequences of 8,192 tokens, 2 batch(es)")
    shared = [f"context parallel, {way}" for way in ("ring", "all-to-all", "a2a+p2p", "all-gather")]
    hybrid = ["hybrid context parallel"] if MEGATRON else []
    titles = ["plain Megatron", *shared, *hybrid, "dynamic context parallel", "WLB-LLM", "DistCA"]
    speeds = []
    for line, title in zip(lines[3:], titles, strict=False):
        assert line.startswith(title)
        assert "TP" in line
        speeds.append(float(line[30:].split()[0].replace(",", "")))
    assert "links reach 86% and copies 90%" in text
    # The first line is the answer, over the best that every user of Megatron has.
    best = max(range(len(titles) - 3), key=speeds.__getitem__)
    gain = f"{speeds[-1] / speeds[best]:.3f} ("
    assert f"  {gain}" in lines[3 + best]
    assert titles[best] in lines[0]
    assert lines[0].startswith(("Use DistCA: ", "No clear difference: ", "Don't use DistCA: "))
    assert lines[0].startswith("Don't") or gain in lines[0]
    assert plot.stat().st_size > 5000
    parts = lines[lines.index("Where the time of an iteration goes, in seconds (first batch):") :]
    assert [line[2:48].strip() for line in parts[2:10]] == list(PARTS.values())
    shares = [[float(s) for s in re.findall(r"\(([\d.]+)%\)", line)] for line in parts[2:10]]
    assert all(sum(column) == pytest.approx(100, abs=0.5) for column in zip(*shares, strict=True))
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event["name"] == "core attention" for event in events)


def test_plans_of_many_ticks_are_not_made_again_for_the_breakdown(
    command, lengths_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = []

    def noted(self: trials.Trials, candidate: Candidate) -> Breakdown:
        again.append(candidate.system)
        return break_down(candidate, self._workload, self._batches[0])

    monkeypatch.setattr(trials.Trials, "break_down", noted)
    monkeypatch.setattr(
        Bounds, "has_many_ticks", lambda _, candidate: candidate.system in DISTCA_SYSTEMS
    )
    monkeypatch.setattr(Bounds, "promised", lambda *_: 1.0)
    systems = ["--systems", "plain", "tiles"]
    lines = command.run("--lengths", lengths_file, *SMALL, *systems).splitlines()
    told = lines.index("Where the time of an iteration goes, in seconds (first batch):")
    assert lines[told + 1].split() == ["DistCA,", "tiles", "plain", "Megatron"]
    assert again == ["plain"]


def test_json_has_what_the_table_has(
    command, lengths_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = ["plain", "per-document-cp", "wlb-llm", "tiles"]
    given = ["--lengths", lengths_file, *SMALL, "--json", "--systems", *systems]
    found = json.loads(command.run(*given))
    rows = found["systems"]
    assert [row["system"] for row in rows] == systems
    for row in rows:
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(4 * 8192)
        assert 0 < row["memory_gb"] < 80
        candidate = Candidate(**row["candidate"])
        sizes = candidate.tensor * candidate.stages * candidate.data * candidate.context
        assert sizes == 8
    # A second run prints the same. Progress goes to standard error.
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    assert found == json.loads(command.run(*given))
    lines = command.errors.splitlines()
    assert lines
    assert all(line.startswith("distca simulate: 0:") for line in lines)
    # Without charges all are faster.
    ideal = json.loads(command.run(*given, "--baseline-ideal"))["systems"]
    assert all(one["seconds"] < row["seconds"] for one, row in zip(ideal, rows, strict=True))
    # Rounding makes no idle time of less than none.
    sums = np.array([0.1 + 0.2])
    zeros = np.zeros(1)
    assert Outcome(0.3, 1, 1, zeros, 1.0, sums, zeros, zeros, {}).idle == 0


def test_progress_is_there_from_the_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, before anything is simulated."""
    of_terminal = io.StringIO()
    of_terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", of_terminal)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_BARS", 0.01)
    with simulating(["plain"]):
        time.sleep(0.2)
        assert "usually at most a minute: 0 iterations" in of_terminal.getvalue()


def test_searches_tell_how_far_they_are() -> None:
    batches, told = [sequences()], list[tuple[str, float]]()
    with trials.Trials(WORKLOAD, batches) as some:
        systems = ["plain", "tiles"]
        advise(WORKLOAD, batches, systems, [2], [1], 1, (), some, lambda *each: told.append(each))
    for system in systems:
        shares = [share for name, share in told if name == system]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        assert len(shares) > 2


def test_windows(command, lengths_file: str) -> None:
    """Megatron's rings have none. Short windows on most layers take less time."""
    given = ["--lengths", lengths_file, *SMALL, "--systems", "plain", "cp-p2p", "tiles"]
    windows = ["--window-left", "255", "--window-attn-skip-freq", "2"]
    text = command.run(*given, *windows)
    assert re.search(
        r"^context parallel, ring +has neither windows nor chunks$", text, re.MULTILINE
    )
    with_windows, without = (
        json.loads(command.run(*given, "--json", *more))["systems"] for more in (windows, [])
    )
    for place in (0, 2):
        assert with_windows[place]["seconds"] < without[place]["seconds"]
    # Of presets, too; where inference is simulated they are refused.
    prefill = "prefill --new-tokens 100 --context-parallel-size 2 --model gemma3-27b-like"
    assert "gemma3-27b-like has layers with windows" in command.refused(*prefill.split())


def test_out_of_memory_is_an_answer(command, lengths_file: str) -> None:
    text = command.run("--lengths", lengths_file, *SMALL, "--memory-gb", "4.02")
    assert text.count("out of memory in all") == (9 if MEGATRON else 8)
    flags = ["--lengths", lengths_file, *SMALL, "--memory-gb", "4.02", "--json"]
    found = json.loads(command.run(*flags))
    assert found["verdict"].startswith("Nothing fits in memory")
    assert found["use_distca"] is None
    rows = found["systems"]
    assert all(row["candidate"] is None and row["seconds"] is None for row in rows)
    assert all(row["tried"] == row["out_of_memory"] > 0 for row in rows)


def test_the_table_is_not_lost_where_a_file_cannot_be_written(
    lengths_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--systems", "plain", "tiles", "--finalists", "1"]
    mine = ["simulate", "--lengths", lengths_file, *SMALL, *few]
    with pytest.raises(SystemExit) as stopped:
        main([*mine, "--trace", str(tmp_path / "t.json"), "--memory-gb", "4.02"])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert "out of memory in all" in captured.out
    assert "nothing of DistCA fits" in captured.err
    # A link into what is not a folder is found out when it is written.
    plot = tmp_path / "plot.png"
    (tmp_path / "file").touch()
    plot.symlink_to(tmp_path / "file" / "plot.png")
    with pytest.raises(SystemExit):
        main([*mine, "--plot", str(plot)])
    captured = capsys.readouterr()
    assert "DistCA, tiles " in captured.out
    assert f"{plot} cannot be written: Not a directory" in captured.err


def test_what_is_refused(command, lengths_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ["--lengths", lengths_file, *SMALL]
    for more, message in (
        (["--cluster", "dgx-1"], "no cluster 'dgx-1'"),
        (["--cluster", "mine.yaml"], "hgx-h20, or give a .json file that `distca verify` wrote"),
        (["--model", "gpt-2"], "no model 'gpt-2'"),
        (["--gpus", "7"], "no layout divides 7 GPUs: ranks must share"),
        (["--gpus", "7"], "layers. Give --gpus 4 or 8, or other --sequences"),
        (["--gpus", "99999999"], "--gpus 99999999: give at most 65536"),
        (["--gpus", "12"], "--gpus 12 are not whole nodes of 8: give a multiple, or --gpus-per"),
        (["--batches", "0"], "--batches 0 must be at least 1"),
        (["--tolerance", "1"], "--tolerance 1.0 is out of range"),
        (["--network-gb-per-s", "-1"], "--network-gb-per-s -1.0 must be positive"),
        (["--peak-tflops", "nan"], "--peak-tflops nan must be positive and finite"),
        (["--memory-gb", "inf"], "--memory-gb inf must be positive and finite"),
        (["--linear-mfu", "nan"], "--linear-mfu nan must be positive and finite"),
        (["--link-efficiency", "nan"], "--link-efficiency is nan: give a share above 0"),
        (["--interference", "inf"], "--interference is inf: give the share"),
        (["--tolerance", "nan"], "--tolerance nan is out of range"),
        (["--linear-mfu", "1.5"], "--linear-mfu 1.5 is a part of the peak"),
        (["--interference", "1"], "--interference is 1.0: give the share of compute"),
        (["--link-efficiency", "0"], "--link-efficiency is 0.0: give a share above 0"),
        (
            ["--baseline-ideal", "--copy-efficiency", "1"],
            "--baseline-ideal charges nothing: leave out --copy-efficiency",
        ),
        (["--seed", "-1"], "--seed -1 must not be negative"),
        (["--heads", "0"], "--heads 0 must be at least 1"),
        (["--num-experts", "8"], "experts need --moe-router-topk, --moe-ffn-hidden-size, too"),
        (["--expert-model-parallel-size", "2"], "2 GPUs cannot share experts: there are none"),
        (["--window-left", "-1"], "--window-left -1 must not be negative"),
        (["--window-attn-skip-freq", "2"], "layers have windows or chunks: add --window-left"),
        (["--window-left", "9", "--window-attn-skip-freq", "1"], "must be at least 2"),
        (["--tensor-model-parallel-sizes", "0"], "every size must be at least 1"),
        (["--systems", "plain"], "--finalists is for DistCA: add one of greedy, tiles"),
        (["--trace", "t.json", "--systems", "plain"], "--trace is of DistCA: add one of greedy"),
        (["--plot", "x.foo"], "--plot x.foo: the suffix must be one of"),
        (["--plot", "plot"], "--plot plot: the suffix must be one of"),
        (["--plot", f"{lengths_file}/x.png"], "lengths.json is not a folder"),
        (["--trace", f"{lengths_file}/sub/t.json"], "lengths.json is not a folder"),
        (["--trace", str(Path(lengths_file).parent)], "is a folder: give the name of a file"),
    ):
        with monkeypatch.context() as patch:
            # Before any work.
            patch.setattr(simulate_command, "_advise", None)
            assert message in command.refused(*mine, *more)
    given = [
        *("--distribution", "nothing", "--context", "8", "--sequences", "1", "--gpus", "1"),
        *("--model", "llama-8b"),
    ]
    assert "no distribution 'nothing'" in command.refused(*given)
    lacking = ["--distribution", "fixed", "--context", "8", "--sequences", "1", "--gpus", "1"]
    assert "--layers" in command.refused(*lacking)


def sequences() -> list[np.ndarray]:
    return pack_sequences(np.array([20000, 5, *[300] * 42, 163]), 4, 8192)


def test_documents_are_cut_where_sequences_end() -> None:
    found = sequences()
    assert [int(each.sum()) for each in found] == [8192] * 4
    # The first document goes on in the next two.
    assert found[0].tolist() == [8192]
    assert found[2][0] == 20000 - 2 * 8192
    with pytest.raises(ValueError, match="do not fill 2 sequences of 8,192"):
        pack_sequences(np.array([8192]), 2, 8192)


def test_every_configuration_that_divides_can_be_run() -> None:
    batch = sequences()
    for system in SYSTEMS:
        found = divisions(system, WORKLOAD, [1, 2], [1, 2, 3])
        assert found
        assert {c.tensor * c.stages * c.data * c.context for c in found} == {8}
        assert not any(c.stages == 3 for c in found)
        for candidate in found[:: max(len(found) // 6, 1)]:
            outcome = simulate(candidate, WORKLOAD, batch)
            assert outcome.tokens == 4 * 8192
            assert outcome.gpus == 8
    with pytest.raises(ValueError, match="give 4 sequences"):
        simulate(found[0], WORKLOAD, batch[1:])
    with pytest.raises(ValueError, match="no system 'ring'"):
        divisions("ring", WORKLOAD, [1], [1])


@pytest.mark.parametrize(
    ("node", "gpus", "heads", "kv_heads"),
    [(12, 8, 8, 8), (8, 12, 8, 8), (8, 8, 12, 8), (8, 8, 8, 4)],
    ids=["node", "GPUs", "heads", "key-value heads"],
)
def test_tensor_parallelism_divides_all(node: int, gpus: int, heads: int, kv_heads: int) -> None:
    def of_eight(node: int, gpus: int, heads: int, kv_heads: int) -> list[Candidate]:
        model = replace(MODEL, heads=heads, kv_heads=kv_heads)
        cluster = replace(WORKLOAD.cluster, gpus_per_node=node)
        workload = replace(WORKLOAD, model=model, cluster=cluster, gpus=gpus)
        return divisions("tiles", workload, [8], [1])

    assert of_eight(8, 8, 8, 8)
    assert not of_eight(node, gpus, heads, kv_heads)


def test_candidates_are_those_that_may_fit() -> None:
    workload = Workload(
        MODELS["llama-8b"], CLUSTERS["dgx-h100"], gpus=64, context=131_072, sequences=32
    )
    able = candidates("tiles", workload, [8], [1, 4])
    # Four times as many tokens at once as fit are left out.
    assert min(c.micro_batches for c in able if c.stages == 1) == 4
    # In ticks a stage keeps 2 P - 1 micro-batches; where these don't fit, as many as 1F1B does.
    by_number = {c.micro_batches: c.max_in_flight for c in able if c.stages == 4}
    assert by_number == {16: 4, 32: None}
    small = replace(workload.cluster, memory_gb=5.0)
    assert candidates("tiles", replace(workload, cluster=small), [8], [1]) == []


def test_the_best_of_all_is_found() -> None:
    batch = sequences()
    (choice,) = advise(WORKLOAD, [batch], ["tiles"], [1, 2], [1, 2], finalists=100)
    every = {
        c: simulate(c, WORKLOAD, batch).seconds
        for c in candidates("tiles", WORKLOAD, [1, 2], [1, 2])
    }
    # All ranks are in one node: pools have one each.
    more = [each for base in every for each in (base, *with_pools(base, WORKLOAD))]
    for variants in (with_or_without_ping_pong, with_kept_inputs):
        more += [other for each in more for other in variants(each, WORKLOAD)]
    every |= {c: simulate(c, WORKLOAD, batch).seconds for c in more}
    assert choice.candidate is not None
    assert every[choice.candidate] == choice.seconds == min(every.values())
    assert (choice.simulated < choice.tried, choice.out_of_memory) == (True, 0)
    # Perfect balance and free exchanges take no longer.
    for candidate, seconds in every.items():
        assert estimate(candidate, WORKLOAD, batch) <= seconds * 1.001


def test_the_tolerance_is_the_fastest() -> None:
    given = [sequences()], ["tiles"], [1], [1], 100
    (fixed,) = advise(WORKLOAD, *given)
    assert fixed.candidate is not None
    assert fixed.candidate.tolerance is None
    (chosen,) = advise(WORKLOAD, *given, tolerances=(0.5, 0.02))
    assert chosen.candidate is not None
    seconds = {
        tolerance: simulate(
            replace(fixed.candidate, tolerance=tolerance), WORKLOAD, sequences()
        ).seconds
        for tolerance in (None, 0.5, 0.02)
    }
    assert len(set(seconds.values())) > 1
    assert chosen.seconds == min(seconds.values()) == seconds[chosen.candidate.tolerance]
    # It is no other configuration.
    assert chosen.simulated == fixed.simulated


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> dict[Candidate, int]:
    """Simulations in which a configuration fits in so many batches; all take as long."""
    fits_in: dict[Candidate, int] = {}
    seen: dict[Candidate, int] = {}

    def told(candidate: Candidate, workload: Workload, batch: object) -> Outcome:
        seen[candidate] = seen.get(candidate, 0) + 1
        needed = 1.0 if seen[candidate] <= fits_in.get(candidate, 0) else 3.0
        zeros = np.zeros(1)
        return Outcome(1.0, 1, 8, np.array([needed]), 2.0, zeros, zeros, zeros, {})

    monkeypatch.setattr(trials, "simulate", told)
    return fits_in


def by_promise() -> list[Candidate]:
    batch = sequences()
    found = candidates("tiles", WORKLOAD, [1, 2], [1, 2])
    return sorted(found, key=lambda candidate: estimate(candidate, WORKLOAD, batch))


@pytest.mark.parametrize("number", [0, 3, -1])
def test_the_search_goes_on_until_something_fits(tight: dict[Candidate, int], number: int) -> None:
    """Whatever promises more and is out of memory, a configuration that fits is found."""
    only = by_promise()[number]
    tight[only] = 2
    batches = [sequences()] * 2
    (choice,) = advise(WORKLOAD, batches, ["tiles"], [1, 2], [1, 2], finalists=1)
    assert choice.candidate == only
    # Others might fit with shared heads, but not all of these have run.
    assert choice.out_of_memory <= choice.simulated - 1
    assert number >= 0 or choice.out_of_memory == choice.simulated - 1
    (none,) = advise(WORKLOAD, batches, ["tiles"], [8], [4], finalists=1)
    assert (none.candidate, none.tried) == (None, 0)


def test_one_that_fits_in_some_batches_only_is_passed_over(tight: dict[Candidate, int]) -> None:
    order = by_promise()
    # More than run all batches at a time.
    tight.update(dict.fromkeys(order[:5], 2) | {order[7]: 3})
    (choice,) = advise(WORKLOAD, [sequences()] * 3, ["tiles"], [1, 2], [1, 2], finalists=2)
    assert choice.candidate == order[7]
    tight.clear()
    (none,) = advise(WORKLOAD, [sequences()], ["tiles"], [1, 2], [1, 2], finalists=2)
    assert none.candidate is None
    # It says "in all", so all of them must have run.
    assert none.out_of_memory == none.simulated == none.tried == len(order)


def test_fewer_micro_batches_in_flight_are_tried(tight: dict[Candidate, int]) -> None:
    piped = next(c for c in by_promise() if c.stages == 2)
    bound = replace(piped, max_in_flight=2)
    assert with_fewer_in_flight(piped) == [bound]
    assert with_fewer_in_flight(bound) == []
    assert with_fewer_in_flight(replace(piped, system="plain")) == []
    tight[bound] = 1
    (choice,) = advise(WORKLOAD, [sequences()], ["tiles"], [1, 2], [1, 2], finalists=1)
    assert choice.candidate == bound


def test_fewer_in_flight_are_tried_where_a_later_batch_does_not_fit(
    tight: dict[Candidate, int],
) -> None:
    order = by_promise()
    piped = next(c for c in order if c.stages == 2)
    bound = replace(piped, max_in_flight=2)
    # The first round has two.
    batches = [sequences()] * 3
    tight.update({piped: 2, bound: 3})
    (choice,) = advise(WORKLOAD, batches, ["tiles"], [1, 2], [1, 2], finalists=1)
    assert choice.candidate == bound
    assert choice.out_of_memory == choice.simulated - 1


def test_a_bound_that_has_not_run_is_not_said_to_be_out_of_memory(
    tight: dict[Candidate, int],
) -> None:
    order = by_promise()
    piped = next(c for c in order if c.stages == 2)
    whole = next(c for c in order if c.stages == 1)
    # The first round has two batches.
    tight.update({piped: 2, whole: 3})
    (choice,) = advise(WORKLOAD, [sequences()] * 3, ["tiles"], [1, 2], [1, 2], finalists=6)
    assert choice.candidate == whole
    # With fewer micro-batches in flight the other might fit, and more with shared heads.
    assert choice.out_of_memory <= choice.simulated - 2


def test_baselines_are_compared_on_all_batches() -> None:
    """The best of a baseline is the fastest over all batches, not over the first ones."""
    lengths = np.array([8192, 8192, 8192, 8192, *[128] * 256, *[128] * 256])
    all_sequences = pack_sequences(lengths, 12, 8192)
    batches = [all_sequences[n : n + 4] for n in (0, 4, 8)]
    (choice,) = advise(WORKLOAD, batches, ["wlb-llm"], [1, 2], [1, 2])
    every = {
        c: [simulate(c, WORKLOAD, batch).seconds for batch in batches]
        for c in candidates("wlb-llm", WORKLOAD, [1, 2], [1, 2])
    }
    assert choice.seconds == pytest.approx(min(sum(each) for each in every.values()) / 3)
    assert choice.seconds_of_batches == pytest.approx(every[choice.candidate])

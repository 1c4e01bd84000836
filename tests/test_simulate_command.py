"""`distca simulate`: advice for a job, and the search behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import Command

from distca.cost.models import MODELS, ModelSize
from distca.simulate import (
    CLUSTERS,
    SYSTEMS,
    Candidate,
    Job,
    advise,
    candidates,
    divisions,
    pack_sequences,
    simulate,
)
from distca.simulate.advice import estimate

SMALL = """
    --context 8192 --sequences 4 --layers 4 --hidden-size 512 --heads 8 --kv-heads 4 --head-dim 64
    --ffn-hidden-size 1024 --vocab-size 1000 --cluster dgx-a100 --gpus 8 --batches 2
    --tensor-model-parallel-sizes 1 2 --pipeline-model-parallel-sizes 1 2 --finalists 2
""".split()
MODEL = ModelSize(4, 512, 8, 4, 64, 1024, 1000)
JOB = Job(MODEL, CLUSTERS["dgx-a100"], gpus=8, context=8192, sequences=4)


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
    text = command.run(
        "--lengths", lengths_file, *SMALL, "--plot", str(plot), "--trace", str(trace)
    )
    lines = text.splitlines()
    assert lines[0].startswith("8 GPUs of dgx-a100, 4 sequences of 8,192 tokens")
    for line, title in zip(
        lines[2:], ["plain Megatron", "context parallel", "WLB-LLM", "DistCA"], strict=False
    ):
        assert line.startswith(title)
        assert "TP" in line
    assert "times plain Megatron; " in lines[-1]
    assert plot.stat().st_size > 5000
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event["name"] == "core attention" for event in events)


def test_json_has_what_the_table_has(command, lengths_file: str) -> None:
    rows = json.loads(command.run("--lengths", lengths_file, *SMALL, "--json"))
    assert [row["system"] for row in rows] == ["packed", "per-document-cp", "wlb-llm", "tiles"]
    for row in rows:
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(4 * 8192)
        assert 0 < row["memory_gb"] < 80
        candidate = Candidate(**row["candidate"])
        sizes = candidate.tensor * candidate.stages * candidate.data * candidate.context
        assert sizes == 8
    # The same again is the same.
    assert rows == json.loads(command.run("--lengths", lengths_file, *SMALL, "--json"))


def test_out_of_memory_is_an_answer(command, lengths_file: str) -> None:
    text = command.run("--lengths", lengths_file, *SMALL, "--memory-gb", "4.02")
    assert text.count("out of memory in all") == 4
    rows = json.loads(
        command.run("--lengths", lengths_file, *SMALL, "--memory-gb", "4.02", "--json")
    )
    assert all(row["candidate"] is None and row["seconds"] is None for row in rows)
    assert all(row["tried"] == row["out_of_memory"] > 0 for row in rows)


def test_what_is_refused(command, lengths_file: str) -> None:
    mine = ["--lengths", lengths_file, *SMALL]
    for more, message in (
        (["--cluster", "dgx-1"], "no cluster 'dgx-1': choose from dgx-h100"),
        (["--model", "gpt-2"], "no model 'gpt-2'"),
        (["--gpus", "7"], "no configuration divides 7 GPUs"),
        (["--batches", "0"], "--batches 0 must be at least 1"),
        (["--tolerance", "1"], "--tolerance 1.0 is out of range"),
        (["--network-gb-per-s", "-1"], "network_gb_per_s is -1.0"),
        (["--heads", "0"], "--heads 0 must be at least 1"),
        (["--tensor-model-parallel-sizes", "0"], "every size must be at least 1"),
        (["--trace", "t.json", "--memory-gb", "4.02"], "nothing of DistCA fits"),
    ):
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
        found = divisions(system, JOB, [1, 2], [1, 2, 3])
        assert found
        assert {c.tensor * c.stages * c.data * c.context for c in found} == {8}
        assert not any(c.stages == 3 for c in found)
        for candidate in found[:: max(len(found) // 6, 1)]:
            outcome = simulate(candidate, JOB, batch)
            assert outcome.tokens == 4 * 8192
            assert outcome.gpus == 8
    with pytest.raises(ValueError, match="give 4 sequences"):
        simulate(found[0], JOB, batch[1:])
    with pytest.raises(ValueError, match="no system 'ring'"):
        divisions("ring", JOB, [1], [1])


def test_candidates_are_those_that_may_fit() -> None:
    job = Job(MODELS["llama-8b"], CLUSTERS["dgx-h100"], gpus=64, context=131_072, sequences=32)
    able = candidates("tiles", job, [8], [1, 4])
    # Four times as many tokens at once as fit are left out.
    assert min(c.micro_batches for c in able if c.stages == 1) == 4
    # In ticks a stage keeps 2 P - 1 micro-batches; where these don't fit, as many as 1F1B does.
    by_number = {c.micro_batches: c.max_in_flight for c in able if c.stages == 4}
    assert by_number == {16: 4, 32: None}
    assert (
        candidates("tiles", replace(job, cluster=replace(job.cluster, memory_gb=5.0)), [8], [1])
        == []
    )


def test_the_best_of_all_is_found() -> None:
    batch = sequences()
    (choice,) = advise(JOB, [batch], ["tiles"], [1, 2], [1, 2], finalists=100)
    every = {c: simulate(c, JOB, batch).seconds for c in candidates("tiles", JOB, [1, 2], [1, 2])}
    assert choice.seconds == min(every.values())
    assert choice.candidate is not None
    assert every[choice.candidate] == choice.seconds
    # Perfect balance and free exchanges take no longer.
    for candidate, seconds in every.items():
        assert estimate(candidate, JOB, batch) <= seconds * 1.001

"""`distca simulate --serving`: a user's own trace, times and ranks, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from distca.schedule.serving.cdsp import TABLE_1, published_model
from support.commands import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command("simulate", capsys)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    rows = [
        {"arrival": 0.3 * number, "prompt": 4000 + 9000 * (number % 7), "answer": 1 + number % 5}
        for number in range(1, 41)
    ]
    path.write_text(json.dumps(rows))
    return path


def test_a_trace_of_ones_own(command: Command, trace: Path, tmp_path: Path) -> None:
    times, plot = tmp_path / "measured.json", tmp_path / "new" / "plot.svg"
    times.write_text(json.dumps([asdict(each) for each in TABLE_1 if each.degree <= 8]))
    flags = ["--serving", "--trace", str(trace), "--prefill-times", str(times)]
    flags += ["--prefill-ranks", "8", "--decode-ranks", "1"]
    pytest.importorskip("matplotlib")
    lines = command.run(*flags, "--plot", str(plot)).splitlines()
    assert "Eq. 1 is within 5.9% of every measured prefill" in command.errors
    assert lines[0].startswith("40 requests of ")
    names = [line.split()[0] for line in lines[4:8]]
    assert names == ["fixed-8", "greedy", "single-chunk", "cdsp"], "8 ranks are no 16"
    assert lines[8].startswith("improvement rates of single-chunk by requests/s: ")
    assert "DistCA's engine, in which all wait" in lines[-1]
    assert plot.stat().st_size > 1000

    found = json.loads(command.run(*flags, "--json", "--arrivals-per-second", "2"))
    assert found["load"] == 2
    for line, row in zip(lines[4:8], found["strategies"], strict=True):
        assert line.split()[:2] == [row["strategy"], f"{row['capacity']:.2f}"]
        assert 0 < row["ttft_p50"] <= row["ttft_p90"] <= row["ttft_p99"]
        assert 0 < row["per_token_p50"] <= row["per_token_p99"]
        assert (row["improvement_rates"] is None) == (row["strategy"] in ("fixed-8", "greedy"))

    published_model().save(times)
    again = json.loads(command.run(*flags, "--json", "--prefill-strategies", "fixed-8", "greedy"))
    assert [row["strategy"] for row in again["strategies"]] == ["fixed-8", "greedy"]
    assert again["load"] == max(row["capacity"] for row in again["strategies"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--model llama-70b", "the prefill times are of llama-8b on dgx-a100, not of llama-70b"),
        ("--cluster dgx-h200", "not of llama-8b on dgx-h200: measure prefills there"),
        (
            "--decode-tensor-parallel-size 16",
            "tensor-parallel size 16 does not divide 32 heads and",
        ),
        ("--decode-tensor-parallel-size 1 --memory-gb 23", "is more than a decode rank holds"),
        ("--memory-gb 19", "16 GB of weights leave no room"),
        ("--prefill-ranks 12 --prefill-strategies fixed-8", "12 ranks cannot form groups of 8"),
        ("--prefill-ranks 0", "prefill_ranks is 0"),
        ("--backends 0", "backends is 0"),
        ("--requests 0", "--requests must be at least 1"),
        ("--arrivals-per-second -1", "must be positive"),
        ("--trace none.json", "none.json is not a file, and none of short, medium, long"),
        ("--prefill-times trace.json", "has no measured prefills"),
        ("--sede 1", "no flag --sede: is --seed meant?"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(flags, told, command, trace, monkeypatch) -> None:
    monkeypatch.chdir(trace.parent)
    error = command.refused("--serving", "--trace", "trace.json", *flags.split())
    assert told in error.splitlines()[-1]


def test_degrees_are_powers_of_two(command: Command, trace: Path, tmp_path: Path) -> None:
    times = tmp_path / "measured.json"
    rows = [{"degree": 3, "tokens": each.tokens, "seconds": each.seconds} for each in TABLE_1[:6]]
    times.write_text(json.dumps(rows))
    error = command.refused("--serving", "--trace", str(trace), "--prefill-times", str(times))
    assert "degree 3 is not a power of two" in error

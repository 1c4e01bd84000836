"""`distca plan` and `distca simulate` for a prefill and for a step that decodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.simulate.serving import PARTS
from support.commands import Command

MODEL = "--layers 3 --hidden-size 512 --heads 8 --kv-heads 2 --head-dim 64 --ffn-hidden-size 1024"
FLAGS = f"{MODEL} --context-parallel-size 4".split()
TURN = ["prefill", "--new-tokens", "64", "--cached-tokens", "8192", *FLAGS]
SHAPE = AttentionShape(8, 2, 64)


@pytest.fixture
def plan(capsys) -> Command:
    return Command("plan", capsys)


@pytest.fixture
def simulate(capsys) -> Command:
    return Command("simulate", capsys)


def total(steps: list[dict[str, Any]]) -> int:
    return sum(step["bytes_dispatched"] + step["bytes_combined"] for step in steps)


def test_a_prompt_s_plan_step_by_step(plan: Command, tmp_path: Path) -> None:
    """All keys that a rank needs and lacks: three quarters of those of the others."""
    flags = ["prefill", "--new-tokens", "8192", *FLAGS, "--prefill-strategy", "pass-kv"]
    found = json.loads(plan.run(*flags, "--json"))
    assert found["strategy"] == "pass-kv"
    rows = [step["key_rows"] for step in found["steps"]]
    assert rows[0] == 0
    assert sum(rows) == 3 * 8192 * 3 // 4
    assert total(found["steps"]) == sum(rows) * SHAPE.kv_row_bytes
    assert all(step["query_rows"] == 0 for step in found["steps"])
    picture, saved = tmp_path / "steps.png", tmp_path / "plan.json"
    text = plan.run(*flags, "--plot", str(picture), "--save", str(saved))
    assert len(text.splitlines()) == 2 + len(rows) + 1
    assert picture.stat().st_size > 0
    assert json.loads(plan.run("--load", str(saved), "--json")) == found


def test_simulated_bytes_are_the_plan_s(plan: Command, simulate: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = json.loads(simulate.run(*TURN, "--json", "--trace", str(trace)))
    for strategy in ("pass-kv", "pass-q"):
        planned = json.loads(plan.run(*TURN, "--prefill-strategy", strategy, "--json"))
        sent = found["simulated"][strategy]["bytes_sent"]
        assert sum(map(sum, sent.values())) == 3 * total(planned["steps"])
    times = {name: each["seconds"] for name, each in found["simulated"].items()}
    assert found["strategy"] == found["choices"]["simulated"]
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"core attention", "before core attention"} <= names
    # A slower link takes longer, and a step's rows are few beside what kernels read.
    slow = json.loads(simulate.run(*TURN, "--json", "--node-gb-per-s", "1"))
    assert all(slow["simulated"][name]["seconds"] > times[name] for name in times)
    assert slow["strategy"] == "pass-q"
    text = simulate.run(*TURN, "--selector", "paper")
    assert "--selector paper chooses" in text
    assert "simulated, not measured" in text


@pytest.mark.parametrize("held", ["evenly", "stripes", "first-rank"])
def test_a_decode_step(plan: Command, simulate: Command, held: str) -> None:
    """Each query goes to the ranks that hold keys, and an output comes back from each."""
    flags = ["decode", "--sequences", "8", "--cached-tokens", "1024", *FLAGS, "--held", held]
    (step,) = json.loads(plan.run(*flags, "--json"))["steps"]
    # Owners of the new tokens are all ranks in turn.
    assert step["query_rows"] == (6 if held == "first-rank" else 8 * 3)
    row = 2 * SHAPE.q_row_bytes + SHAPE.lse_row_bytes
    assert step["bytes_dispatched"] + step["bytes_combined"] == step["query_rows"] * row
    found = json.loads(simulate.run(*flags, "--json"))
    assert [*found["simulated"]] == ["pass-q"]
    sent = found["simulated"]["pass-q"]["bytes_sent"]
    assert sum(map(sum, sent.values())) == 3 * step["query_rows"] * row


def test_what_cannot_be_planned(plan: Command, simulate: Command) -> None:
    for flags, why in (
        ([*TURN, "--cached-tokens", "1", "2"], "2 numbers for 1 sequences: give one for all"),
        ([*TURN, "--new-tokens", "0"], "--new-tokens 0 must be at least 1"),
        ([*TURN, "--cached-tokens", "-1"], "must not be negative"),
        ([*TURN, "--tensor-parallel-size", "3"], "a divisor or a multiple of the 8 GPUs"),
        ([*TURN, "--tensor-parallel-size", "16"], "does not divide 8 heads"),
        ([*TURN, "--model", "no"], "no model 'no'"),
        ([*TURN, "--profile", "none.json"], "none.json does not exist"),
        (["prefill", *FLAGS], "--new-tokens"),
        (["decode", *FLAGS, "--sequences", "0"], "--sequences 0 must be at least 1"),
    ):
        for command in (plan, simulate):
            assert why in command.refused(*flags), flags


def test_heads_scattered_are_planned_and_simulated(plan: Command, simulate: Command) -> None:
    """A prompt on four ranks: two all-to-alls, whose bytes the simulator charges."""
    flags = ["prefill", "--new-tokens", "8192", *FLAGS, "--prefill-strategy", "sp-ntp"]
    found = json.loads(plan.run(*flags, "--json"))
    group = SHAPE.scattered(4)
    row = 2 * group.q_row_bytes + group.kv_row_bytes + group.lse_row_bytes
    assert total(found["steps"]) == 3 * 8192 * row
    assert "8,192 new tokens, 0 cached; sp-ntp, 4 head groups" in plan.run(*flags)
    ran = json.loads(simulate.run(*flags, "--json"))["simulated"]["sp-ntp"]
    assert sum(map(sum, ran["bytes_sent"].values())) == 3 * total(found["steps"])


def test_layouts_of_split_weights(plan: Command, simulate: Command, tmp_path: Path) -> None:
    """Few tokens do not pay for a gather of weights, many do; fewer than GPUs are not shared."""
    split = f"{MODEL} --context-parallel-size 1 --tensor-parallel-size 2".split()
    chosen = {}
    for tokens, selector in ((600, "simulated"), (6000, "simulated"), (6000, "paper")):
        flags = ["prefill", "--new-tokens", str(tokens), *split, "--selector", selector]
        found = json.loads(plan.run(*flags, "--json"))
        chosen[tokens, selector] = found["strategy"]
        assert found["bytes"]["sp-tp"] == found["bytes"]["MLP"]
        ran = json.loads(simulate.run(*flags, "--json"))["simulated"]
        assert [*ran] == ["plain TP", "sp-ntp", "sp-tp"]
        for layout, outcome in [*ran.items()][1:]:
            of_layer = sum(found["bytes"][layout].values()) + sum(found["bytes"]["MLP"].values())
            embeddings = tokens * 512 * 2
            sent = sum(map(sum, outcome["bytes_sent"].values()))
            assert sent == 3 * of_layer + embeddings
    assert list(chosen.values()) == ["sp-tp", "sp-ntp", "sp-tp"]
    picture, trace = tmp_path / "bytes.png", tmp_path / "trace.json"
    assert "6,000 new tokens" in plan.run(*flags, "--plot", str(picture))
    assert "simulated, not measured" in simulate.run(*flags, "--trace", str(trace))
    assert picture.stat().st_size > 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert "pass-kv" in plan.run("prefill", "--new-tokens", "1", *split, "--json")
    few = ["prefill", "--new-tokens", "60", "--prefill-strategy", "sp-tp"]
    assert "one rank of GPUs has all tokens" in plan.refused(*few, *split, "--save", "plan.json")
    for command in (plan, simulate):
        why = "give --tensor-parallel-size 4 and --context-parallel-size 1"
        assert why in command.refused(*few, *FLAGS)


def test_the_papers_rule_goes_by_the_measured_rate(simulate: Command, tmp_path: Path) -> None:
    """Table 4 of Meta's paper: 2.5% new tokens. Eq. 2 with 800 TFLOP/s a GPU hides no keys."""
    model = "--model llama-405b --tensor-parallel-size 8 --context-parallel-size 4".split()
    turn = ["prefill", "--new-tokens", "3100", "--cached-tokens", "124900", "--json", *model]
    shape = AttentionShape(16, 1, 128)
    lengths = (1, 4096)
    rate = 800e12 / shape.flops_per_pair
    full = tuple(tuple(q * kv / rate for kv in lengths) for q in lengths)
    diagonal = tuple(
        tuple((q * max(q, kv) - q * (q - 1) / 2) / rate for kv in lengths) for q in lengths
    )
    profile = tmp_path / "profile.json"
    Profile(lengths, full, diagonal, shape, {}).save(profile)
    by_data_sheet, measured = (
        json.loads(simulate.run(*turn, *more))["choices"]["paper"]
        for more in ((), ("--profile", str(profile)))
    )
    assert (by_data_sheet, measured) == ("pass-kv", "pass-q")


def test_time_is_broken_down_and_overheads_are_charged_unless_ideal(simulate: Command) -> None:
    """Of a prefill, a decode step, and split weights: parts add up, and the table has them."""
    decode = ["decode", "--sequences", "8", "--cached-tokens", "4096", *MODEL.split()]
    split = ["prefill", "--new-tokens", "4096", *MODEL.split(), "--tensor-parallel-size", "2"]
    for flags in (
        TURN,
        [*decode, "--context-parallel-size", "1"],
        [*decode, "--context-parallel-size", "4"],
        [*split, "--context-parallel-size", "1", "--prefill-strategy", "sp-ntp"],
    ):
        text = simulate.run(*flags)
        assert "Overheads in ms: an iteration's scheduling and planning 1.5" in text
        rows = text.splitlines()
        first = next(n for n, row in enumerate(rows) if "that ends last, by part" in row)
        assert rows[first + 1].split() == [*PARTS]
        found = json.loads(simulate.run(*flags, "--json"))["simulated"]
        ideal = json.loads(simulate.run(*flags, "--json", "--baseline-ideal"))["simulated"]
        assert "Overheads" not in simulate.run(*flags, "--baseline-ideal")
        for row, name in zip(rows[first + 2 :], found, strict=False):
            spent = found[name]["spent_seconds"]
            assert sum(spent.values()) == pytest.approx(found[name]["seconds"])
            assert row.split() == [
                *name.split(),
                *(f"{1e3 * each:,.2f}" for each in spent.values()),
            ]
            assert ideal[name]["spent_seconds"]["host"] == 0
            assert found[name]["seconds"] > ideal[name]["seconds"] + 1.5e-3
    # Ranks that share keys launch attention between the graphs of a decode step.
    alone, shared = (
        json.loads(simulate.run(*decode, "--context-parallel-size", ranks, "--json"))["simulated"]
        for ranks in ("1", "4")
    )
    hosts = [each["pass-q"]["spent_seconds"]["host"] for each in (alone, shared)]
    assert hosts[0] == pytest.approx(1.5e-3)
    assert hosts[1] > 2e-3

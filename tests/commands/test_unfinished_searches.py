"""What commands say of searches that go on, or that a signal ends."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from distca import progress
from distca.commands import plan_compare
from distca.commands import simulate as simulate_command
from distca.commands.main import main
from distca.commands.simulate_progress import Searching
from distca.cost.model_sizes import MODELS
from distca.schedule import COMPARED, ScheduleConfig, Scheduler, make_scheduler
from distca.simulate import CLUSTERS, Candidate, Choice, Workload
from distca.simulate.trials import Trial, Trials
from support.signalled import CTRL_C, signalled

JOB = """
    --distribution pretrain --context 8192 --sequences 4 --layers 4 --hidden-size 512 --heads 8
    --kv-heads 4 --head-dim 64 --ffn-hidden-size 1024 --vocab-size 1000 --cluster dgx-a100
    --gpus 8 --batches 2
""".split()
PLAN = "--distribution pretrain --servers 8 --tokens-per-server 16384 --model llama-8b".split()
ONE = Candidate("tiles", 2, 1, 4, 1, 1)


def test_progress_tells_what_is_left() -> None:
    """As soon as some of the searches are done."""
    now = 100.0
    searching = Searching(progress.Progress(), ["plain", "wlb-llm", "tiles"], clock=lambda: now)
    one = Candidate("tiles", 2, 1, 4, 1, 1)
    searching.told(one)
    assert "usually at most a minute, 1 of 3 systems begun" in searching.shown.doing
    now = 112.0
    searching.reached("tiles", 0.5)
    searching.told(replace(one, system="plain"))
    # Three of nine parts took 12 seconds.
    assert searching.shown.doing == (
        "about 24 s left, 2 of 3 systems begun, now plain Megatron: TP2 PP1 DP4, 1 micro-batch(es)"
    )
    assert searching.shown.done == 2


def test_the_time_that_is_left_does_not_grow() -> None:
    now = 100.0
    searching = Searching(progress.Progress(), ["plain", "wlb-llm", "tiles"], clock=lambda: now)
    searching.told(ONE)

    def left_at(seconds: float) -> str:
        nonlocal now
        now = 100.0 + seconds
        return searching.shown.doing.partition(",")[0]

    assert left_at(59) == "usually at most a minute"
    assert left_at(61) == "longer than usual"
    now = 100.0 + 90
    searching.reached("tiles", 0.5)
    # Three of nine parts took 90 seconds.
    assert [left_at(seconds) for seconds in (90, 150, 269, 270, 9000)] == [
        "about 180 s left",
        "about 120 s left",
        "about 1 s left",
        "longer than estimated",
        "longer than estimated",
    ]
    now = 100.0 + 300
    searching.reached("tiles", 1.0)
    assert left_at(300) == "about 150 s left"


def trial(seconds: float, fits: bool = True) -> Trial:
    return Trial(fits, seconds, 4, 10.0, 0.0, 0.0)


def test_the_best_so_far_has_run_most_batches() -> None:
    found = {
        ONE: [trial(2.0), trial(4.0)],
        replace(ONE, data=2): [trial(1.0)],
        replace(ONE, data=1): [trial(0.5), trial(0.5, fits=False)],
        replace(ONE, tensor=1): [trial(3.5), trial(3.5)],
        replace(ONE, system="plain"): [],
    }
    workload = Workload(MODELS["llama-8b"], CLUSTERS["dgx-a100"], 8, 8192, 4)
    trials = Trials(workload, [])
    trials._found = found
    assert trials.best_so_far("tiles") == (ONE, [2.0, 4.0])
    assert trials.best_so_far("plain") is None
    assert trials.best_so_far("wlb-llm") is None


@pytest.mark.parametrize("ran", [["tiles", "plain", "wlb-llm"], ["plain"], []])
def test_a_signal_in_a_search_tells_the_best(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"tiles": 1.5, "plain": 2.5, "wlb-llm": 1.25}

    def advise(*given: object) -> list[Choice]:
        (trials,) = [each for each in given if isinstance(each, Trials)]
        trials._found = {replace(ONE, system=name): [trial(seconds[name])] for name in ran}
        # Another batch that DistCA has not run is left out.
        if "tiles" in ran:
            trials._found[replace(ONE, system="wlb-llm")].append(trial(9.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate_command, "advise", advise)
    assert main(["simulate", *JOB, "--systems", "plain", "wlb-llm", "tiles"]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "distca simulate: interrupted"
    tiles = "DistCA, tiles, TP2 PP1 DP4, 1 micro-batch(es): 1.500 s an iteration"
    assert lines[-2].startswith("distca simulate: ")
    assert (
        lines[-2].removeprefix("distca simulate: ")
        == {
            3: f"best up to then: {tiles}; "
            + tiles.replace("DistCA, tiles", "WLB-LLM, ideal").replace("1.500", "1.250")
            + ", in 1 of 2 batches",
            1: f"best up to then: {tiles}".replace("DistCA, tiles", "plain Megatron").replace(
                "1.500", "2.500"
            )
            + ", in 1 of 2 batches",
            0: "nothing was found yet",
        }[len(ran)]
    )


@pytest.mark.parametrize("ran", [0, 1, 1 + [*COMPARED].index("tiles")])
def test_a_signal_in_a_comparison_tells_the_best(
    ran: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def make(name: str, config: ScheduleConfig) -> Scheduler:
        if len(made) == ran:
            raise KeyboardInterrupt
        made.append(name)
        return make_scheduler(name, config)

    monkeypatch.setattr(plan_compare, "make_scheduler", make)
    assert main(["plan", *PLAN, "--compare"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[-1] == "distca plan: interrupted"
    if ran == 0:
        assert lines[-2] == "distca plan: no plan was made yet"
        return
    assert made[-1] == ("packed" if ran == 1 else "greedy")
    best = "plain" if ran == 1 else "greedy"
    assert re.fullmatch(
        rf"distca plan: best balanced up to then: {best}, load max/mean [\d.]+, "
        rf"of {ran} of \d+ schedulers",
        lines[-2],
    )


def test_a_real_search_ends_at_once_with_its_best(tmp_path: Path) -> None:
    job = "--distribution pretrain --context 131072 --sequences 32 --model llama-8b --gpus 64"
    found = signalled(["simulate", *job.split(), "--cluster", "dgx-h200"], CTRL_C, 12.0, tmp_path)
    assert found.status == 130
    assert found.output == ""
    assert not found.left
    lines = found.errors.splitlines()
    assert lines[-1] == "distca simulate: interrupted"
    assert re.match(r"distca simulate: (best up to then: |nothing was found yet)", lines[-2])

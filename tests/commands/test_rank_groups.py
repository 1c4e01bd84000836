"""`distca tune groups`, and the flags by which its times are used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.commands.generate import build_parser
from distca.commands.main import main
from distca.commands.rank_groups import served_groups
from distca.commands.tune_groups import unlike, worth_sharing
from distca.inference.machine import hardware
from distca.inference.models import read_model
from distca.schedule.serving.cdsp import Coefficients, Prefill, PrefillModel
from support.commands import Command
from support.report_pages import Page, assert_usable
from support.small_models import save_small_model

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_small_model("llama", tmp_path_factory.mktemp("model")))


def times_of(model: str, *degrees: int) -> PrefillModel:
    """Times by which twice as many ranks take half as long."""
    import torch

    description = read_model(model, torch.float32).description
    fitted = {degree: Coefficients(0.0, 1e-3 / degree, 0.0, 0.0) for degree in degrees}
    return PrefillModel(hardware(), description, fitted)


def test_measured_times_give_prompts_their_groups(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times, prompts = tmp_path / "times.json", tmp_path / "prompts.json"
    command = ["tune", "groups", model, "--context-parallel-size", "2", "--output", str(times)]
    command += ["--html", str(tmp_path / "page.html")]
    assert main([*command, "--lengths", "16", "32", "64", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert PrefillModel.load(times).degrees == (1, 2)
    assert "64 tokens on 2 ranks: " in out
    assert "32 tokens on 1 rank: " in out
    assert_usable(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert page.figures == json.loads(times.read_text())
    for name, seconds, fitted in page.rows["Prefills of one prompt"][1:]:
        tokens, degree = name.split(" on ")
        assert f"{tokens} tokens on {degree} rank" in out
        assert f": {seconds} s, fitted {fitted} s\n" in out
    assert "ranks are faster than one: distca_min_tokens " in out or "no prompt of up to" in out
    # Prompts that wait for both ranks: the second one is begun on fewer, or later.
    prompts.write_text(json.dumps([[n % 97 for n in range(length)] for length in (200, 300, 7)]))
    generate = Command("generate", capsys)
    flags = ["--prompt-ids", str(prompts), "--context-parallel-size", "2", "--max-tokens", "3"]
    times_of(model, 1, 2).save(times)
    groups = ["--rank-groups", "cdsp", "--prefill-times", str(times), "--smallest-chunk", "16"]
    out = generate.run(model, *flags, *groups, "--check")
    assert "9 of 9 tokens the same: equal" in out
    assert "; 0 bytes moved;" not in out
    # A group of one rank moves nothing.
    out = generate.run(model, *flags, "--rank-groups", "fixed-1", *groups[2:], "--check")
    assert "9 of 9 tokens the same: equal" in out


def test_a_fit_that_is_far_off_is_noticed() -> None:
    measured = [Prefill(1, 100, 0.1), Prefill(2, 100, 0.152)]
    assert unlike(measured, [0.12, 0.16]) is None
    assert str(unlike(measured, [0.12, 0.051])).startswith(
        "the fit is 66% off for 100 tokens on 2 ranks: choices by it may be wrong"
    )


def test_the_shortest_prompt_that_is_worth_sharing_is_found() -> None:
    """A prompt of 1,000 tokens takes as long on two ranks as on one, a longer one less."""
    of_ranks = {1: Coefficients(0.0, 1.0, 0.0, 0.0), 2: Coefficients(500.0, 0.5, 0.0, 0.0)}
    times = PrefillModel("here", "small", of_ranks)
    assert worth_sharing(times, 2, 4096) == 1024
    assert worth_sharing(times, 2, 1010) == 1010
    assert worth_sharing(times, 2, 900) is None


def test_flags_say_how_groups_grow(model: str, tmp_path: Path) -> None:
    import torch

    times, rates = tmp_path / "times.json", tmp_path / "rates.json"
    times_of(model, 1, 2, 4).save(times)
    rates.write_text('{"0.5": 0.05, "4": [0.45, 2]}')
    flags = ["--context-parallel-size", "4", "--rank-groups", "cdsp", "--prefill-times", str(times)]
    flags += ["--improvement-rates", str(rates), "--smallest-chunk", "64"]
    args = build_parser().parse([model, "--prompt", "a", *flags])
    growing = served_groups(args, read_model(model, torch.float32))
    assert growing is not None
    assert growing.search.smallest_chunk == 64
    assert growing.strategy == "cdsp"
    load = growing.load()
    assert load is not None
    assert load.growth(0.0) == (0.05, float("inf"))
    for _ in range(120):
        load.arrived(10.0)
    assert load.growth(10.0) == (0.45, 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rank-groups cdsp", "needs --prefill-times FILE: measure them by `distca tune groups"),
        ("--rank-groups cdsp --prefill-times {none}", "none.json: there is no such file"),
        ("--rank-groups cdsp --prefill-times {broken}", "holds no prefill times"),
        ("--rank-groups cdsp --prefill-times {other}", "are of another model on a GPU, not of"),
        ("--rank-groups cdsp --prefill-times {four}", "on 4 ranks and more, and there are 2"),
        ("--rank-groups many --prefill-times {times}", "no strategy 'many': choose from fixed-N"),
        ("--rank-groups fixed-3 --prefill-times {times}", "3 ranks are not a power of two"),
        ("--rank-groups fixed-4 --prefill-times {times}", "2 ranks cannot form groups of 4"),
        (
            "--rank-groups cdsp --prefill-times {times} --prefill-strategy runahead",
            "--prefill-strategy runahead shares each prompt among all ranks",
        ),
        (
            "--rank-groups cdsp --prefill-times {times} --prefill-strategy tiles",
            "--prefill-strategy tiles leaves each prompt on one rank, and --rank-groups cdsp does",
        ),
        ("--prefill-strategy tiles --even-out", "and --even-out moves its blocks to others"),
        ("--rank-groups cdsp --prefill-times {times} --even-out", "--even-out has no meaning"),
        ("--rank-groups cdsp --prefill-times {times} --smallest-chunk 0", "give at least 1"),
        (
            "--rank-groups cdsp --prefill-times {times} --improvement-rates {broken}",
            "holds no improvement rates",
        ),
        (
            "--rank-groups cdsp --prefill-times {times} --improvement-rates {none}",
            "none.json: there is no such file",
        ),
        ("--prefill-times {times}", "needs --rank-groups, such as --rank-groups cdsp"),
        ("--improvement-rates {times}", "needs --rank-groups, such as --rank-groups cdsp"),
        ("--smallest-chunk 0", "needs --rank-groups, such as --rank-groups cdsp"),
        ("--rank-groups CDSP --prefill-times {times}", "--rank-groups CDSP: no strategy 'CDSP'"),
        ("--attention-servers 1 --prefill-strategy all-gather", "all-gather does not work with"),
    ],
)
def test_mistakes_are_a_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("none", "broken", "other", "four")}
    files["times"] = tmp_path / "times.json"
    files["broken"].write_text("[1]")
    times_of(model, 1, 2).save(files["times"])
    times_of(model, 4).save(files["four"])
    PrefillModel("a GPU", "another model", {1: Coefficients(0.0, 1.0, 0.0, 0.0)}).save(
        files["other"]
    )
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[1, 2, 3]]")
    given = flags.format_map(files).split()
    fixed = ["--prompt-ids", str(prompts), "--context-parallel-size", "2"]
    assert said in Command("generate", capsys).refused(model, *fixed, *given)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--context-parallel-size 0", "give at least 1"),
        ("--rounds 0", "give at least 1"),
        ("--lengths 8 16", "at least three"),
        ("--lengths 0 8 16", "give at least 1"),
        ("--lengths 16 32 9999", "the model has 4,096 positions"),
    ],
)
def test_mistakes_of_the_measurement_are_a_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    output = tmp_path / "times.json"
    fixed = ["groups", model, "--context-parallel-size", "2", "--output", str(output)]
    assert said in Command("tune", capsys).refused(*fixed, *flags.split())
    assert not output.exists()

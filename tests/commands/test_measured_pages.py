"""`distca profile --html` and `distca tune --html`: pages with the figures of the output files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from distca.commands import tune_overlap
from distca.commands.main import main
from distca.commands.verify.stage import Line
from distca.cost.profile import Profile
from support.report_pages import Page, assert_usable, shown_by_browser
from support.small_models import save_small_model


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a profile, `profile.json`, and of its page."""
    folder = tmp_path_factory.mktemp("profile")
    given = "--heads 2 --kv-heads 1 --head-dim 8 --max-length 128".split()
    given += ["--output", str(folder / "profile.json"), "--html", str(folder / "page.html")]
    assert main(["profile", *given]) == 0
    return folder


def test_times_of_a_profile_are_those_of_the_file(profiled: Path) -> None:
    profile = Profile.load(profiled / "profile.json")
    page = Page((profiled / "page.html").read_text())
    saved = json.loads((profiled / "profile.json").read_text())
    errors = page.figures["errors"]
    assert page.figures == saved | {"errors": errors}
    for begins, seconds in (
        ("full rectangles, forward", profile.full_seconds),
        ("full rectangles, backward", profile.backward_full_seconds),
        ("tasks that end on the diagonal, forward", profile.diagonal_seconds),
    ):
        head, *rows = page.table(begins)
        assert head[1:] == [str(length) for length in profile.lengths]
        for number, row in enumerate(rows):
            expected = [f"{1e6 * each:,.1f}" for each in seconds[number]]
            if begins.startswith("tasks"):
                expected[:number] = [""] * number
            assert row == [str(profile.lengths[number]), *expected]
    counts = [int(row[1]) for row in page.table("40 lengths")[1:]]
    assert sum(counts) == len(errors) == 40
    assert counts[0] == sum(error < 0.02 for error in errors)
    assert f"{statistics.median(errors):.1%} off in the median" in page.texts["h1"][0]


def test_a_profile_of_forward_passes_has_no_backward_times(tmp_path: Path) -> None:
    given = "--heads 1 --kv-heads 1 --head-dim 8 --max-length 64 --forward-only".split()
    path = tmp_path / "page.html"
    assert main(["profile", *given, "--output", str(tmp_path / "p"), "--html", str(path)]) == 0
    assert not any("backward" in caption for caption in Page(path.read_text()).rows)


def test_partitions_are_those_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_small_model("llama", tmp_path / "model"))
    given = ["tune", "partitions", model, "--context-parallel-size", "3", "--lengths", "64", "128"]
    file, path = tmp_path / "chain.json", tmp_path / "page.html"
    assert main([*given, "--output", str(file), "--html", str(path)]) == 0
    assert_usable(path)
    page, saved = Page(path.read_text()), json.loads(file.read_text())
    assert page.figures == saved
    out = capsys.readouterr().out
    head, *rows = page.table("Seconds to the first token, simulated")
    assert head[3:] == ["share of rank 0", "share of rank 1", "share of rank 2"]
    for tokens, seconds, even, *shares in rows:
        assert shares == [f"{share:.3f}" for share in saved["shares"][tokens]]
        assert f"{tokens} tokens: {seconds} s to the first token" in out
        assert f", {even} s with even parts" in out
    assert [row[0] for row in rows] == ["64", "128"]


def test_the_margin_for_exchanges_is_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs and what they measured are made up."""
    figures = {"kernel_ms": 2.5, "exchange_ms": 1.25, "hidden": 0.875, "sm_margin": 16}
    measured = Line("overlap", "ok", "kernel 2.50 ms", "", 1.0, figures)

    class Chosen:
        generation = 3

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tune_overlap, "choose", lambda *_: (Chosen, None))
    monkeypatch.setattr(
        tune_overlap, "verify_machine", lambda *given: given[-1](measured) or (measured,)
    )
    path = tmp_path / "page.html"
    assert main(["tune", "overlap", "--html", str(path)]) == 0
    assert_usable(path)
    page = Page(path.read_text())
    assert page.texts["h1"] == ["--distca-sm-margin 16"]
    assert page.figures == figures
    assert dict(page.rows["Figures"][1:]) == {name: f"{each:.4g}" for name, each in figures.items()}


def test_a_browser_shows_the_profile(profiled: Path, tmp_path: Path) -> None:
    assert_usable(profiled / "page.html")
    text = (profiled / "page.html").read_text()
    assert shown_by_browser(profiled / "page.html", tmp_path).count("<td") == text.count("<td")

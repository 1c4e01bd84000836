"""`distca tune sparsity`: measured, resumed, and refused for others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distca.commands.main import main
from distca.inference.sparse_model import SparseModel
from distca.schedule.serving.csps.calibration_file import load_calibration
from support.report_pages import Page, assert_usable
from support.small_models import VOCABULARY, save_small_model

PROMPTS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(save_small_model("llama", folder, num_hidden_layers=4))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, path = np.random.default_rng(0), tmp_path_factory.mktemp("prompts") / "ids.json"
    ids = [random.integers(0, VOCABULARY, 330 + n).tolist() for n in range(PROMPTS)]
    path.write_text(json.dumps(ids))
    return path


def test_a_measurement_goes_on_where_it_ended(
    model: str,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, runs = tmp_path / "calibration.json", [0]
    command = ["tune", "sparsity", model, "--prompts", str(prompts), "--output", str(file)]
    command += ["--context-parallel-size", "4", "--ranks-per-node", "2", "--samples", "3"]
    run = SparseModel.run

    def counted(*args: object) -> object:
        runs[0] += 1
        if runs[0] == PROMPTS + 2 * 4 + 2:
            raise KeyboardInterrupt
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(SparseModel, "run", counted)
    # Each prompt once for the masses; then two of them whole, and half of one.
    assert main(command) == 130
    begun = load_calibration(file)
    assert (len(begun.measured), len(begun.samples)) == (2, 3)
    assert main(command) == 0
    assert runs[0] == PROMPTS + 2 * 4 + 2 + (PROMPTS - 2) * 4
    found = load_calibration(file)
    assert [each.tokens for each in found.measured] == [330 + n for n in range(PROMPTS)]
    assert found.measured[0].mass.tolist() == begun.measured[0].mass.tolist()
    on = json.loads(file.read_text())["measured_on"]
    assert (on["model"], on["ranks"], on["ranks_per_node"]) == ("llama, 4 layers of 64", 4, 2)
    # The dense model drops nothing, and less is kept the less each ratio is.
    mass = found.measured[0].mass
    assert (mass[0] == 0).all()
    assert (mass[1:, :, :, -1] < 1e-6).all()
    assert (np.diff(mass, axis=-1) <= 1e-6).all()
    assert (mass[1:, :, :, 0] > 0.05).all()
    out = capsys.readouterr().out
    assert "5 prompts of 330 to 334 tokens on 4 ranks, 1 of them held out; 3 " in out
    assert "lost up to " in out
    assert ("none can be lost" in out) == (found.calibration.recalled == 0)
    # All is there.
    assert main([*command, "--html", str(tmp_path / "page.html")]) == 0
    assert_usable(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert page.figures == json.loads(file.read_text())
    (recalled,) = (row[1] for row in page.rows["Figures"] if row[0].startswith("needles that"))
    assert recalled == f"{found.calibration.recalled:.4g}"
    with pytest.raises(SystemExit):
        main([*command, "--seed", "1"])
    assert "measured on another model, or with other prompts or flags" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "flags", "said"),
    [
        ([[1] * 400] * 3, [], "has 3 prompts: give at least 4, because some are held out"),
        ([[1] * 320, *[[1] * 319] * 3], [], "prompt 1 has 319 tokens: give at least 320"),
        ([[999] * 400] * 4, [], "has the token 999"),
        ([["a"]] * 4, [], "not a list of texts or of lists of token ids"),
        (None, [], "not JSON"),
        ([[1] * 400] * 4, ["--context-parallel-size", "1"], "one rank has no far keys"),
        ([[1] * 400] * 4, ["--nodes-per-rack", "3"], "racks of 3 nodes of 4 ranks don't cover"),
        ([[1] * 400] * 4, ["--samples", "0"], "give at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: object,
    flags: list[str],
    said: str,
) -> None:
    path = tmp_path / "prompts.json"
    path.write_text("" if given is None else json.dumps(given))
    command = ["tune", "sparsity", model, "--prompts", str(path), "--context-parallel-size", "4"]
    with pytest.raises(SystemExit):
        main([*command, "--output", str(tmp_path / "calibration.json"), *flags])
    assert said in capsys.readouterr().err

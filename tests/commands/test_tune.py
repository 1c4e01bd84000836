"""`distca tune partitions`, and the flags by which its table is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.commands.main import main
from distca.schedule.serving.partitions import load_partitions
from support.small_models import save_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_small_model("llama", tmp_path_factory.mktemp("model")))


def test_a_search_goes_on_where_it_ended(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chain.json"
    command = ["tune", "partitions", model, "--context-parallel-size", "3", "--output", str(file)]
    assert main([*command, "--lengths", "512"]) == 0
    first = load_partitions(file)
    assert "llama" in first.model
    assert first.shares[512][0] > first.shares[512][2]
    # A length that is there is not searched again.
    changed = json.loads(file.read_text()) | {"shares": {"512": [0.5, 0.3, 0.2]}}
    file.write_text(json.dumps(changed))
    assert main([*command, "--lengths", "512", "2048"]) == 0
    both = load_partitions(file)
    assert both.shares[512] == (0.5, 0.3, 0.2)
    assert sorted(both.shares) == [512, 2048]
    out = capsys.readouterr().out
    assert "2,048 tokens: first one after" in out
    assert "searched |0---" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--context-parallel-size", "1"], "a chain has at least 2 ranks"),
        (["--context-parallel-size", "4", "--lengths", "3"], "at least a token for each rank"),
        (["--context-parallel-size", "2", "--node-gb-per-s", "0"], "a speed above 0"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "partitions", model, *flags, "--output", str(tmp_path / "chain.json")])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--partition", "0.5,0.5"], "needs --prefill-strategy runahead"),
        (["--prefill-strategy", "runahead", "--partition", "0.5,0.4"], "add up to 0.9"),
        (["--prefill-strategy", "runahead", "--partition", "1,0"], "a share above 0"),
        (["--prefill-strategy", "runahead", "--partition", "1"], "among 1 ranks, not 2"),
        (["--prefill-strategy", "runahead", "--partition", "none.json"], "no table of partitions"),
        (["--prefill-strategy", "runahead", "--partition", "{file}"], "for ranks 3, not 2"),
    ],
)
def test_partitions_that_cannot_be_used_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    file = tmp_path / "chain.json"
    if "{file}" in flags:
        command = ["tune", "partitions", model, "--context-parallel-size", "3"]
        assert main([*command, "--lengths", "64", "--output", str(file)]) == 0
    given = [flag.replace("{file}", str(file)) for flag in flags]
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2, 3]]")
    command = ["generate", model, "--prompt-ids", str(ids), "--context-parallel-size", "2"]
    with pytest.raises(SystemExit):
        main([*command, *given])
    assert said in capsys.readouterr().err


def test_a_chains_prefill_is_planned_and_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    command = "prefill --new-tokens 16384 --context-parallel-size 4 --model llama-8b".split()
    command += ["--prefill-strategy", "runahead", "--json", "--partition"]
    seconds = {}
    for partition in ("even", "searched"):
        assert main(["simulate", *command, partition]) == 0
        seconds[partition] = json.loads(capsys.readouterr().out)["simulated"]["pass-kv"]["seconds"]
    assert seconds["searched"] < 0.9 * seconds["even"]
    with pytest.raises(SystemExit):
        main(["plan", *command, "found"])
    assert "give even, searched, or a share" in capsys.readouterr().err

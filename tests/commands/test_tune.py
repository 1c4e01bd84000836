"""`distca tune partitions`, and the flags by which its table is used."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from distca.commands.generate import build_parser as generate_parser
from distca.commands.main import main
from distca.commands.served_strategy import served_chain, tell_of_lengths
from distca.commands.tune import FORMS
from distca.inference.config import EngineConfig
from distca.inference.models import read_model
from distca.inference.rank_processes import RankError
from distca.schedule.serving.partitions import Chain, PartitionTable, load_partitions
from support.small_models import save_small_model

pytestmark = pytest.mark.usefixtures("forked_ranks")


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
    assert "2,048 tokens: " in out
    assert " s to the first token, simulated, " in out
    assert "searched |0---" in out


def test_help_names_all_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {form} " in printed for form in FORMS)
    for form in FORMS:
        with pytest.raises(SystemExit) as ended:
            main(["tune", form, "--help"])
        assert ended.value.code == 0
        assert f"usage: distca tune {form} [" in capsys.readouterr().out


def test_overlap_is_tuned_on_gpus_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "overlap"])
    assert "needs at least two GPUs, one for each rank: there are 0\n" in capsys.readouterr().err


class _Ranks:
    """Stands for ranks, whose seconds are those of the part with most work."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, ...]] = []
        self.most = 1000

    def __call__(self, config: EngineConfig) -> _Ranks:
        # 640 tokens of three layers of two heads of 16, in float32.
        assert config.cache.nbytes is not None
        assert config.cache.nbytes >= 640 * 3 * 2 * 2 * 16 * 4
        return self

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def time_prefill(self, parts: tuple[int, ...]) -> tuple[float, float]:
        if len(self.ran) == self.most:
            raise RankError("rank 1 ended")
        self.ran.append(parts)
        ends = np.cumsum(parts)
        return float((np.array(parts) * (ends + 100)).max()), 1.0


def test_a_search_on_ranks_goes_on_where_it_ended(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each partition runs once, whenever the search is interrupted; and the even one is shown."""
    ranks = _Ranks()
    monkeypatch.setattr("distca.inference.rank_processes.RankProcesses", ranks)
    file = tmp_path / "chain.json"
    command = ["tune", "partitions", model, "--context-parallel-size", "3", "--output", str(file)]
    command += ["--measure", "cpu", "--rounds", "2"]
    ranks.most = 14
    assert main([*command, "--lengths", "640"]) == 2
    assert "rank 1 ended" in capsys.readouterr().err
    begun = load_partitions(file)
    assert begun.by == "cpu"
    assert not begun.shares
    # The first run warmed up; each partition has two.
    assert {*begun.trials[640]} == {*ranks.ran[1:13]}
    ranks.most = 1000
    assert main([*command, "--lengths", "640", "64"]) == 0
    found = load_partitions(file)
    assert Counter(ranks.ran[1:13] + ranks.ran[15:]) == {
        parts: 2 for tried in found.trials.values() for parts in tried
    }
    assert found.shares[640][0] > 0.4 > found.shares[640][2]
    out = capsys.readouterr().out
    assert "s of CPU on the busiest process, measured, " in out
    assert "even     |0---" in out
    # Simulated and measured seconds are not mixed.
    with pytest.raises(SystemExit):
        main([*command[:7], "--lengths", "128"])
    assert "has partitions by cpu seconds, not simulated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--context-parallel-size", "2", "--rounds", "0"], "give at least 1"),
        (["--context-parallel-size", "2", "--measure", "cpu"], "has 4,096 positions"),
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
        (
            ["--prefill-strategy", "runahead", "--partition", "none.json"],
            "make a table of partitions",
        ),
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
    for command in (
        ["generate", model, "--prompt-ids", str(ids)],
        ["prefill", model, "--port", "1"],
    ):
        with pytest.raises(SystemExit):
            main([*command, "--context-parallel-size", "2", *given])
        assert said in capsys.readouterr().err


def test_lengths_outside_a_table_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    chain = Chain(2, PartitionTable("m", "h", 2, {100: (0.6, 0.4), 3000: (0.7, 0.3)}))
    tell_of_lengths("generate", chain, "chain.json", [99, 100, 500, 4000, 3001])
    said = capsys.readouterr().err
    assert said == (
        "distca generate: chain.json has partitions of 100 to 3,000 tokens, and prompts of 99 to "
        "4,000 take the nearest\n"
    )
    for other in (None, Chain(2, (0.6, 0.4)), chain):
        tell_of_lengths("generate", other, "chain.json", [100, 3000])
    assert not capsys.readouterr().err


def test_partitions_are_searched_for_the_prompts(model: str) -> None:
    """Of their lengths, or where these are not known of doubling ones up to the model's."""
    flags = ["--context-parallel-size", "2", "--prefill-strategy", "runahead"]
    args = generate_parser().parse([model, *flags, "--partition", "searched"])
    served = read_model(model, torch.float32)
    for lengths, found in (([300, 20], [20, 300]), ([], [512, 1024, 2048, 4096])):
        chain = served_chain(args, served, lengths)
        assert chain is not None
        assert isinstance(chain.partition, PartitionTable)
        assert sorted(chain.partition.shares) == found
    # A link on which no chain pays.
    args.node_gb_per_s = 1e-6
    alone = served_chain(args, served, [4096])
    assert alone is not None
    assert alone(np.array([0]), np.array([4096])).tokens_per_rank().tolist() == [0, 4096]


def test_a_chains_prefill_is_planned_and_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    command = "prefill --new-tokens 16384 --context-parallel-size 4 --model llama-8b".split()
    command += ["--prefill-strategy", "runahead", "--json", "--partition"]
    seconds = {}
    for partition in ("even", "searched"):
        assert main(["simulate", *command, partition]) == 0
        seconds[partition] = json.loads(capsys.readouterr().out)["simulated"]["runahead"]["seconds"]
    assert seconds["searched"] < 0.9 * seconds["even"]
    with pytest.raises(SystemExit):
        main(["plan", *command, "found"])
    assert "give even, searched, or a share" in capsys.readouterr().err

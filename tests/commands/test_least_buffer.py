"""The least `--max-buffer-bytes` of a batch, and what a plan with a bound says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distca.commands.least_buffer import least_bound
from distca.schedule import BufferBoundError
from support.commands import Command

BATCH = "--distribution pretrain --servers 4 --tokens-per-server 2048 --model llama-8b".split()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command("plan", capsys)


@pytest.mark.parametrize("least", [11, 1000, 67_000, 96_288])
@pytest.mark.parametrize("closest", [5, 96_288])
def test_the_search_finds_a_bound_that_works(least: int, closest: int) -> None:
    def plan(bound: int) -> None:
        if bound < least:
            error = BufferBoundError()
            error.least = closest
            raise error

    found = least_bound(plan, 10, closest)
    assert least <= found <= max(least * 65 / 64, least + 1)


def test_the_bound_that_is_advised_works_and_less_does_not(command) -> None:
    text = command.refused(*BATCH, "--max-buffer-bytes", "1000")
    found = int(re.search(r"to suffice is --max-buffer-bytes (\d+)", text)[1])
    figures = json.loads(command.run(*BATCH, "--max-buffer-bytes", str(found), "--json"))
    assert figures["bytes_max_buffered"] <= found
    command.refused(*BATCH, "--max-buffer-bytes", str(found * 15 // 16))


def test_the_bounded_figure_and_a_worse_balance_are_shown(command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = command.refused(*BATCH, "--max-buffer-bytes", "1000")
    least = re.search(r"--max-buffer-bytes (\d+)", text)[1]
    flags = ["--max-buffer-bytes", least]
    figures = json.loads(command.run(*BATCH, *flags, "--json", "--save", str(path)))
    held, allowed = (figures[n] / 1e6 for n in ("bytes_max_buffered", "max_buffer_bytes"))
    row = f"{held:,.2f} MB of queries, keys and values at most, of {allowed:,.2f} MB allowed"
    worse = figures["load_max_over_mean"] > figures["load_max_over_mean_before"]
    for shown in (command.run(*BATCH, *flags), command.run("--load", str(path))):
        assert row in shown
        assert ("worse balanced than plain data parallelism" in shown) == worse
    assert worse
    assert "MB allowed" not in command.run(*BATCH)


CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def test_a_models_folder_needs_only_what_attention_has(command, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    batch = [*BATCH[:-1], str(tmp_path), "--json"]
    whole = json.loads(command.run(*batch))
    flags = "--heads 16 --kv-heads 4 --head-dim 64".split()
    given = json.loads(command.run(*BATCH[:-2], *flags, "--json"))
    assert whole["bytes_total"] == given["bytes_total"] > 0
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 1024}))
    text = command.refused(*batch)
    assert "num_attention_heads is missing" in text
    assert text.rstrip().endswith("or give --heads")
    assert json.loads(command.run(*batch, *flags))["bytes_total"] == given["bytes_total"]
    config.write_text(json.dumps(CONFIG | {"head_dim": None}))
    assert command.refused(*batch).rstrip().endswith("or give --head-dim")

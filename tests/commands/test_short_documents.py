"""What `distca simulate` says where documents are short and equally long: plain Megatron does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import Command

JOB = """
    --batches 1 --model qwen3-8b --cluster dgx-h100 --gpus 64 --systems plain tiles
    --tensor-model-parallel-sizes 1 2 --pipeline-model-parallel-sizes 1
""".split()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command("simulate", capsys)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([4096] * 50))
    return str(path)


def test_long_sequences_of_short_documents_are_refused(command: Command, lengths: str) -> None:
    """There plain Megatron would look slow, which has whole sequences on a rank."""
    long = ["--lengths", lengths, "--context", "131072", "--sequences", "2"]
    refused = command.refused(*JOB, *long)
    assert "no document of " in refused
    assert "more than 4,096 tokens" in refused
    assert "give --context 4096 --sequences 64, which are as many tokens" in refused


def test_distca_is_no_slower_than_plain_megatron(command: Command, lengths: str) -> None:
    """With ping-pong the fastest layout costs more launches than a slower one of more GPUs."""
    short = ["--lengths", lengths, "--context", "4096", "--sequences", "1024", "--json"]
    plain, tiles = json.loads(command.run(*JOB, *short))["systems"]
    assert tiles["seconds"] == pytest.approx(plain["seconds"], rel=1e-6)
    assert not tiles["candidate"]["ping_pong"]

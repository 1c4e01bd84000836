"""Ranks that share each layer: engines of one process and of several get all heads of all rows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.commands.main import main
from distca.cost.link import Links
from distca.prefill.client import HandshakeError
from distca.schedule.serving.csps import Levels, Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar
from distca.schedule.serving.handoff.protocol import Transfer
from distca.schedule.serving.partitions import Chain
from support.prefills import (
    CHUNK,
    GROWING,
    NEEDS_NIXL,
    Reader,
    free_address,
    in_background,
    prefill_on_a_rank,
    prompt,
    reference,
)
from support.ranks import Ranks
from support.small_models import save_small_model

LEVELS = Levels(Links(1), 2)
CSPS = NearToFar(LEVELS, Sparsity.of_drop_ratio(0.0, 3, 2, 4).repeated(2), (None,) * 3, (2,))
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "pass-kv": ("tcp", {}),
    "pass-q": ("nixl", {"strategy": "pass-q"}),
    "sp-ntp": ("tcp", {"strategy": "sp-ntp"}),
    "runahead": ("nixl", {"chain": Chain(2, (0.6, 0.4))}),
    "csps": ("tcp", {"strategy": CSPS, "chain": LEVELS}),
    "growing": ("nixl", {"growing": GROWING, "threshold": 20}),
}
PROMPTS = {0: (prompt(1, 150), 0), 1: (prompt(2, 23), 7), 2: (prompt(3, CHUNK), 0)}


def read_by_engines(
    ranks: Ranks, folder: Path, world_size: int, changes: dict[str, Any], transfer: str, heads: int
) -> None:
    """An engine of one process and one of two ask for the same prompts, and get all heads."""
    address, count = free_address(), 2 * len(PROMPTS)
    of_ranks = folder, address, count, changes, CHUNK, transfer, 2
    run = partial(ranks.run, prefill_on_a_rank, *of_ranks, world_size=world_size)
    with in_background(run) as done:
        # Slots of a few rows: most of what is sent waits for one.
        settings: dict[str, Any] = {"transfer": transfer, "landing_bytes": world_size * 4096}
        alone = Reader(folder, address, **settings)
        size = max(heads // 2, 1)
        shared = [
            Reader(folder, address, (n * heads // 2, size), (n, 2), "two", **settings)
            for n in range(2)
        ]
        readers = [alone, *shared]
        for reader in readers:
            while not reader.client.connect(0.5):
                assert not any(isinstance(each, BaseException) for each in done), done
            assert reader.client.comes_by.startswith(transfer.upper())
        for number, (tokens, start) in PROMPTS.items():
            for reader in readers:
                reader.begin(number, tokens, start)
        while any(len(reader.ended) < len(PROMPTS) for reader in readers):
            assert not any(isinstance(each, BaseException) for each in done), done
            for reader in readers:
                reader.poll(0.01)
    # Not before the ranks have read that all rows have come.
    for reader in readers:
        reader.client.close()
    wanted = 0
    for number, (tokens, start) in PROMPTS.items():
        theirs, transfer_of = reference(folder, tokens), Transfer(number)
        wanted += len(tokens) - start
        for reader, first in ((alone, 0), (shared[0], 0), (shared[1], heads // 2)):
            assert reader.ended[transfer_of] == ""
            assert (reader.written[transfer_of][:, start:] == 1).all()
            for ours, whole in zip(reader.rows[transfer_of], theirs, strict=True):
                own = whole[:, start:, first : first + ours.shape[2]]
                torch.testing.assert_close(ours[:, start:], own, atol=2e-5, rtol=1e-5)
    assert all(each.referenced == 0 for each in done[0])
    assert [each.counts.prompts for each in done[0]] == [count] * world_size, done[0][0].log
    # Every row is sent once to each process: 3 layers, heads of 16, keys and values.
    of_all = heads + 2 * size
    assert sum(each.counts.bytes_rows for each in done[0]) == wanted * 3 * of_all * 16 * 2 * 4
    # Each of those that hold the same head has a process of its own.
    for first in range(0, world_size, 2):
        assert all(each.counts.bytes_rows for each in done[0][first : first + 2])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=NEEDS_NIXL if transfer == "nixl" else ())
        for name, (transfer, _) in STRATEGIES.items()
    ],
)
def test_four_processes_are_two_ranks_of_two(ranks: Ranks, tmp_path: Path, name: str) -> None:
    transfer, changes = STRATEGIES[name]
    folder = save_small_model("llama", tmp_path)
    read_by_engines(ranks, folder, 4, changes, transfer, 2)


@pytest.mark.parametrize("transfer", ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_ranks_that_hold_the_same_head_send_it_once(
    ranks: Ranks, tmp_path: Path, transfer: str
) -> None:
    folder = save_small_model("qwen2", tmp_path, num_key_value_heads=1)
    read_by_engines(ranks, folder, 2, {}, transfer, 1)


def test_heads_that_the_model_does_not_have_are_a_line(ranks: Ranks, tmp_path: Path) -> None:
    folder, address = save_small_model("llama", tmp_path), free_address()
    of_ranks = folder, address, 1, {}, CHUNK, "tcp", 2
    with in_background(partial(ranks.run, prefill_on_a_rank, *of_ranks, world_size=2)):
        other = Reader(folder, address, (1, 2), engine="other")
        line = "process 0 of the engine wants the key-value heads 1 to 2, and the model has 2"
        with pytest.raises(HandshakeError, match=line):
            other.client.connect(240.0)
        reader = Reader(folder, address)
        assert reader.client.connect(240.0)
        reader.begin(0, prompt(0, 9))
        reader.until(lambda: bool(reader.ended))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0: give at least 1"),
        (["--tensor-parallel-size", "3"], "3 neither divides the model's 2 key-value heads"),
    ],
)
def test_sizes_that_cannot_be_are_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], line: str
) -> None:
    folder = str(save_small_model("llama", tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["prefill", folder, "--model-impl", "transformers", *flags])
    assert ended.value.code == 2
    assert line in capsys.readouterr().err.strip().splitlines()[-1]


def test_processes_of_torchrun_are_whole_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distca.torchrun import Torchrun

    monkeypatch.setattr("distca.commands.prefill.read_torchrun", lambda: Torchrun(5, 5, 1, 0, 0, 0))
    folder = str(save_small_model("llama", tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["prefill", folder, "--tensor-parallel-size", "2"])
    assert ended.value.code == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "--tensor-parallel-size 2 does not divide torchrun's 5 processes" in told

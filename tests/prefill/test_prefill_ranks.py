"""Prefill for other engines: rows arrive once, equal transformers' own, and nothing is left."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distca.cost.volume import AttentionShape
from distca.inference.defaults import configure
from distca.inference.models import read_model
from distca.prefill.client import HandshakeError
from distca.prefill.facts import disagreement, frequencies_of_vllm, model_facts, model_folder
from distca.prefill.front import Front
from distca.prefill.messages import Join, Left, Prefill, Told, TransferChoice
from distca.prefill.nixl import NixlError
from distca.prefill.ranks import PrefillRank
from distca.schedule.serving.handoff.protocol import Transfer
from support.balanced import eager_tiles
from support.prefills import (
    BY_EACH,
    CHUNK,
    GROWING,
    Reader,
    free_address,
    in_background,
    prefill_on_a_rank,
    prompt,
    reference,
)
from support.ranks import Ranks
from support.small_models import save_small_model


def check(reader: Reader, folder: Path, number: int, tokens: list[int], start: int = 0) -> None:
    """All rows that were wanted came once, and are transformers' own."""
    transfer = Transfer(number)
    assert reader.ended[transfer] == ""
    assert (reader.written[transfer][:, :start] == 0).all()
    assert (reader.written[transfer][:, start:] == 1).all()
    for ours, theirs in zip(reader.rows[transfer], reference(folder, tokens), strict=True):
        torch.testing.assert_close(ours[:, start:], theirs[:, start:], atol=2e-5, rtol=1e-5)


@BY_EACH
@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (1, {}),
        (2, {}),
        (2, {"strategy": "pass-q"}),
        (3, {"threshold": 30}),
        (4, {"threshold": 20, "growing": GROWING}),
        (2, {"growing": GROWING, "strategy": "pass-q", "max_num_seqs": 2}),
        (3, {"strategy": eager_tiles(AttentionShape(4, 2, 16, 4))}),
    ],
    ids=["one", "pass-kv", "pass-q", "short", "growing", "growing, pass-q", "tiles"],
)
def test_rows_equal_transformers_own(
    ranks: Ranks, tmp_path: Path, count: int, changes: dict[str, Any], transfer: str
) -> None:
    folder, address = save_small_model("llama", tmp_path), free_address()
    common = prompt(0, 64)
    prompts = {
        0: (prompt(1, 150), 0),
        1: (prompt(2, 1), 0),
        2: (prompt(3, 23), 7),
        # Begins as the next does, so that its blocks are found.
        3: (common, 0),
        4: (common + prompt(4, 31), 50),
        5: (prompt(5, CHUNK), 0),
    }
    of_ranks = folder, address, len(prompts), changes, CHUNK, transfer
    with in_background(partial(ranks.run, prefill_on_a_rank, *of_ranks, world_size=count)) as done:
        # Slots of a few rows: most of what is sent waits for one.
        reader = Reader(folder, address, landing_bytes=count * 4096)
        assert reader.client.connect(240.0)
        assert reader.client.comes_by.startswith(transfer.upper())
        for number, (tokens, start) in prompts.items():
            if number == 4:
                # What it begins with is computed by then.
                reader.until(lambda: Transfer(3) in reader.ended)
            reader.begin(number, tokens, start)
        reader.until(lambda: len(reader.ended) == len(prompts))
    # Not before the ranks have read that all rows have come.
    reader.client.close()
    for number, (tokens, start) in prompts.items():
        check(reader, folder, number, tokens, start)
    assert all(each.referenced == 0 for each in done[0])
    assert {each.counts.prompts for each in done[0]} == {len(prompts)}, done[0][0].log
    tokens_wanted = sum(len(tokens) - start for tokens, start in prompts.values())
    assert all(each.counts.tokens == tokens_wanted for each in done[0])
    wanted = sum(len(tokens) - start for tokens, start in prompts.values())
    fed = sum(len(tokens) for tokens, _ in prompts.values())
    assert done[0][0].counts.computed <= fed - 60
    # Every row is sent once: 3 layers, 2 heads of 16, keys and values.
    assert sum(each.counts.bytes_rows for each in done[0]) == wanted * 3 * 2 * 16 * 2 * 4


def test_another_model_is_refused_before_anything_runs(ranks: Ranks, tmp_path: Path) -> None:
    folder, address = save_small_model("llama", tmp_path), free_address()
    run = partial(ranks.run, prefill_on_a_rank, folder, address, 1, {}, world_size=1)
    with in_background(run):
        other = Reader(folder, address, engine="other", dtype="bfloat16")
        with pytest.raises(
            HandshakeError,
            match="dtype: the engine has bfloat16, and the prefill ranks have float32",
        ):
            other.client.connect(240.0)
        # The ranks end with the first prompt.
        reader = Reader(folder, address)
        assert reader.client.connect(240.0)
        reader.begin(0, prompt(0, 9))
        reader.until(lambda: bool(reader.ended))
    check(reader, folder, 0, prompt(0, 9))


@BY_EACH
def test_each_process_of_an_engine_has_its_heads(
    ranks: Ranks, tmp_path: Path, transfer: str
) -> None:
    folder, address = save_small_model("qwen2", tmp_path), free_address()
    of_ranks = folder, address, 2, {}, CHUNK, transfer
    run = partial(ranks.run, prefill_on_a_rank, *of_ranks, world_size=2)
    with in_background(run):
        readers = [Reader(folder, address, (head, 1), (head, 2)) for head in range(2)]
        for reader in readers:
            assert reader.client.connect(240.0)
        for number, tokens in enumerate([prompt(0, 99), prompt(1, 50)]):
            for reader in readers:
                reader.begin(number, tokens, 3)
        while any(len(reader.ended) < 2 for reader in readers):
            for reader in readers:
                reader.poll(0.01)
    for number, tokens in enumerate([prompt(0, 99), prompt(1, 50)]):
        theirs = reference(folder, tokens)
        for head, reader in enumerate(readers):
            assert (reader.written[Transfer(number)][:, 3:] == 1).all()
            for ours, whole in zip(reader.rows[Transfer(number)], theirs, strict=True):
                torch.testing.assert_close(ours[:, 3:, 0], whole[:, 3:, head], atol=2e-5, rtol=1e-5)


@BY_EACH
def test_what_is_cancelled_writes_no_more_and_leaves_no_block(
    ranks: Ranks, tmp_path: Path, transfer: str
) -> None:
    folder, address = save_small_model("llama", tmp_path), free_address()
    count = 24
    of_ranks = folder, address, count, {}, CHUNK, transfer
    with in_background(partial(ranks.run, prefill_on_a_rank, *of_ranks, world_size=2)) as done:
        reader = Reader(folder, address, landing_bytes=1 << 15)
        assert reader.client.connect(240.0)
        prompts = {n: prompt(n % 5, 20 + 37 * n % 200) for n in range(count)}
        for number, tokens in prompts.items():
            reader.begin(number, tokens, priority=number % 3)
            if number % 2:
                for _ in range(number):
                    reader.poll(0.001)
                reader.client.cancel(Transfer(number))
        reader.until(lambda: len(reader.ended) == count and not reader.client.under_way)
    assert not reader.late
    for number, tokens in prompts.items():
        if reader.ended[Transfer(number)] == "":
            check(reader, folder, number, tokens)
        else:
            assert number % 2
            assert reader.ended[Transfer(number)] == "cancelled"
    assert all(each.referenced == 0 for each in done[0])


def test_a_prompt_that_cannot_be_held_is_refused_by_the_ranks(ranks: Ranks, tmp_path: Path) -> None:
    folder, address = save_small_model("llama", tmp_path), free_address()
    changes = {"cache_bytes": 64 * 3 * 2 * 16 * 2 * 4}
    run = partial(ranks.run, prefill_on_a_rank, folder, address, 1, changes, world_size=2)
    with in_background(run):
        reader = Reader(folder, address)
        assert reader.client.connect(240.0)
        assert reader.client.welcome is not None
        assert reader.client.welcome.capacity == 128
        reader.begin(0, prompt(0, 129))
        reader.begin(1, prompt(1, 128))
        reader.until(lambda: len(reader.ended) == 2)
    assert "given up" in reader.ended[Transfer(0)]
    check(reader, folder, 1, prompt(1, 128))


def transfers_of_a_rank(
    folder: Path, choice: TransferChoice, without: int | None
) -> tuple[str, ...] | str:
    """How a rank can send rows, or why not, where one rank has no NIXL."""

    class Agent:
        metadata = b"agent"

        def __init__(self) -> None:
            if dist.get_rank() == without:
                raise NixlError("NIXL is not installed here")

    model = read_model(str(folder), torch.float32)
    config = configure(model, dist.get_world_size(), block_size=4, cache_bytes=1 << 20)
    with mock.patch("distca.prefill.ranks.NixlAgent", Agent):
        try:
            return PrefillRank(config, model, 16, 4.0, choice).transfers
        except NixlError as error:
            return str(error)


@pytest.mark.parametrize(
    ("choice", "without", "found"),
    [
        ("auto", None, ("nixl", "tcp")),
        ("nixl", None, ("nixl",)),
        ("auto", 1, ("tcp",)),
        ("nixl", 1, "rank 1: NIXL is not installed here"),
        ("tcp", 1, ("tcp",)),
    ],
)
def test_all_ranks_send_rows_as_all_can(
    ranks: Ranks, tmp_path: Path, choice: TransferChoice, without: int | None, found: object
) -> None:
    folder = save_small_model("llama", tmp_path)
    assert ranks.run(transfers_of_a_rank, folder, choice, without, world_size=2) == [found] * 2


class Waits(Front):
    """A front without sockets, whose engine asks for one prompt at the third look."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def pump(self, seconds: float | None = None) -> None:
        if seconds is not None:
            self.seconds.append(seconds)

    def take(self) -> list[Join | Told | Left]:
        asked = Prefill(Transfer(0), [1] * 8, 0)
        return [Join(0, asked, [])] if len(self.seconds) == 3 else []

    def say(self, number: int, kind: str, reason: str = "") -> None:
        """Nobody hears it."""


def waits_of_a_rank(folder: Path) -> list[float]:
    """How long a rank waits for engines before each of five iterations."""
    model = read_model(str(folder), torch.float32)
    rank, front = PrefillRank(configure(model, 1, cache_bytes=1 << 20), model, 16, 4.0), Waits()
    rank.listen(front)
    assert [rank.iterate() for _ in range(5)] == [False, False, True, False, False]
    rank._outbox.close()
    return front.seconds


def test_ranks_wait_for_engines_while_there_is_nothing_to_do(ranks: Ranks, tmp_path: Path) -> None:
    folder = save_small_model("llama", tmp_path)
    (seconds,) = ranks.run(waits_of_a_rank, folder, world_size=1)
    # They do not know yet that there is nothing; and after an iteration there may be more.
    assert [each > 0 for each in seconds] == [False, True, True, False, True]
    assert max(seconds) <= 0.5


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
def test_rotary_frequencies_of_a_length_must_be_the_same_code_s(kind: str) -> None:
    """vLLM chooses the frequencies of LongRoPE once for all prompts, by the longest."""
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=1)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4}
    codes = [frequencies_of_vllm(4096), frequencies_of_vllm(8192), "those of transformers' code"]
    first, *others = (model_facts(config, ".", "float32", code, "none") for code in codes)
    assert disagreement(first, first) is None
    for code, facts in zip(codes[1:], others, strict=True):
        told = disagreement(first, facts)
        if kind == "default":
            assert told is None
        else:
            assert told is not None
            assert told.startswith("rotary frequencies: ")
            assert "4096" in told
            assert code in told


def test_the_order_of_a_config_s_numbers_is_no_fact() -> None:
    from transformers import LlamaConfig

    rotary = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    found = []
    for each in (rotary, dict(reversed(rotary.items()))):
        config = LlamaConfig(num_hidden_layers=1)
        config.rope_parameters = each
        found.append(model_facts(config, ".", "float32", "", "none"))
    assert disagreement(*found) is None
    config.rope_parameters = {**rotary, "factor": 4.0}
    told = disagreement(found[0], model_facts(config, ".", "float32", "", "none"))
    assert told is not None
    assert told.startswith("rotary embedding: ")


def test_weights_must_be_quantized_alike() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=1)
    theirs, ours = (model_facts(config, ".", "float32", "", kind) for kind in ("fp8", "none"))
    assert disagreement(theirs, ours) == (
        "quantization of weights: the engine has fp8, and the prefill ranks have none"
    )


def test_a_model_may_be_known_by_its_name_on_the_hub(tmp_path: Path) -> None:
    model = tmp_path / "models--someone--small"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    downloaded = str(tmp_path)
    assert Path(model_folder("someone/small", cache_dir=downloaded)) == snapshot
    assert model_folder(str(snapshot)) == str(snapshot)
    with pytest.raises(ValueError, match="the weights of someone/large cannot be compared"):
        model_folder("someone/large", cache_dir=downloaded)
    with pytest.raises(ValueError, match="give the folder of the model"):
        model_folder("someone/small", "v2", downloaded)

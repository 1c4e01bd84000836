"""The bytes that prompts need are those that an engine takes, and no prompt without room starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from distca.inference.defaults import configure
from distca.inference.engine import Engine
from distca.inference.messages import AddRequest, Iteration, ModelOutput, SampledToken
from distca.inference.models import ServedModel, read_model
from distca.inference.pool_size import (
    blocks_in,
    bytes_needed,
    bytes_of_block,
    check_room,
    ranks_needed,
)
from distca.inference.profiled_room import agreed_room
from distca.inference.sampling import SamplingParams
from distca.schedule.serving.partitions import Chain
from support.small_models import save_small_model

SIZE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("sized")
    return read_model(str(save_small_model("gemma3_text", folder)), torch.float32)


@pytest.mark.parametrize(
    ("ranks", "chain"), [(1, None), (3, None), (4, None), (3, Chain(3, (0.5, 0.3, 0.2)))]
)
def test_all_prompts_run_together_in_what_they_need(model, ranks: int, chain: Chain | None) -> None:
    """No sequence gives up its blocks, a chain's are where it wants them, and few are left over."""
    lengths, most = [50, 1, 17], 20
    nbytes = bytes_needed(model, lengths, most, ranks, SIZE, chain)
    config = configure(
        model, ranks, chain=chain, block_size=SIZE, cache_bytes=nbytes, prefix_caching=False
    )
    engine = Engine(config, blocks_in(nbytes, model, SIZE))
    for number, length in enumerate(lengths):
        engine.add(AddRequest(number, [1] * length, SamplingParams(max_tokens=most)))
    least = ranks * blocks_in(nbytes, model, SIZE)
    while (begun := engine.schedule()) is not None:
        for feed in begun.batch.feeds if chain is not None else ():
            if not feed.start:
                blocks = -(-feed.count // SIZE)
                assert [block.rank for block in feed.new_blocks] == chain.owners(
                    blocks, 0, feed.count
                )
        least = min(least, sum(engine.cache.free(rank) for rank in range(ranks)))
        chosen = [SampledToken(feed.sequence, 7, None) for feed in begun.batch.feeds]
        engine.finish({0: ModelOutput(chosen, 0)})
    assert engine.scheduler.preemptions == 0
    # Of prompt and answer a rank may lack a block each, and a chain's last rank more.
    assert least <= 2 * len(lengths) * (ranks - 1) + (0 if chain is None else 2 * 6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_prompts_that_lie_on_one_rank_have_room_there(model, ranks: int) -> None:
    lengths, most = [50, 1, 17, 33, 80, 2, 64], 20
    nbytes = bytes_needed(model, lengths, most, ranks, SIZE, whole=True)
    config = configure(
        model,
        ranks,
        strategy="tiles",
        block_size=SIZE,
        cache_bytes=nbytes,
        max_num_batched_tokens=80 * ranks,
    )
    engine = Engine(config, blocks_in(nbytes, model, SIZE))
    for number, length in enumerate(lengths):
        engine.add(AddRequest(number, [1 + number] * length, SamplingParams(max_tokens=most)))
    while (begun := engine.schedule()) is not None:
        for feed in begun.batch.feeds:
            assert len({*feed.ranks.tolist()}) == 1
        chosen = [SampledToken(feed.sequence, 7, None) for feed in begun.batch.feeds]
        engine.finish({0: ModelOutput(chosen, 0)})
    assert engine.scheduler.preemptions == 0


def test_a_prompt_without_room_is_refused(model) -> None:
    one = bytes_of_block(model, SIZE)
    assert ranks_needed(model, 33, 4, SIZE, 3 * one) == 3
    check_room(model, 33, 4, 3, SIZE, 3 * one)
    said = f"33 tokens, with an answer of up to 5, need {10 * one:,} bytes of keys"
    with pytest.raises(ValueError, match=said):
        check_room(model, 33, 5, 3, SIZE, 3 * one)
    with pytest.raises(ValueError, match="less than a block of 4 tokens"):
        check_room(model, 33, 5, 3, SIZE, one - 1)


def test_ranks_without_room_for_a_block_say_so() -> None:
    worker = mock.Mock(**{"runner.room.return_value": 3})
    processes = mock.Mock(reduce=lambda numbers, by: numbers)
    config = mock.Mock(**{"cache.nbytes": 100})
    assert agreed_room(worker, config, processes) == 3
    # Another rank has less.
    processes.reduce = lambda numbers, by: numbers.clamp(max=0)
    with pytest.raises(ValueError, match="leave a rank no memory for a block"):
        agreed_room(worker, config, processes)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize(("tokens", "expected"), [(20, [20]), (200, [62, 62, 62]), (5, [5])])
def test_the_longest_steps_that_there_are_say_how_much_room_is_left(
    model, monkeypatch: pytest.MonkeyPatch, tokens: int, expected: list[int], block_size: int
) -> None:
    """As many decodes as graphs have rows, and prompts that leave two positions for answers."""
    cuda = "empty_cache", "reset_peak_memory_stats", "max_memory_allocated", "memory_allocated"
    for name in cuda:
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    fed: list[list[int]] = []

    def execute(iteration: Iteration) -> ModelOutput:
        feeds = iteration.batch.feeds
        fed.append([feed.count for feed in feeds])
        return ModelOutput([SampledToken(feed.sequence, 7, None) for feed in feeds], 0)

    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": 5}
    config = configure(model, cache_bytes=None, block_size=block_size, **limits)
    config = replace(config, model=replace(config.model, positions=64))
    runner = {"runner.block_bytes": 1, "runner.room.return_value": 7}
    worker = mock.Mock(execute=execute, **runner)
    processes = mock.Mock(gather=lambda mine: [mine], reduce=lambda values, _: values)
    assert agreed_room(worker, config, processes) == 7
    # Each prompt and one token more at once: none waits for blocks.
    assert fed == [[1] * 5, [1] * 5, expected, [1] * len(expected)]

"""How many blocks prompts need is what they take, and batches have room in turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from distca.inference.models import ServedModel, read_model
from distca.inference.pool_size import NoRoom, PoolSize, Sharing, batches_that_fit, size_for
from distca.schedule.serving.blocks import NoFreeBlocks
from distca.schedule.serving.partitions import Chain
from support.small_models import save_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("sized")
    return read_model(str(save_small_model("gemma3_text", folder)), torch.float32)


@pytest.mark.parametrize(
    "sharing",
    [
        Sharing(1, 2),
        Sharing(3, 1),
        Sharing(4, 4),
        # At the end all ranks hold as much, and one more than that before.
        Sharing(3, 2, Chain(3, (0.5, 0.3, 0.2)), restripes=True),
    ],
)
def test_needed_blocks_are_those_that_are_taken(model, sharing: Sharing) -> None:
    """Of the busiest rank: one block less is too few, and a later turn is counted, too."""
    ranks = sharing.world_size
    lengths, most = [50, 1, 17], 20
    size = size_for(model, lengths, most, sharing, 4)

    def answer(planner) -> None:
        planner.restripe(planner.plan(dict(enumerate(lengths)), "pass-kv", decodes=False))
        for _ in range(most - 1):
            planner.plan(dict.fromkeys(range(3), 1), "pass-q", decodes=True)

    planner = size.planner(model, sharing)
    pool = planner.accounts.pool
    answer(planner)
    assert min(pool.free(rank) for rank in range(ranks)) == 0
    held = sum(pool.referenced(rank) for rank in range(ranks))
    for sequence in range(3):
        rows = np.array(planner.rows_per_rank(sequence))
        assert rows.sum() == lengths[sequence] + most - 1
        counts = [len(each) for each in planner.accounts.blocks(sequence)]
        assert counts == (-(-rows // 4)).tolist()
        held -= sum(counts)
    assert held == 0
    with pytest.raises(NoFreeBlocks, match="are needed"):
        answer(PoolSize(size.blocks - 1, 4).planner(model, sharing))
    # A turn behind what is held.
    larger = PoolSize(100, 4).planner(model, sharing)
    answer(larger)
    before = [larger.accounts.pool.free(rank) for rank in range(ranks)]
    needed = larger.blocks_needed({1: 9}, 5)
    larger.restripe(larger.plan({1: 9}, "pass-kv", decodes=False))
    for _ in range(4):
        larger.plan({1: 1}, "pass-q", decodes=True)
    after = [larger.accounts.pool.free(rank) for rank in range(ranks)]
    taken = [a - b for a, b in zip(before, after, strict=True)]
    if sharing.restripes:
        assert (needed >= taken).all()
    else:
        assert needed.tolist() == taken
    for sequence in range(3):
        larger.drop(sequence)
    assert [larger.accounts.pool.free(rank) for rank in range(ranks)] == [100] * ranks


def test_prompts_are_cut_into_batches_that_fit(model) -> None:
    size = PoolSize(10, 4)
    found = batches_that_fit(size, model, [30, 5, 20, 11, 38], 2, Sharing(1, 2))
    assert found == [[0, 1], [2, 3], [4]]
    with pytest.raises(NoRoom, match="need 36,864 bytes of keys"):
        batches_that_fit(size, model, [4, 45], 2, Sharing(1, 2))

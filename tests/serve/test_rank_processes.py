"""Ranks that fail or end: the message says which and why, and none is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from distca.inference.models import read_model
from distca.inference.pool_size import NoRoom, PoolSize, Sharing
from distca.inference.rank_processes import RankError, RankProcesses, RankSettings
from distca.inference.sampling import SamplingParams
from support.small_models import save_small_model


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_rank_that_fails_or_ends_is_named(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    settings = RankSettings(model, Sharing(2, 4), "pass-kv", SamplingParams(2), pool=PoolSize(2, 8))
    with RankProcesses(settings) as ranks:
        pids = ranks.pids
        assert len(ranks.answer({0: [1, 2, 3]})[0].token_ids) == 2
        # A turn that has no room is refused, and leaves everything as it was.
        with pytest.raises(NoRoom, match="40 tokens of 1 sequences"):
            ranks.answer({0: [1] * 40})
        assert len(ranks.answer({1: [1, 2, 3]})[1].token_ids) == 2
        for sequence in (0, 1):
            ranks.drop(sequence)
        # All blocks are free again.
        assert len(ranks.answer({2: [1] * 30})[2].token_ids) == 2
        ranks.drop(2)
        planned, counted = ranks.bytes_moved()
        assert planned == counted > 0
        # A prefill is timed, and leaves nothing behind.
        for parts in ((10, 6), (16, 0)):
            assert min(ranks.time_prefill(parts)) > 0
        assert len(ranks.answer({3: [1] * 30})[3].token_ids) == 2
        ranks.drop(3)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 .*killed|rank 0: "):
            ranks.answer({0: [1, 2, 3]})
    assert not any(is_there(pid) for pid in pids)
    settings = RankSettings(model, Sharing(1, 16), "pass-kv", SamplingParams(2))
    with RankProcesses(settings) as ranks:
        with pytest.raises(RankError, match="rank 0: IndexError: index out of range"):
            # No command lets such a token through.
            ranks.answer({0: [260]})
        assert not any(is_there(pid) for pid in ranks.pids)

"""Ranks that fail or end: the message says which and why, and none is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from distca.inference.defaults import configure
from distca.inference.models import read_model
from distca.inference.pool_size import bytes_of_block
from distca.inference.rank_processes import RankError, RankProcesses
from distca.inference.sampling import SamplingParams
from support.small_models import save_small_model


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_rank_that_fails_or_ends_is_named(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    nbytes, sampling = 2 * bytes_of_block(model, 8), SamplingParams(2)
    with RankProcesses(configure(model, 2, block_size=8, cache_bytes=nbytes)) as ranks:
        pids = ranks.pids
        assert len(ranks.answer({0: [1, 2, 3]}, sampling)[0].token_ids) == 2
        # A prompt that has no room is refused, and leaves everything as it was.
        with pytest.raises(ValueError, match="41 tokens need more than the 32"):
            ranks.answer({1: [1, 2], 0: [1] * 40}, sampling)
        assert len(ranks.answer({1: [1, 2, 3]}, sampling)[1].token_ids) == 2
        # All blocks are free again.
        assert len(ranks.answer({2: [1] * 30}, sampling)[2].token_ids) == 2
        planned, counted = ranks.bytes_moved()
        assert planned == counted > 0
        # A prefill is timed, and leaves nothing behind.
        for parts in ((10, 6), (16, 0)):
            assert min(ranks.time_prefill(parts)) > 0
        assert len(ranks.answer({3: [1] * 30}, sampling)[3].token_ids) == 2
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 .*killed|rank 0: "):
            ranks.answer({0: [1, 2, 3]}, sampling)
    assert not any(is_there(pid) for pid in pids)
    with RankProcesses(configure(model, cache_bytes=1 << 20)) as ranks:
        with pytest.raises(RankError, match="rank 0: IndexError: index out of range"):
            # No command lets such a token through.
            ranks.answer({0: [260]}, sampling)
        assert not any(is_there(pid) for pid in ranks.pids)

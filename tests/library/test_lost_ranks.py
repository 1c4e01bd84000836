"""A rank whose peer is killed or stopped says so in our words, whichever operation it is in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from distca.transport import LostRankError, TransportError, naming_lost_ranks
from support.lost_ranks import KILLED, OPERATIONS, STOPPED, what_the_other_raises

pytest.importorskip("transformers")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_says_that_another_was_killed(operation: str, tmp_path: Path) -> None:
    found = what_the_other_raises(operation, KILLED, str(tmp_path))
    _check(found)


@pytest.mark.parametrize("operation", ["gather_rollouts", "core_attention"])
def test_a_rank_says_that_another_does_not_answer(operation: str, tmp_path: Path) -> None:
    found = what_the_other_raises(operation, STOPPED, str(tmp_path))
    _check(found)
    assert "imed out" in found[3]


def _check(found: tuple[str, ...]) -> None:
    kind, text, cause, of_cause = found
    assert kind == "LostRankError", found
    assert text.startswith("rank 0 cannot finish ")
    assert "another rank has ended, does not answer, or calls something else: look for" in text
    assert "\n" not in text
    # What torch says is there, too.
    assert cause in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
    assert of_cause.splitlines()[0] in text


REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process"
LOST = (
    dist.DistBackendError(f"NCCL error in: NCCLUtils.hpp:268, remote error.\n{REMOTE}"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0."),
    dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)"),
    dist.DistStoreError("wait timeout after 300000ms, keys: /default_pg//cpu//0/1"),
    RuntimeError("[pair.cc:550] Connection reset by peer [127.0.0.1]:4"),
    RuntimeError("writev [127.0.0.1]:4: Broken pipe"),
)
OTHERS = (
    dist.DistBackendError("NCCL error, invalid usage: Duplicate GPU detected"),
    RuntimeError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 4 vs 2"),
    TransportError("rank 1 did nothing: timed out"),
    ValueError("Connection"),
)


@pytest.mark.parametrize("error", LOST, ids=str)
def test_words_of_nccl_and_gloo_for_a_lost_rank_are_known(error: Exception) -> None:
    lost = pytest.raises(LostRankError, match="cannot finish gather, since")
    with lost as raised, naming_lost_ranks("gather"):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, naming_lost_ranks("gather"):
        raise error
    assert raised.value is error

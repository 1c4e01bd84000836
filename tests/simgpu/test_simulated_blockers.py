"""What stood between the code and its first run on a GPU is seen if it is put back.

In `test_simulated_verify.py` a pool is larger than the memory, and FlashAttention 2 is given lines
without queries as if each had one. In `test_simulated_nccl.py` ranks use two communicators in
different orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from support.simgpu.changes import Change, run_changes
from support.simgpu.machine import ROOT


@dataclass(frozen=True)
class Blocker:
    """A defect that is put back.

    Attributes:
        job: job that shows it; see `support.simgpu.mutant_runs`.
        path: file of the project.
        now: text of the file, which occurs once.
        before: text that takes its place.
        says: part of what is said of it.
    """

    job: str
    path: str
    now: str
    before: str
    says: str

    @property
    def change(self) -> Change:
        """The file with the defect."""
        source = (ROOT / self.path).read_text()
        assert source.count(self.now) == 1, f"{self.path} has changed: {self.now}"
        return self.job, self.path, source.replace(self.now, self.before)


OUTBOX, GRAPHS = "distca/prefill/outbox.py", "distca/inference/cuda_graphs.py"
BLOCKERS = {
    "answers are computed in float32 by default": Blocker(
        "answers",
        "distca/commands/served_dtype.py",
        """given or ("bfloat16" if on_gpus else "float32")""",
        """given or "float32\"""",
        "only supports fp16 and bf16",
    ),
    "keys and values are handed on by pageable copies": Blocker(
        "rows",
        OUTBOX,
        "copies.append(copy.copy_(rows, non_blocking=True))",
        "copies.append(rows.cpu())",
        "syncs: ",
    ),
    "a step copies from pageable memory": Blocker(
        "answers",
        "distca/attention/pinned.py",
        "source = source.pin_memory()",
        "pass",
        "syncs: ",
    ),
    "a decode step launches more": Blocker(
        "answers",
        GRAPHS,
        "        self._last()\n",
        "        self._last()\n        self._logits.add_(0)\n",
        "launches: ",
    ),
    "a training step waits for the GPU": Blocker(
        "training",
        "distca/runtime/attention_call.py",
        "        assert self._parts is not None\n        assert self._exchange is not None\n",
        "        torch.cuda.synchronize()\n        assert self._exchange is not None\n",
        "syncs: ",
    ),
    "a training step launches more": Blocker(
        "training",
        "distca/transport/collective.py",
        "        staged = first_bytes(self._staging[channel], sizes.sent)\n",
        "        staged = first_bytes(self._staging[channel], sizes.sent).clone()\n",
        "launches: ",
    ),
    "memory is given out again while a copy reads it": Blocker(
        "rows", OUTBOX, "rows.record_stream(self._stream)", "pass", "are freed while"
    ),
    "rows are read before they have come": Blocker(
        "training", "distca/transport/collective.py", "work.wait()", "pass", "rank "
    ),
}


@pytest.fixture(scope="module")
def why(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each; all run in one process."""
    changes = [each.change for each in BLOCKERS.values()]
    found = run_changes(changes, tmp_path_factory.mktemp("blockers"))
    return dict(zip(BLOCKERS, found, strict=True))


@pytest.mark.parametrize("name", BLOCKERS)
def test_a_blocker_is_seen(why: dict[str, str], name: str) -> None:
    assert BLOCKERS[name].says in why[name], why[name] or "nothing is seen"

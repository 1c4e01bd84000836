"""Defects that stood between the code and its first run on a GPU, to be put back.

In `test_simulated_verify.py` FlashAttention 2 is given lines without queries as if each had one. In
`test_simulated_nccl.py` ranks use two communicators in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from support.simgpu.changes import Change
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
        further: further changes: files, texts and what takes their places.
    """

    job: str
    path: str
    now: str
    before: str
    says: str
    further: Sequence[tuple[str, str, str]] = ()

    @property
    def change(self) -> Change:
        """The files with the defect."""
        sources = dict[str, str]()
        for path, now, before in ((self.path, self.now, self.before), *self.further):
            source = sources.get(path, (ROOT / path).read_text())
            assert source.count(now) == 1, f"{path} has changed: {now}"
            sources[path] = source.replace(now, before)
        return self.job, sources


OUTBOX, GRAPHS = "distca/prefill/outbox.py", "distca/inference/cuda_graphs.py"
DECODE = "distca/runtime/serving/decode_exchange.py"
BLOCKERS = {
    "answers are computed in float32 by default": Blocker(
        "answers",
        "distca/commands/engine_flags.py",
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
    "a decode step of a rank alone launches more than a graph": Blocker(
        "alone",
        "distca/inference/model_runner.py",
        "steps_are_whole(self.attention, model.shape.head_dim)",
        "False",
        "launches: ",
    ),
    "a pool gets its size before it is known what steps need": Blocker(
        "little memory",
        "distca/inference/profiled_room.py",
        "    if config.cache.nbytes is None:\n",
        "    if False:\n",
        "out of memory",
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
    "lines without a query are no exception, with FlashAttention 2": Blocker(
        "answers",
        "distca/attention/flash.py",
        "longest_q = 2",
        "pass",
        "is invalid for input of size",
        (
            (DECODE, "at = lines[served]", "at, its = np.arange(len(tables.host)), lines[served]"),
            (
                DECODE,
                "first, used = decode.hidden[mask][served, rank], decode.rows[served, rank]",
                "first, used = np.zeros((2, len(at)), dtype=np.int64)\n"
                "    first[its] = decode.hidden[mask][served, rank]\n"
                "    used[its] = decode.rows[served, rank]",
            ),
            (DECODE, "[np.ones_like(at), used", "[np.isin(at, its).astype(np.int64), used"),
        ),
    ),
    "a rank without keys under a window has an index of floating point": Blocker(
        "one answer",
        "distca/attention/paged.py",
        "np.array(runs, dtype=np.int64)",
        "np.array(runs)",
        "from dtype('float64') to dtype('int64')",
    ),
    "layers with experts are captured, and ask the device what to do": Blocker(
        "experts",
        "distca/inference/models.py",
        "asks_host |= not fused or products_ask_host(device, self.dtype)",
        "pass",
        "not permitted when stream is capturing",
        # By default all experts' matrices are multiplied at once, which asks the device nothing.
        (
            (
                "distca/checkpoints/weights.py",
                "output_loading_info=True,",
                "output_loading_info=True, experts_implementation='eager',",
            ),
        ),
    ),
    "rows are read before they have come": Blocker(
        "training", "distca/transport/collective.py", "work.wait()", "pass", "rank "
    ),
}

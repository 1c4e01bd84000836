"""The recorder sees what it is for: its comparison reports each kind of difference, in words."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from recording import commands, rank
from recording.compare import compare
from recording.inference_mixes import INFERENCE_MIXES
from recording.mixes import TRAINING_MIXES
from support.ranks import forget_megatron

STEP = {
    "gradient norm": "0x1.0p+0",
    "gradients": {"decoder.weight": "aa"},
    "events": ["start dispatch", "kernel forward", "wait dispatch"],
    "plans": [["p0", "p1"]],
    "new tensors": {"other": [3, 12288]},
}
RANK = {
    "before": {},
    "steps": [STEP, STEP],
    "bytes": {"sent": {"dispatch": 5}},
    "buffers": {"total": 7},
}
RECORDING = {
    "versions": {"torch": "2"},
    "mixes": {"first": [RANK, RANK], "second": [RANK]},
}
# Where something is changed in the last rank of the first mix, to what, and what is said of it.
CHANGES: dict[str, tuple[list[Any], Any, str]] = {
    "a gradient": (
        ["steps", 1, "gradients", "decoder.weight"],
        "ab",
        "gradients on 1 of 2 ranks: rank 1, step 1, gradients decoder.weight: was `aa`, is `ab`",
    ),
    "an event that came sooner": (
        ["steps", 1, "events"],
        ["start dispatch", "wait dispatch", "kernel forward"],
        "events on 1 of 2 ranks: rank 1, step 1, events 1: was `kernel forward`, "
        "is `wait dispatch`",
    ),
    "an event more": (
        ["steps", 0, "events"],
        [*STEP["events"], "loss"],
        "events on 1 of 2 ranks: rank 1, step 0, events 3: was `nothing`, is `loss`",
    ),
    "a plan": (
        ["steps", 0, "plans"],
        [["p0", "p2"]],
        "plans on 1 of 2 ranks: rank 1, step 0, plans 0 1: was `p1`, is `p2`",
    ),
    "new tensors": (
        ["steps", 1, "new tensors"],
        {"other": [4, 20480]},
        "new tensors on 1 of 2 ranks: rank 1, step 1, new tensors other 0: was `3`, is `4`",
    ),
    "a phase's bytes": (
        ["bytes", "sent"],
        {"dispatch": 5, "return": 1},
        "bytes on 1 of 2 ranks: rank 1, bytes sent return: was `nothing`, is `1`",
    ),
    "buffers": (
        ["buffers", "total"],
        8,
        "buffers on 1 of 2 ranks: rank 1, buffers total: was `7`, is `8`",
    ),
    "a step less": (
        ["steps"],
        [STEP],
        f"steps on 1 of 2 ranks: rank 1, step 1: was `{STEP}`, is `nothing`",
    ),
}


def test_identical_recordings_are_identical(tmp_path, capsys) -> None:
    for name in ("was", "now"):
        commands.save(copy.deepcopy(RECORDING), tmp_path / name)
    files = [str(tmp_path / name) for name in ("was", "now")]
    assert commands.main(["compare", *files]) == 0
    assert capsys.readouterr() == ("identical: 2 mixes, 3 ranks\n", "")
    assert (tmp_path / "was").read_bytes() == (tmp_path / "now").read_bytes()


@pytest.mark.parametrize("change", CHANGES)
def test_each_kind_of_difference_is_reported(tmp_path, capsys, change: str) -> None:
    path, value, said = CHANGES[change]
    changed: Any = json.loads(json.dumps(RECORDING))
    at = changed["mixes"]["first"][1]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    commands.save(copy.deepcopy(RECORDING), tmp_path / "was")
    commands.save(changed, tmp_path / "now")
    assert commands.main(["compare", *(str(tmp_path / name) for name in ("was", "now"))]) == 1
    assert capsys.readouterr().out == f"first: {said}\n"


def test_missing_mixes_and_other_versions_are_reported() -> None:
    other = {"versions": {"torch": "3"}, "mixes": {"second": [RANK], "third": [RANK]}}
    warnings, lines = compare(RECORDING, other)
    assert warnings == ["warning: torch was 2, is 3: bits may depend on it"]
    assert lines == ["first: not in the second recording", "third: not in the first recording"]


def test_a_commit_without_a_recorder_is_refused() -> None:
    with pytest.raises(SystemExit, match="git knows no commit 'no-such-commit'"):
        commands.main(["since", "no-such-commit"])


def _unchanged() -> Iterator[None]:
    yield


def _waits_at_once() -> Iterator[None]:
    """Exchanges are waited for within `start`, below what the runtime calls."""
    from distca.transport import CollectiveTransport

    start = CollectiveTransport._start

    def start_and_wait(*args: Any) -> Any:
        pending = start(*args)
        pending.wait()
        return pending

    with mock.patch.object(CollectiveTransport, "_start", start_and_wait):
        yield


def _prefetches_inline() -> Iterator[None]:
    from distca.runtime import Prefetcher

    def keep(self: Any, values: Any, depth: int = 1) -> None:
        self.values, self.seconds_waited = values, 0.0

    inline = {"__init__": keep, "__next__": lambda self: next(self.values), "close": lambda _: None}
    with (
        mock.patch.multiple(Prefetcher, **inline),
        mock.patch("recording.hooks.PATIENCE_SECONDS", 0.1),
    ):
        yield


def _divides_by_tokens() -> Iterator[None]:
    from megatron_patches.batches import micro_batch

    sum_loss = micro_batch.sum_loss

    def of_all_tokens(batch: Any, losses: Any) -> Any:
        loss, targets, report = sum_loss(batch, losses)
        return loss, targets.new_tensor(losses.numel()), report

    with mock.patch.object(micro_batch, "sum_loss", of_all_tokens):
        yield


DEFECTS: dict[str, tuple[Callable[[], Iterator[None]], set[str]]] = {
    "none": (_unchanged, set()),
    "waits at once": (_waits_at_once, {"events"}),
    "prefetches inline": (_prefetches_inline, {"events"}),
    "divides by tokens": (
        _divides_by_tokens,
        {"gradients", "gradient norm", "losses of micro-batches", "weights"},
    ),
}


def record_with(defects: list[str], job: tuple[list[str], list[int]], steps: int) -> list[Any]:
    """The recordings of this rank with each of some `DEFECTS`; collective."""

    recorded = []
    for defect in defects:
        with contextlib.contextmanager(DEFECTS[defect][0])():
            recorded.append(rank.record(*job, steps))
        forget_megatron()
    return recorded


def test_defects_are_seen_that_losses_do_not_show(ranks) -> None:
    """Recordings of the same are identical, and those of a defect are not."""
    (mix,) = (mix for mix in TRAINING_MIXES if mix.name == "greedy, DP2, keep")
    steps, defects = 2, ["none", *DEFECTS]
    found = ranks.run(record_with, defects, mix.job(steps), steps, world_size=mix.world_size)
    first, *others = ({"versions": {}, "mixes": {"mix": each}} for each in zip(*found, strict=True))
    first, *others = (json.loads(json.dumps(each)) for each in (first, *others))
    for defect, other in zip(DEFECTS, others, strict=True):
        _, lines = compare(first, other)
        kinds = {line.removeprefix("mix: ").partition(" on 2 of 2 ranks: ")[0] for line in lines}
        expected = DEFECTS[defect][1]
        if "weights" in expected:
            # Reported losses may be the same: clipped gradients, and Adam's steps, nearly are.
            kinds.discard("reports")
        assert kinds == expected, (defect, lines)
    last = first["mixes"]["mix"][0]["steps"][-1]
    assert last["new tensors"].keys() == {"kernels", "exchange", "other"}
    assert {len(nano_batches) for nano_batches in last["plans"]} == {2}
    events = "\n".join(last["events"])
    for event in (
        "next value: made ahead on another thread\nforward: micro-batch 0",
        "layer 1 ping begins, 128 rows\ndispatch, layer 1, nano_batch ping\nstart dispatch to",
        "wait dispatch to servers, slot 0\nwait for a collective",
        "core attention, layer 2, nano_batch pong\nkernel forward: rows",
        "layer 2 pong backward begins\ndispatch backward",
        "kernel backward: rows",
        "loss\npass on",
        "start to reduce gradients of 15 weights",
        "optimizer step",
    ):
        assert event in events, event


def _other_owners() -> Iterator[None]:
    """Ranks own other tokens in decoding: answers are the same but for rounding."""
    from distca.schedule.serving.block_owners import BlockOwners

    owners = BlockOwners.of_new_blocks

    def turned(self: Any, each: Any, count: int, blocks: int) -> list[int]:
        ranks = sorted(self._computing)
        found = [ranks.index(rank) for rank in owners(self, each, count, blocks)]
        return [ranks[(number + 1) % len(ranks)] for number in found]

    with mock.patch.object(BlockOwners, "of_new_blocks", turned):
        yield


def _scales_scores() -> Iterator[None]:
    """Scores are too large by less than a greedy token shows."""
    from distca.inference.attention_runner import ForwardContext

    attend = ForwardContext.attend

    def scaled(self: Any, layer: int, q: Any, *args: Any) -> Any:
        return attend(self, layer, q * (1 + 1e-6), *args)

    with mock.patch.object(ForwardContext, "attend", scaled):
        yield


INFERENCE_DEFECTS: dict[str, tuple[Callable[[], Iterator[None]], set[str]]] = {
    "none": (_unchanged, set()),
    "waits at once": (_waits_at_once, {"events"}),
    "other owners": (_other_owners, {"plans", "events", "bytes"}),
    "scales scores": (_scales_scores, {"logits", "keys and values"}),
}


def record_inference_with(defects: list[str], call: tuple[Any, ...]) -> list[Any]:
    """The recordings of this rank with each of some `INFERENCE_DEFECTS`; collective."""
    recorded = []
    for defect in defects:
        with contextlib.contextmanager(INFERENCE_DEFECTS[defect][0])():
            recorded.append(call[0](*call[1:]))
    return recorded


def test_defects_of_inference_are_seen_that_tokens_do_not_show(ranks, tmp_path) -> None:
    (mix,) = (mix for mix in INFERENCE_MIXES if mix.name == "turns, CP2, experts, all-gather")
    defects, call = ["none", *INFERENCE_DEFECTS], mix.call(tmp_path)
    found = ranks.run(record_inference_with, defects, call, world_size=mix.world_size)
    first, *others = (
        json.loads(json.dumps({"versions": {}, "mixes": {"mix": each}}))
        for each in zip(*found, strict=True)
    )
    for defect, other in zip(INFERENCE_DEFECTS, others, strict=True):
        _, lines = compare(first, other)
        kinds = {line.removeprefix("mix: ").partition(" on 2 of 2 ranks: ")[0] for line in lines}
        assert "tokens" not in kinds, (defect, lines)
        assert kinds >= INFERENCE_DEFECTS[defect][1], (defect, lines)
        assert bool(kinds) == (defect != "none"), (defect, lines)
    last = first["mixes"]["mix"][0]["steps"][-2]
    assert set(last["fed"]) == {"1", "2"}

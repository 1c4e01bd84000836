"""`--distca` in a pipeline of several stages against plain Megatron in one process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from distca.schedule import SCHEDULERS
from support.models import StepsDone, train
from support.parity import NANO_BATCHES, WHOLE
from support.pipelines import DEDICATED, LAYOUTS, VARIANTS, check, documents, flags_of, plain
from support.selected import Case, alternating, of_all


def only(chosen: Sequence[Case]) -> Callable[[list[Case]], list[Case]]:
    """Chooses cases, each of which is there."""

    def choose(cases: list[Case]) -> list[Case]:
        assert set(chosen) <= set(cases)
        return list(chosen)

    return choose


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    of_all(
        [*itertools.product(LAYOUTS, (1, 5)), ("PP4", 3)],
        # All layouts but those of the tests below.
        only([("PP2", 1), ("PP4", 1), ("PP4", 3), ("PP4", 5), ("TP2-PP2", 5), ("PP2-VPP2", 1)]),
    ),
)
def test_losses_gradients_and_bytes(ranks, layout: str, micro_batches: int) -> None:
    """With fewer micro-batches than stages, and with five; two steps."""
    world_size, flags = flags_of(layout, micro_batches)
    found = ranks.run(train, flags, documents(micro_batches, 2), 2, world_size=world_size)
    check(found, plain(ranks, micro_batches), layout)


def train_a_step(ranks, layout: str, flags: Sequence[str], tied: bool = False) -> list[StepsDone]:
    """Five micro-batches, held against a plain process."""
    world_size, common = flags_of(layout, 5)
    run = [*common, *flags]
    if "VPP" in layout and "--recompute-num-layers" in run:
        # A virtual stage has one layer only.
        run[run.index("--recompute-num-layers") + 1] = "1"
    steps = 2 if "--use-distributed-optimizer" in run else 1
    found = ranks.run(train, run, documents(5, steps), steps, tied, world_size=world_size)
    check(found, plain(ranks, 5, tied), (layout, flags))
    return found


@pytest.mark.parametrize("layout", [pytest.param("PP4", marks=pytest.mark.full), "TP2-SP-PP2"])
def test_whole_micro_batches(ranks, layout: str) -> None:
    train_a_step(ranks, layout, [WHOLE])


@pytest.mark.parametrize(
    ("layout", "nano_batches"), of_all(itertools.product(DEDICATED, NANO_BATCHES), alternating)
)
def test_dedicated_servers(ranks, layout: str, nano_batches: str) -> None:
    found = train_a_step(ranks, layout, [nano_batches])
    assert [rank.serves_only for rank in found] == [False, False, True]


# What the optimizer shards is also sharded where it overlaps.
MIXED = {
    "PP2-DP2": [
        *("whole, recompute uniformly", "single-stream", "one in flight", "sequential"),
        "recompute the first",
    ],
    "PP2-VPP2-DP2": [
        *("whole", "stages apart", "three in flight", "overlap", "recompute selectively"),
        "recompute uniformly",
    ],
}


@pytest.mark.parametrize(
    ("layout", "variant"),
    of_all(
        itertools.product(MIXED, VARIANTS),
        only([(layout, variant) for layout in MIXED for variant in MIXED[layout]]),
    ),
)
def test_it_mixes(ranks, layout: str, variant: str) -> None:
    train_a_step(ranks, layout, VARIANTS[variant].split())


@pytest.mark.parametrize("nano_batches", NANO_BATCHES)
def test_server_pools(ranks, nano_batches: str) -> None:
    """A pool has the same ranks of all stages, which run micro-batches of unequal sizes."""
    train_a_step(ranks, "PP2-VPP2-DP2", ["--distca-pool-size", "1", nano_batches])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler(ranks, scheduler: str) -> None:
    """Also wlb-llm, under which ranks send messages of different sizes."""
    train_a_step(ranks, "PP2-DP2", ["--distca-scheduler", scheduler])


@pytest.mark.parametrize(
    ("layout", "nano_batches"),
    of_all(itertools.product(("PP2-DP2", "PP4", "TP2-PP2"), NANO_BATCHES), alternating),
)
def test_tied_embeddings(ranks, layout: str, nano_batches: str) -> None:
    train_a_step(ranks, layout, [nano_batches], tied=True)


def test_idle_stages_compute_tasks(ranks, tmp_path: Path) -> None:
    """On the timeline of a run: in warm-up and drain servers without tokens run kernels."""
    file = tmp_path / "trace.json"
    world_size, flags = flags_of("PP2-DP2", 5)
    flags += ["--distca-trace", str(file), "--distca-trace-iterations", "1", "2"]
    flags += ["--seq-length", "1024", "--distca-ping-pong"]
    lengths = [2048] * 10
    ranks.run(train, flags, lengths, 2, world_size=world_size)
    events = json.loads(file.read_text())["traceEvents"]
    ticks = [e for e in events if e.get("cat") == "ticks"]
    assert len(ticks) == 2 * world_size * 2 * (5 + 2 - 1)
    for phase in ("forward", "backward"):
        idle = [e for e in ticks if e["args"]["phase"] == phase and e["args"]["own_tokens"] == 0]
        assert {e["name"] for e in idle} == {f"{phase}: serve"}
        # Two ranks of a stage wait in the first tick of an iteration, and two in the last.
        assert len(idle) == 2 * 2 * 2
        assert all(e["args"]["pairs"] > 0 for e in idle)
        kernels = [
            e
            for e in events
            if e.get("cat") == "kernels"
            and e["args"]["own_tokens"] == 0
            and e["args"]["phase"] == phase
        ]
        # Two layers on each stage, two nano-batches.
        assert len(kernels) == 2 * 2 * len(idle)
        assert all(e["dur"] > 0 for e in kernels)
    # Every pair of every micro-batch is computed in a forward tick, on any server.
    pairs = sum(e["args"]["pairs"] for e in ticks if e["args"]["phase"] == "forward")
    assert pairs == 2 * sum(length * (length + 1) // 2 for length in lengths)

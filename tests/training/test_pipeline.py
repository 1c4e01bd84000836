"""`--distca` in a pipeline of several stages against plain Megatron in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distca.schedule import SCHEDULERS
from support.models import train
from support.parity import WHOLE, both_ways
from support.pipelines import DEDICATED, LAYOUTS, VARIANTS, check, documents, flags_of, plain


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [*((layout, number) for layout in LAYOUTS for number in (1, 5)), ("PP4", 3)],
)
def test_losses_gradients_and_bytes(ranks, layout: str, micro_batches: int) -> None:
    """With fewer micro-batches than stages, and with five; two steps."""
    world_size, flags = flags_of(layout, micro_batches)
    found = ranks.run(train, flags, documents(micro_batches, 2), 2, world_size=world_size)
    check(found, plain(ranks, micro_batches, 2), layout)


@pytest.mark.parametrize("layout", ["PP4", "TP2-SP-PP2", "PP2-VPP2-DP2"])
def test_whole_micro_batches(ranks, layout: str) -> None:
    world_size, flags = flags_of(layout, 5)
    flags.append(WHOLE)
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    check(found, plain(ranks, 5, 2), layout)


@both_ways
@pytest.mark.parametrize("layout", DEDICATED)
def test_dedicated_servers(ranks, layout: str, nano_batches: list[str]) -> None:
    world_size, flags = flags_of(layout, 5)
    flags += nano_batches
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    assert [rank.serves_only for rank in found] == [False, False, True]
    check(found, plain(ranks, 5, 2), layout)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["PP2-DP2", "PP2-VPP2-DP2"])
def test_it_mixes(ranks, layout: str, variant: str) -> None:
    world_size, flags = flags_of(layout, 5)
    flags += VARIANTS[variant].split()
    if "VPP" in layout and "--recompute-num-layers" in flags:
        # A virtual stage has one layer only.
        flags[flags.index("--recompute-num-layers") + 1] = "1"
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    check(found, plain(ranks, 5, 2), variant)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler(ranks, scheduler: str) -> None:
    """Also wlb-llm, under which ranks send messages of different sizes."""
    world_size, flags = flags_of("PP2-DP2", 5)
    flags = [*flags, "--distca-scheduler", scheduler]
    found = ranks.run(train, flags, documents(5, 2), 2, world_size=world_size)
    check(found, plain(ranks, 5, 2), scheduler)


@both_ways
@pytest.mark.parametrize("layout", ["PP2-DP2", "PP4", "TP2-PP2"])
def test_tied_embeddings(ranks, layout: str, nano_batches: list[str]) -> None:
    world_size, flags = flags_of(layout, 5)
    flags += nano_batches
    found = ranks.run(train, flags, documents(5, 2), 2, True, world_size=world_size)
    check(found, plain(ranks, 5, 2, tied=True), layout)


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

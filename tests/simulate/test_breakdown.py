"""Parts of an iteration's time: they add up, and each is what its cost makes."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from distca.commands.simulate_report import format_parts
from distca.simulate import Breakdown, Candidate, Workload, break_down, simulate
from distca.simulate.charges import PUBLISHED
from support.simulated_jobs import JOBS, batch

CONFIGURATIONS = (
    Candidate("tiles", 1, 2, 4, 1, 4),
    Candidate("tiles", 1, 1, 8, 1, 1, keeps_inputs=True),
    Candidate("tiles", 2, 1, 4, 1, 2, pool_size=2, ping_pong=False),
    Candidate("tiles", 1, 1, 8, 1, 2, head_parallel=2),
    Candidate("tiles", 1, 2, 4, 1, 4, pool_size=2, head_parallel=2),
    Candidate("greedy", 2, 2, 2, 1, 4),
    Candidate("wlb-llm", 1, 1, 4, 2, 4),
    Candidate("per-document-cp", 1, 1, 2, 4, 2),
    Candidate("cp-p2p", 1, 1, 1, 8, 4),
    Candidate("plain", 1, 2, 4, 1, 1),
    Candidate("hybrid-cp", 1, 1, 2, 4, 1),
    Candidate("dynamic-cp", 1, 2, 2, 2, 1),
)
"""System, TP, PP, DP, CP and micro-batches."""


def parts(candidate: Candidate, job: Workload) -> Breakdown:
    return break_down(candidate, job, batch(0))


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("candidate", CONFIGURATIONS, ids=str)
def test_parts_add_up_to_the_iteration(candidate: Candidate, job: str) -> None:
    if candidate.system == "hybrid-cp":
        pytest.importorskip("megatron.core")
        if job == "latents":
            pytest.skip("Megatron-LM's hybrid context parallelism has no latents")
    if job == "windows" and candidate.system in ("cp-p2p", "hybrid-cp", "dynamic-cp"):
        pytest.skip("rings have no windows")
    if job == "experts" and candidate.pool_size is not None:
        pytest.skip("server pools have no experts")
    found, whole = parts(candidate, JOBS[job]), simulate(candidate, JOBS[job], batch(0)).seconds
    assert found.seconds == pytest.approx(whole, rel=1e-9)
    # Packing by work changes with costs; all else can save nothing where it is free.
    least = -0.03 if candidate.system == "wlb-llm" else -1e-3
    assert all(each > least * whole for each in asdict(found).values()), found
    if job == "uncharged":
        assert found.interference == pytest.approx(0, abs=1e-12)
        assert candidate.system in ("tiles", "greedy") or abs(found.copies) < 1e-12


def test_each_part_is_what_its_cost_makes() -> None:
    """A job where nothing is charged but one cost has the other parts as before."""
    job = JOBS["uncharged"]
    candidate = Candidate("tiles", 1, 1, 8, 1, 1)
    ideal = parts(candidate, job)
    charges = job.cluster.charges

    def charged(**changed: object) -> Breakdown:
        cluster = replace(job.cluster, charges=replace(charges, **changed))  # type: ignore[arg-type]
        return parts(candidate, replace(job, cluster=cluster))

    waves, slowed = charged(half_waves=True), charged(interference=PUBLISHED.interference)
    assert waves.launches > 1.5 * ideal.launches
    assert slowed.interference > 0
    for each in (waves, slowed):
        assert (each.linear, each.attention) == (ideal.linear, ideal.attention)
    slow = replace(job.cluster, network_gb_per_s=0.5, node_gb_per_s=1.0)
    # Plans are made for these links, and move less.
    assert parts(candidate, replace(job, cluster=slow)).exchanges > 5 * ideal.exchanges
    shared = parts(Candidate("tiles", 4, 1, 2, 1, 1), job)
    assert ideal.collectives == 0 < shared.collectives


def test_bubbles_and_imbalance_are_waiting() -> None:
    """Of a pipeline with one micro-batch for each stage, and of whole documents that ranks keep."""
    job = JOBS["uncharged"]
    pipeline = parts(Candidate("plain", 1, 4, 2, 1, 2), job)
    assert pipeline.waiting > 0.35 * pipeline.seconds
    whole = parts(Candidate("plain", 2, 1, 4, 1, 1), job)
    shared = parts(Candidate("tiles", 2, 1, 4, 1, 1), job)
    assert whole.attention == shared.attention
    assert whole.waiting > 5 * shared.waiting


def test_what_is_shown_adds_up_without_negative_parts() -> None:
    """As where parts of an iteration stand for it, or a baseline packs otherwise."""
    odd = Breakdown(60.0, 4.0, 30.0, 0.5, -1.0, -3.0, 1.0, 2.0)
    shown = odd.as_shown()
    assert sum(shown.values()) == pytest.approx(odd.seconds)
    assert min(shown.values()) == 0.0
    assert (shown["linear"], shown["attention"], shown["collectives"]) == (60.0, 30.0, 0.0)
    plain = Breakdown(60.0, 4.0, 30.0, 0.5, 0.5, 2.0, 1.0, 2.0)
    assert plain.as_shown() == asdict(plain)
    lines = format_parts({"tiles": odd}).splitlines()[2:]
    printed = [float(line[48:].split()[0]) for line in lines if "%)" in line]
    assert len(printed) == len(shown)
    assert sum(printed) == pytest.approx(odd.seconds, abs=1e-2)


def test_less_for_a_percent() -> None:
    found = Breakdown(60.0, 4.0, 30.0, 0.5, 0.5, 2.0, 1.0, 2.0)
    assert found.seconds == 100.0
    assert found.less_for_a_percent() == {"collectives": 0.25, "interference": 0.5, "waiting": 0.5}

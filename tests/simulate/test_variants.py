"""Variants of configurations, and variants of these: all that a search may try can be simulated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from distca.simulate import Candidate, Workload, simulate, training_flags
from distca.simulate.space import divisions
from distca.simulate.variants import (
    with_chains,
    with_fewer_in_flight,
    with_kept_inputs,
    with_more_micro_batches,
    with_or_without_ping_pong,
    with_other_micro_batches,
    with_pools,
    with_shared_heads,
    with_slower_links,
    with_uneven_micro_batches,
    with_wide_documents,
    without_latents,
)
from support.simulated_jobs import JOBS, batch

MOST = 12


def variants(candidate: Candidate, job: Workload) -> list[Candidate]:
    of_job = (
        *(with_chains, with_pools, with_shared_heads, with_kept_inputs, with_or_without_ping_pong),
        *(with_slower_links, without_latents, with_more_micro_batches),
        *(with_other_micro_batches, with_uneven_micro_batches, with_wide_documents),
    )
    found = [each for make in of_job for each in make(candidate, job)]
    return [*found, *with_fewer_in_flight(candidate)]


@pytest.mark.parametrize("name", ["charged", "windows", "experts", "recomputed"])
def test_variants_of_variants_run(name: str) -> None:
    job = replace(JOBS[name], gpus=16)
    bases = [c for c in divisions("tiles", job, [1, 2], [1, 2]) if c.micro_batches in (2, 4)]
    twice = [two for base in bases for one in variants(base, job) for two in variants(one, job)]
    thrice = [three for two in twice[::17] for three in variants(two, job)]
    every = list(dict.fromkeys([*twice, *thrice]))
    chosen = np.random.default_rng(0).permutation(len(every))[:MOST]
    sequences = batch(0)
    for candidate in (every[number] for number in chosen):
        outcome = simulate(candidate, job, sequences)
        assert outcome.gpus == job.gpus, candidate
        assert 0 < outcome.seconds < 100, candidate
        assert training_flags(candidate, job), candidate


def test_there_are_variants_of_all_kinds() -> None:
    """What is tried together: pools with shared heads, stages with pools, and so on."""
    job = replace(JOBS["charged"], gpus=16)
    bases = divisions("tiles", job, [1, 2], [1, 2])
    every = {two for base in bases for one in variants(base, job) for two in variants(one, job)}
    kinds = {
        "pools": lambda c: c.pool_size is not None,
        "heads": lambda c: c.head_parallel > 1,
        "stages": lambda c: c.stages > 1,
        "kept": lambda c: c.keeps_inputs,
    }
    for one, other in itertools.combinations(kinds, 2):
        both = any(kinds[one](c) and kinds[other](c) for c in every)
        assert both == ({one, other} != {"stages", "kept"}), (one, other)
    assert not any(c.chain > 1 and c.pool_size is not None for c in every)

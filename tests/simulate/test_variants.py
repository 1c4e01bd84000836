"""Variants of configurations, and variants of these: all that a search may try can be simulated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from distca.simulate import Candidate, Workload, simulate, training_flags
from distca.simulate.space import divisions
from distca.simulate.variants import (
    last_resorts,
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


def test_micro_batches_may_be_smaller_than_a_sequence() -> None:
    """Few ranks may have as many as make up for their number."""
    job = replace(JOBS["charged"], sequences=4)
    for candidate, expected in (
        (Candidate("tiles", 4, 1, 2, 1, 4), [5, 6, 8, 10, 12, 15, 18, 22, 27]),
        (Candidate("tiles", 1, 1, 8, 1, 4), [5, 6, 8]),
        (Candidate("tiles", 1, 1, 8, 1, 2), []),
        (Candidate("tiles", 2, 2, 2, 1, 4), []),
    ):
        uneven = with_uneven_micro_batches(candidate, job)
        assert [each.micro_batches for each in uneven] == expected
        assert all(each.pool_size == candidate.data for each in uneven)


def test_chains_are_tried_where_nothing_fits() -> None:
    job = replace(JOBS["charged"], sequences=4)
    failed = [Candidate("tiles", 2, 2, 2, 1, 4), Candidate("tiles", 1, 1, 8, 1, 4)]
    some = last_resorts(failed, job, 0.2)
    assert {each.chain for each in some if each.stages == 2} == {1, 2}
    assert {each.chain for each in some if each.stages == 1} == {1}
    assert {each.tolerance for each in some if each.chain == 1} == {None, 0.2}
    for each in some:
        assert simulate(each, job, batch(0)).gpus == job.gpus
    pool = replace(failed[0], micro_batches=6, pool_size=1)
    uneven = last_resorts([pool], job, 0.2)
    assert {(each.pool_size, each.chain) for each in uneven} == {(2, 1)}
    for each in uneven:
        assert simulate(each, job, batch(0)).gpus == job.gpus
    peers = [replace(each, system="plain") for each in failed]
    assert {each.chain for each in last_resorts(peers, job, None)} == {1}
    # WLB-LLM's bins are no whole sequences, and in no pools.
    bins = Candidate("wlb-llm", 2, 1, 4, 1, 3)
    assert last_resorts([bins], job, None) == [bins]

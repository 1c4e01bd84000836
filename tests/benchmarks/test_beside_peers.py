"""The benchmark that looks for jobs in which a peer is faster."""

from __future__ import annotations

import math

import pytest

from benchmarks.cluster.beside_peers import NAMED, Job, drawn, page, run

FITS = {"ratio": 1.2, "low": 1.1, "high": 1.3, "batches": 4, "peer": "WLB-LLM"}
FITS |= {"configurations": ["ours", "theirs"], "fits": [True, True]}
FITS |= {"more": {"launches": 0.021, "waiting": -0.01}}
ALONE = {
    **FITS,
    "ratio": math.nan,
    "peer": "",
    "configurations": ["ours", ""],
    "fits": [True, False],
    "more": {},
}


def test_a_seed_draws_the_same_jobs() -> None:
    jobs = drawn(40, 0)
    assert len(set(jobs)) == 40
    assert drawn(40, 0) == jobs != drawn(40, 1)
    assert drawn(10, 0) == jobs[:10]
    assert len({job.model for job in jobs}) > 8
    assert {job.cluster for job in jobs} > {"dgx-h100", "dgx-a100"}
    assert all(job.sequences * job.context >= 2**19 or job.sequences == job.gpus for job in jobs)


def test_the_page_counts_what_fits_and_what_is_behind() -> None:
    jobs = NAMED[:3]
    found = {str(jobs[0]): FITS, str(jobs[1]): {**FITS, "ratio": 0.9}, str(jobs[2]): ALONE}
    text = page(jobs, found, "python x")
    assert "3 jobs. In 2 both fit in memory; DistCA alone fits in 1," in text
    assert "slower than the fastest peer in 1 of 2" in text
    assert f"geometric mean is {math.sqrt(1.2 * 0.9):.3f}, the least 0.900" in text
    rows = [line for line in text.splitlines() if line.startswith("| llama")]
    assert "0.900 (" in rows[0]
    assert rows[0].endswith("| theirs | ours |  | launches, half-filled waves +2.1% |")
    found[str(jobs[1])]["dynamic"] = 0.987
    assert "| theirs | ours | 0.987 | launches" in page(jobs, found, "python x")
    assert "1.200 (" in rows[1]
    assert "half-filled" not in rows[1]
    assert "DistCA alone fits" in rows[2]


@pytest.mark.parametrize("documents", ["fixed", "pretrain"])
def test_a_job_runs(documents: str) -> None:
    found = run(Job("llama-3.2-1b", documents, 16_384, 8, 8, more=("--batches", "2")))
    assert found["fits"] == [True, True]
    assert found["batches"] == 2
    assert 0.9 < found["low"] <= found["ratio"] <= found["high"] < 2
    assert found["dynamic"] >= 0.9
    assert all(found["configurations"])
    assert len(found["more"]) == 2

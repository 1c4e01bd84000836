"""The page of the paper's claims."""

from __future__ import annotations

import pytest

from benchmarks.cluster import claims, spread
from benchmarks.cluster.report import Options
from benchmarks.pages import RESULTS
from distca.simulate import Candidate
from distca.simulate.speed_up import SpeedUp


def test_stored_pages_are_what_the_stored_results_say() -> None:
    for name, page in (
        ("claims", claims.claims_page()),
        ("weak_scaling", claims.weak_scaling_page(claims.read("table3"))),
    ):
        assert (RESULTS / "cluster" / f"{name}.md").read_text().startswith(page + "\n")


def test_every_figure_and_table_has_a_row_and_no_row_is_empty() -> None:
    lines = [line for line in claims.claims_page().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert all(len(row) == 5 and all(row) for row in cells)
    # What has no figure of one kind on both sides has no ratio; all else is there.
    assert all("-" not in (row[1], row[2], row[4]) and "nan" not in row[2] for row in cells)
    text = "\n".join(row[0] for row in cells)
    for number in range(1, 13):
        assert f"Figure {number}" in text
    for number in range(1, 6):
        assert f"Table {number}" in text


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate("tiles", 8, 2, 4, 1, 8, tolerance=0.02, keeps_inputs=True),
        Candidate("greedy", 8, 4, 2, 1, 64, max_in_flight=4, tolerance=0.1, chain=2),
        Candidate("tiles", 2, 1, 32, 1, 4, pool_size=4, keeps_inputs=True, ping_pong=False),
        Candidate("tiles", 2, 1, 32, 1, 4, tolerance=0.05, network_divisor=2),
        Candidate("tiles", 2, 1, 32, 1, 4, may_send_latents=False),
        Candidate("wlb-llm", 8, 2, 1, 4, 16),
        Candidate("cp-a2a+p2p", 2, 1, 4, 32, 8, all_to_all=4),
    ],
)
def test_stored_configurations_are_read(candidate: Candidate) -> None:
    assert spread.parse(candidate.system, str(candidate)) == candidate


def test_what_is_no_configuration_does_not_run() -> None:
    row = {**claims.read("table3")[0], "tiles configuration": "out of memory"}
    units = dict(spread.units_of(row, Options(2, 1, "", (row["model"],), ("pretrain",))))
    assert set(units) == {"wlb-llm", f"greedy{spread.AGAIN}", f"wlb-llm-paper{spread.AGAIN}"}
    recomputed = {name: unit.case.recompute for name, unit in units.items()}
    assert recomputed == {name: "mlp" if name.endswith(spread.AGAIN) else "none" for name in units}
    sizes = "TP8 PP1 DP8, 1 micro-batch(es)"
    for more in (", 2 head groups", ", buffers of 252 MB"):
        assert spread.parse("tiles", sizes) is not None
        assert spread.parse("tiles", sizes + more) is None
    assert spread.parse("tiles", "out of memory") is None


def test_a_range_of_gains_has_the_widest_interval_and_the_batches() -> None:
    speeds = {"ours tokens/s": "2", "theirs tokens/s": "1"}
    rows = [
        {**speeds, "ours seconds": "1 1 1", "theirs seconds": "1.1 1.2 1.3"},
        {**speeds, "ours seconds": "2 2", "theirs seconds": "2.2 2.2"},
    ]
    found = claims.with_spread(rows, "ours", "theirs")
    gains = [SpeedUp.of([1, 1, 1], [1.1, 1.2, 1.3]), SpeedUp.of([2, 2], [2.2, 2.2])]
    widest = max(gain.high - gain.mean for gain in gains)
    assert found == f"1.10 to 1.20 (each ± at most {widest:.3f}, 2 to 3 batches)"
    # A job in which one of both is out of memory is left out.
    missing = {**rows[0], "ours tokens/s": "nan"}
    assert claims.with_spread([missing, rows[1]], "ours", "theirs").endswith("2 batches)")

"""Runs that are killed at random moments of starting, of steps and of saving, and gone on with.

Whatever is killed, the job ends, no process is left, the latest checkpoint is whole, and losses are
those of the run that nobody killed. With `--full` thirty kills, of all kinds of jobs together; else
three, where every rank is a server.
"""

from __future__ import annotations

import pytest

from support.pretraining import LOSS, run
from support.storm import Storm, draw_kills
from support.whole_runs import write_documents

LAST = 10
SHARDED = "--use-distributed-optimizer"
KINDS = {
    "in place": (2, [SHARDED]),
    "dedicated servers": (
        3,
        [SHARDED, "--distca-servers", "dedicated:1", "--no-distca-ping-pong"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_goes_on_wherever_it_is_killed(kind, tmp_path, full) -> None:
    processes, flags = KINDS[kind]
    if not full and kind != "in place":
        pytest.skip("--full storms every kind of job")
    corpus = write_documents(tmp_path / "documents", [100, 700, 20, 256] * 40)
    common = ["--distca", "--train-iters", str(LAST), *flags]
    _, output = run(processes, corpus, *common)
    reference = dict(LOSS.findall(output))
    assert sorted(map(int, reference)) == list(range(1, LAST + 1))
    storm = Storm(processes, corpus, common, tmp_path / "checkpoints")
    kills = draw_kills(seed=21, count=15 if full else 3)
    for kill in kills:
        storm.run(kill)
        if (storm.save / f"iter_{LAST:07d}").exists():
            storm.go_back_to(2)
    storm.run(None)
    print(f"{kind}: {len(kills)} kills; seconds to the launcher's end {rounded(storm.ends)}, ")
    print(f"from there to the last process's {rounded(storm.lasting)}")
    # The launcher waits for half a minute, then kills a rank that hangs.
    assert not any("forcefully exiting" in printed for printed in storm.printed)
    assert max(storm.ends) < 60
    compared = 0
    for losses in storm.losses():
        # Megatron-LM's second line of a run is the mean of two iterations.
        for iteration, loss in losses[:1] + losses[2:]:
            assert loss == reference[str(iteration)] or iteration == 2, iteration
            compared += 1
    assert compared >= LAST - 2


def rounded(seconds: list[float]) -> list[float]:
    return [round(each, 1) for each in seconds]

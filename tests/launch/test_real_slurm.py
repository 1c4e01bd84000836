"""The Slurm scripts under a real Slurm: two nodes on this machine, each with one rank."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from distca.plan import load_plan
from support.launches import ROOT, TINY
from support.real_slurm import Cluster, cluster, missing

ITERATION = re.compile(r"iteration +(\d+)/.*? lm loss: (\S+) \|")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with cluster(2) as made:
        yield made


class Submitted:
    """A job of two ranks that trains by `pretrain_3d.sh`.

    Args:
        slurm: cluster that it runs on.
        folder: folder of its data, checkpoints and logs.
        flags: flags of Megatron-LM's.
    """

    def __init__(self, slurm: Cluster, folder: Path, *flags: str) -> None:
        from distca.commands.prepare import main

        self.slurm, self.folder, self.save = slurm, folder, folder / "save"
        given = ["--input", str(ROOT / "distca" / "plan"), "--tokenizer-type", "ByteLevelTokenizer"]
        assert main([*given, "--output-prefix", str(folder / "corpus")]) == 0
        own = ["--python", sys.executable, "--interface", "lo", "--logs", str(folder / "logs")]
        of_slurm = "--parsable --nodes 2 --ntasks-per-node 1 --gpus-per-node 1".split()
        of_slurm += ["--chdir", str(ROOT), "--output", str(folder / "job.out")]
        command = ["sbatch", *of_slurm, str(ROOT / "launch" / "slurm" / "pretrain_3d.sh")]
        data = ["--data-path", str(folder / "corpus"), "--save", str(self.save)]
        self.number = slurm.run(*command, *own, *TINY, *data, *flags).strip()

    @property
    def output(self) -> str:
        path = self.folder / "job.out"
        return path.read_text() if path.exists() else ""

    def wait_for_iteration(self, number: int) -> None:
        self.slurm.wait_for(
            lambda: (self.save / f"iter_{number:07}" / "metadata.json").exists(), 240
        )

    def wait_for_state(self, *states: str) -> None:
        self.slurm.wait_for(lambda: self.slurm.job(self.number)["JobState"] in states, 480)


def test_nodes_that_failed_are_found_by_their_states(slurm: Cluster) -> None:
    def found() -> str:
        done = subprocess.run(
            ["bash", "-ec", "source launch/slurm/common.sh; bad_nodes"],
            cwd=ROOT,
            env=slurm.env | {"SLURM_JOB_NODELIST": "127.0.0.[1-2]"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    def set_state(state: str) -> None:
        node = ["nodename=127.0.0.2", f"state={state}", "reason=test"]
        slurm.run("scontrol", "update", *node)

    assert found() == ""
    for state in ("drain", "fail", "down"):
        set_state(state)
        assert found() == "127.0.0.2"
        set_state("resume")
        slurm.wait_for(lambda: slurm.states()["127.0.0.2"] == "idle", 30)


@pytest.mark.full
def test_a_job_that_slurm_warns_saves_and_queues_itself_again(
    slurm: Cluster, tmp_path: Path
) -> None:
    """As ten minutes before a time limit: SIGTERM to all ranks."""
    job = Submitted(slurm, tmp_path, *"--train-iters 100000 --save-interval 100000".split())
    slurm.wait_for(lambda: len(ITERATION.findall(job.output)) > 3, 240)
    slurm.run("scancel", "--signal=TERM", job.number)
    slurm.wait_for(lambda: slurm.job(job.number).get("Restarts") == "1", 240)
    (saved,) = re.findall(r"^at iteration (\d+) of 100000: queued again$", job.output, re.M)
    reached = [int(number) for number, _ in ITERATION.findall(job.output)]
    assert int(saved) == reached[-1] > 3
    slurm.wait_for(lambda: int(ITERATION.findall(job.output)[-1][0]) >= int(saved) + 2, 240)
    numbers = [int(number) for number, _ in ITERATION.findall(job.output)]
    assert numbers[: int(saved) + 2] == [*range(1, int(saved) + 3)]
    slurm.run("scancel", job.number)


@pytest.mark.full
def test_a_dedicated_server_computes_for_the_node_of_the_model(
    slurm: Cluster, tmp_path: Path
) -> None:
    train = "--train-iters 6 --save-interval 6 --seq-length 1024 --max-position-embeddings 1024"
    train += " --distca-max-document-length 1024"
    train += f" --tensorboard-dir {tmp_path / 'boards'} --distca-servers dedicated:1"
    job = Submitted(slurm, tmp_path, *train.split())
    job.wait_for_state("COMPLETED", "FAILED")
    assert slurm.job(job.number)["JobState"] == "COMPLETED", job.output
    losses = [float(loss) for _, loss in ITERATION.findall(job.output)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] < 6
    plan, _ = load_plan(tmp_path / "boards" / "first_plan.json")
    assert plan.world_size == 2
    assert plan.placement.tokens_per_rank().tolist() == [512, 0]
    assert (plan.loads() > 0).all()


def test_a_job_goes_on_after_a_node_failed(slurm: Cluster, tmp_path: Path) -> None:
    """A node is killed while it trains, and comes back: the job is queued again, and goes on from
    its last checkpoint to its end."""
    job = Submitted(slurm, tmp_path, *"--train-iters 400 --save-interval 10".split())
    job.wait_for_iteration(10)
    slurm.kill_node("127.0.0.2")
    job.wait_for_state("PENDING", "CONFIGURING")
    reached = int((job.save / "latest_checkpointed_iteration.txt").read_text())
    assert 10 <= reached < 400
    slurm.start_node("127.0.0.2")
    job.wait_for_state("RUNNING")
    job.wait_for_iteration(reached + 10)
    assert slurm.job(job.number)["Restarts"] == "1"
    losses = [int(number) for number, _ in ITERATION.findall(job.output)]
    # Lines after the checkpoint that went on are printed twice, if there were any.
    assert losses[0] == 1
    assert all(b == a + 1 or b == reached + 1 for a, b in pairwise(losses))
    assert losses[-1] >= reached + 10
    slurm.run("scancel", job.number)
    for rank in range(2):
        log = (tmp_path / "logs" / job.number / f"rank-{rank}.log").read_text()
        assert log
    assert ITERATION.findall(log) == ITERATION.findall(job.output)

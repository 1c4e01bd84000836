"""Jobs of Slurm: what ranks find, where their output goes, and what follows a failure."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.launches import ROOT, launch, slurm_environment


class Job:
    """A job of two ranks, for which a shell script stands in.

    Args:
        folder: folder of all that it reads and writes.
        script: what a rank does.
        check: what the check before ranks start does.
    """

    def __init__(self, folder: Path, script: str, check: str = "true") -> None:
        self.folder, self.save = folder, folder / "save"
        self.save.mkdir()
        self.env = slurm_environment(folder / "bin")
        self.program("rank", f"case $* in *check_run*) {check}; exit ;; esac\n{script}")

    def program(self, name: str, script: str) -> Path:
        """Makes a program that the job finds by its name."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)
        return path

    def run(self, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs the job's script to its end."""
        own = ["--python", str(self.folder / "bin" / "rank"), "--save", str(self.save)]
        own += ["--logs", str(self.folder / "logs"), "--train-iters", "9"]
        own += ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
        return launch("slurm/pretrain_3d.sh", *own, *flags, env=self.env | env)


def test_a_prolog_sets_what_ranks_find(tmp_path: Path) -> None:
    job = Job(tmp_path, 'echo "$MODULE, $NCCL_DEBUG"')
    prolog = tmp_path / "prolog.sh"
    # Modules' own scripts read what is not set.
    prolog.write_text('export MODULE="cuda$UNSET"')
    done = job.run("--prolog", str(prolog))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["cuda, WARN"] * 2
    prolog.write_text("export MODULE=cuda NCCL_DEBUG=INFO")
    assert job.run("--prolog", str(prolog)).stdout.splitlines() == ["cuda, INFO"] * 2
    printed = job.run("--dry-run", "--prolog", str(prolog)).stdout.splitlines()
    assert shlex.split(printed[0]) == ["source", str(prolog)]
    assert "NCCL_DEBUG=INFO" in printed[1]


def test_a_prolog_that_fails_ends_the_job_before_any_rank_starts(tmp_path: Path) -> None:
    job = Job(tmp_path, "echo started")
    prolog = tmp_path / "prolog.sh"
    prolog.write_text("false")
    done = job.run("--prolog", str(prolog))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: --prolog {prolog} ended with status 1\n"
    done = job.run("--prolog", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --prolog nowhere: there is no such file\n"


def test_flags_are_checked_once_before_ranks_start(tmp_path: Path) -> None:
    """A job of two ranks; srun says of a task that it failed."""
    given = 'echo "$*" >"$GIVEN"; echo "error: --lr is wrong" >&2; echo "srun: error: x" >&2'
    job = Job(tmp_path, "echo started", f'{given}; exit "$STATUS"')
    file = tmp_path / "given"
    done = job.run("--lr", "0", GIVEN=str(file), STATUS="2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: --lr is wrong\n")
    start, _, flags = file.read_text().partition(" -- ")
    assert start == "-m megatron_patches.check_run --ranks 2"
    assert flags.rstrip().endswith(" --lr 0")
    assert "--distca " in flags
    # The check itself failed, or there is nothing wrong.
    for status in "1", "0":
        done = job.run(GIVEN=str(file), STATUS=status)
        assert (done.returncode, done.stdout) == (0, "started\n" * 2)


def test_the_check_finds_a_flag_that_is_wrong(tmp_path: Path) -> None:
    """The real one, with the job's own flags."""
    job = Job(tmp_path, "echo started", f'exec {sys.executable} "$@"')
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--data-path", "nowhere"]
    done = job.run(*flags)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")


def test_a_benchmark_s_flags_are_checked_once_too(tmp_path: Path) -> None:
    check = f'case $* in *--only-check*) exec {sys.executable} "$@" ;; esac\necho started'
    job = Job(tmp_path, check)
    own = ["--python", str(tmp_path / "bin" / "rank"), "--logs", str(tmp_path / "logs")]
    own += ["--num-layers", "2", "--tensor-model-parallel-size"]
    done = launch("slurm/throughput.sh", *own, "3", env=job.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 2 processes are not a multiple of tensor x pipeline size")
    assert len(done.stderr.splitlines()) == 1
    done = launch("slurm/throughput.sh", *own, "1", env=job.env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n" * 2, "")


def test_each_rank_s_output_is_in_a_file_and_in_the_job_s(tmp_path: Path) -> None:
    job = Job(tmp_path, 'echo "out $RANK of $WORLD_SIZE"; echo "error $RANK" >&2; exit 5')
    done = job.run()
    assert done.returncode == 5
    assert sorted(done.stdout.splitlines()) == [
        *("error 0", "error 1", "out 0 of 2", "out 1 of 2"),
    ]
    for rank in range(2):
        log = tmp_path / "logs" / "17" / f"rank-{rank}.log"
        assert sorted(log.read_text().splitlines()) == [f"error {rank}", f"out {rank} of 2"]


def test_a_rank_saves_on_a_signal_to_all_its_processes_and_its_last_line_is_kept(tmp_path) -> None:
    saves = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    saves += "import time\ntry:\n print('trains', flush=True)\n while True: time.sleep(0.1)\n"
    saves += "finally: print('saved')"
    env = os.environ | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"}
    command = [str(ROOT / "launch/slurm/rank.sh"), str(tmp_path), sys.executable, "-c", saves]
    rank = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "trains\n"
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.communicate(timeout=60) == ("saved\n", None)
    assert rank.returncode == 3
    assert (tmp_path / "rank-1.log").read_text() == "trains\nsaved\n"


def test_a_job_whose_node_failed_starts_again_a_few_times(tmp_path: Path) -> None:
    job = Job(tmp_path, '[ -z "$REACHES" ] || echo "$REACHES" >"$TRACKER"; exit 1')
    tracker = {"TRACKER": str(job.save / "latest_checkpointed_iteration.txt")}
    # A mistake of the user's, on nodes that are well.
    job.program("sinfo", "echo node3 allocated; echo node7 mixed")
    done = job.run("--retries", "2", REACHES="", **tracker)
    assert (done.returncode, done.stdout) == (1, "")
    job.program(
        "sinfo", 'echo "node7  down*"; echo "node3 idle*"; echo "node7  down*"; echo "n5 idle"'
    )
    requeued = (0, "nodes node3,node7 failed: queued again\nscontrol requeue 17\n")
    # The start before was the first at iteration 0. A checkpoint begins the count anew.
    for reaches in ("", "4", "", "", ""):
        done = job.run("--retries", "2", REACHES=reaches, **tracker)
        assert (done.returncode, done.stdout) == requeued
    done = job.run("--retries", "2", REACHES="", **tracker)
    assert (done.returncode, done.stdout) == (2, "")
    assert "3 starts in turn added no checkpoint to iteration 4" in done.stderr


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({"SLURM_JOB_NUM_NODES": "3"}, 24),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "4"}, 12),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS": "16"}, 16),
        ({}, 32),
    ],
)
def test_ranks_are_those_of_the_job(variables: dict[str, str], ranks: int) -> None:
    flags = ["--dry-run", "--save", "s", "--tensor-model-parallel-size", "2"]
    done = launch("slurm/pretrain_3d.sh", *flags, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert f"--ntasks={ranks}" in words
    assert words[words.index("--global-batch-size") + 1] == str(ranks)


def test_dedicated_servers_are_no_data_parallel_ranks() -> None:
    flags = ["--dry-run", "--save", "s", "--tensor-model-parallel-size", "2"]
    flags += ["--pipeline-model-parallel-size", "1"]
    nodes = os.environ | {"SLURM_JOB_NUM_NODES": "1"}
    done = launch("slurm/pretrain_3d.sh", *flags, "--distca-servers=dedicated:2", env=nodes)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert "--ntasks=8" in words
    assert words[words.index("--global-batch-size") + 1] == "3"
    for number, why in (("8", "leaves none of 8"), ("3", "5 ranks are no"), ("many", "many")):
        servers = ["--distca-servers", f"dedicated:{number}"]
        done = launch("slurm/pretrain_3d.sh", *flags, *servers, env=nodes)
        assert done.returncode == 2
        assert why in done.stderr


def test_data_that_is_there_is_named_whole(tmp_path: Path) -> None:
    (tmp_path / "a.idx").touch()
    relative = os.path.relpath(tmp_path / "a", ROOT)
    flags = ["--data-path", "0.3", relative, "0.7", "missing", "--tokenizer-model", relative]
    done = launch("slurm/pretrain_3d.sh", "--dry-run", "--save", "s", *flags)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    place = words.index("--data-path")
    assert words[place + 1 : place + 5] == ["0.3", str(tmp_path / "a"), "0.7", "missing"]
    assert words[words.index("--tokenizer-model") + 1] == relative


@pytest.mark.parametrize("retries", ["-1", "many", "01"])
def test_retries_are_a_number(retries: str) -> None:
    done = launch("slurm/pretrain_4d.sh", "--dry-run", "--save", "s", "--retries", retries)
    assert done.returncode == 2
    assert done.stderr == f"error: --retries {retries}: give a number of at least 0\n"

"""What the launch scripts refuse, by name and before anything starts, and what they explain."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from support.launches import ROOT, launch, pretrain_flags


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("slurm/pretrain_3d.sh", ["--dry-run"], "give --save DIRECTORY"),
        ("slurm/pretrain_3d.sh", ["--save", "s"], "start it with sbatch"),
        ("slurm/benchmark.sh", ["--dry-run", "--mounts", "a:b"], "--mounts needs --container"),
        (
            "slurm/pretrain_4d.sh",
            ["--dry-run", "--save", "s", "--pipeline-model-parallel-size", "3"],
            "64 ranks are not a multiple of tensor x pipeline size, 8 x 3",
        ),
        (
            "slurm/pretrain_4d.sh",
            ["--dry-run", "--save", "s", "--nodes", "4"],
            "--nodes is a flag of sbatch: give it before the script's name",
        ),
        ("local.sh", ["--dry-run", "--model", "gpt"], "no --model gpt"),
        ("local.sh", ["--port"], "--port needs a value"),
        ("local.sh", ["--processes", "0"], "--processes 0: give a number of at least 1"),
        ("local.sh", ["--dry-run", "--port", "http"], "--port http: give a number"),
        (
            "local.sh",
            ["--dry-run", "--proceses=2"],
            "there is no --proceses (is --processes meant?): --help lists",
        ),
        # Another launcher's.
        ("local.sh", ["--dry-run", "--container=x"], "there is no --container: --help lists"),
        ("local.sh", ["train", "--dry-run"], "train belongs to no flag"),
        ("local.sh", ["--python", "no/python"], "no no/python: launch/setup.sh makes .venv"),
        ("demo.sh", ["--dryrun"], "there is no --dryrun (is --dry-run meant?): --help lists"),
        ("setup.sh", ["--help-me"], "takes no --help-me: give nothing, tests, checks"),
        ("setup.sh", ["megatron"], "'' is no version of megatron-core: give one such as 0."),
        (
            "setup.sh",
            ["python"],
            "'' is no version of Python that DistCA is tested with: give 3.11",
        ),
        ("test.sh", ["--megatron", "new"], "'new' is no version of megatron-core"),
        (
            "test.sh",
            ["--python", "2.7"],
            "'2.7' is no version of Python that DistCA is tested with",
        ),
        (
            "slurm/throughput.sh",
            ["--dry-run", "--pipeline-model-parallel-size", "two"],
            "--pipeline-model-parallel-size two: give a number",
        ),
        (
            "slurm/pretrain_3d.sh",
            ["--dry-run", "--save", "s", "--tensor-model-parallel-size", "08"],
            "--tensor-model-parallel-size 08: give a number",
        ),
        (
            "slurm/pretrain_3d.sh",
            ["--dry-run", "--save", "s", "--train-iters", "1e4"],
            "--train-iters 1e4: give a number",
        ),
    ],
)
def test_bad_options_are_refused(script, flags, message) -> None:
    # Without a Python nothing is set up, should one of them not be refused.
    done = launch(script, *flags, env=os.environ | {"PYTHON": "no-python"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"])
def test_variables_of_slurm_are_numbers(name: str) -> None:
    env = os.environ | {name: "8(x4)"}
    done = launch("slurm/pretrain_3d.sh", "--dry-run", "--save", "s", env=env)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {name} 8(x4): give a number of at least 1\n",
    )


def test_the_launchers_know_the_flags_of_training() -> None:
    """All of them, whatever comes after."""
    from megatron_patches.parts import build_parser

    flags = [*build_parser()._option_string_actions, "--lr=1"]
    flags = [flag for flag in flags if flag not in ("-h", "--help")]
    done = launch("local.sh", "--dry-run", *flags)
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout)[-len(flags) :] == flags


def test_a_launcher_explains_itself_from_any_folder() -> None:
    for script in ("local.sh", "demo.sh"):
        command = ["bash", script, "--help"]
        done = subprocess.run(
            command, cwd=ROOT / "launch", capture_output=True, text=True, timeout=60, check=True
        )
        assert "--dry-run" in done.stdout
        assert "set -euo" not in done.stdout


def test_help_of_the_checks_sets_nothing_up() -> None:
    done = launch("test.sh", "--help", env=os.environ | {"PYTHON": "no-python"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "With arguments pytest alone runs" in done.stdout
    assert "set -euo" not in done.stdout


def test_the_demo_prints_its_commands() -> None:
    done = launch("demo.sh", "--dry-run", "--train-iters", "20")
    assert done.returncode == 0, done.stderr
    distca, plain = map(pretrain_flags, done.stdout.splitlines())
    assert "--distca" in distca
    assert "--distca" not in plain
    assert all(flags.count("--train-iters") == 2 for flags in (distca, plain))

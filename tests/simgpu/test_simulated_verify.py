"""`distca verify` on simulated GPUs: status 0, or 1 and the right line where one is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from support.simgpu.machine import Machine, built_or_skip

CAPACITY = 1_200_000_000
# Training has its own tests: Megatron-LM starts processes, in minutes.
STAGES = "environment links kernels transports answers overlap costs memory serving".split()
ALONE = {"transports", "overlap"}
"""Stages that need two ranks."""
SAYS = {
    "a_kernel_ignores_its_window": "GQA, windows: outputs are",
    "gradients_are_halved": "GQA, odd sizes: dk are",
    "heads_are_regrouped_where_a_line_has_no_query": "FlashAttention: shape '[3, 2, 4, 128]'",
    "a_graph_replays_stale_inputs": "llama, CUDA graphs, on 1 rank(s): check: bfloat16 logits",
    "a_pool_is_larger_than_the_memory": "not enough memory: CUDA out of memory",
    "a_stage_does_not_end": "it did not end in 0.2 s",
}


def verify(machine: Machine, *flags: str) -> subprocess.CompletedProcess[str]:
    built_or_skip()
    return machine.run([sys.executable, "-m", "distca", "verify", *flags], seconds=900)


@pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
def test_a_machine_that_works_ends_with_0(devices: int) -> None:
    ran = verify(Machine(devices, CAPACITY), "--json", "--stages", *STAGES)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    assert report["failed"] is None
    assert not report["not_reached"]
    states = {line["stage"]: line["state"] for line in report["stages"]}
    alone = ALONE if devices == 1 else set()
    assert states == {name: "not run" if name in alone else "ok" for name in STAGES}


def trained(devices: int) -> subprocess.CompletedProcess[str]:
    return verify(Machine(devices, CAPACITY), "--json", "--stages", "training")


@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_training_ends_with_0(devices: int) -> None:
    """With what Megatron needs where Transformer Engine and apex are missing."""
    ran = trained(devices)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [line] = json.loads(ran.stdout)["stages"]
    assert line["state"] == "ok", line
    assert line["figures"]["losses_apart"] < 0.001, line


def test_too_little_memory_is_said_at_once() -> None:
    ran = verify(Machine(1, 500_000_000), "--stages", "environment", "kernels")
    assert ran.returncode == 1, ran.stderr
    first, cure, last = ran.stdout.splitlines()
    assert first.startswith("failed   environment")
    assert "has 0.5 GB free of 0.5, and 1.1 are needed" in first
    assert "nvidia-smi" in cure
    assert last == "environment failed; not run: kernels"


@pytest.fixture(scope="module")
def lines() -> dict[str, Any]:
    """The line of each fault's stage; all are put in in one process."""
    built_or_skip()
    command = [sys.executable, "-m", "support.verify_faults"]
    ran = Machine(1, CAPACITY).run(command, seconds=600)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("name", SAYS)
def test_a_fault_fails_its_stage(lines: dict[str, Any], name: str) -> None:
    line = lines[name]
    assert line["state"] == "failed", line
    assert SAYS[name] in line["text"]
    assert line["cure"]

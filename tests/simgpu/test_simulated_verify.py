"""`distca verify` on simulated GPUs: status 0, or 1 and the right line where one is broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from distca.commands.verify.overlap import MARGINS
from support.simgpu.machine import Machine, built_or_skip
from support.verify_faults import FAULTS

# When transformers makes room for weights it leaves 1.2 GiB of a GPU, and fails if it has less.
CAPACITY = 1_600_000_000
# Training has its own tests: Megatron-LM starts processes, in minutes.
STAGES = "environment links kernels transports answers overlap costs memory serving".split()
ALONE = {"transports", "overlap"}
"""Stages that need two ranks."""
SAYS = {
    "another_process_has_the_memory": "has 0.5 GB free of 80.0, and 1.1 are needed",
    "a_kernel_ignores_its_window": "GQA, windows: outputs are",
    "gradients_are_halved": "GQA, odd sizes: dk are",
    "heads_are_regrouped_where_a_line_has_no_query": "FlashAttention: shape '[3, 2, 4, 128]'",
    "a_graph_replays_stale_inputs": "llama, CUDA graphs, on 1 rank(s): check: bfloat16 logits",
    "a_pool_is_larger_than_the_memory": "not enough memory: CUDA out of memory",
    "a_stage_does_not_end": "it did not end in 0.2 s",
    "keys_have_no_gradients_in_training": "gradients' norms are ",
}
"""What the command says of faults that it finds with one GPU."""
SAYS_OF_RANKS = {
    "a_rank_has_another_version": "rank 1 has distca",
    "a_rank_is_killed": "rank 1: its process ended with exit code -9: it was killed",
    "a_byte_is_lost": "rank 1: NCCL with all ranks: ",
    "a_dead_peer_is_waited_for": "a rank waits for 0.5 s and longer for a peer that died",
    "partial_results_are_merged_without_weights": "llama, eager, on 2 rank(s): check: bfloat16",
}
"""And with two."""
IN_CI = ("a_rank_is_killed", "a_byte_is_lost", "partial_results_are_merged_without_weights")
"""The others of two GPUs run on CPUs, in `tests/commands/test_verify.py`, too."""


def verify(machine: Machine, *flags: str) -> subprocess.CompletedProcess[str]:
    built_or_skip()
    return machine.run([sys.executable, "-m", "distca", "verify", *flags], seconds=900)


@pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
def test_a_machine_that_works_ends_with_0(devices: int) -> None:
    """Two GPUs have all packages of kernels: each is tried, and FlashAttention 3 is used."""
    packages = ("flash-attn-3", "flash-attn-4") if devices == 2 else ()
    ran = verify(Machine(devices, CAPACITY, packages), "--json", "--stages", *STAGES)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    assert report["failed"] is None
    assert not report["not_reached"]
    states = {line["stage"]: line["state"] for line in report["stages"]}
    alone = ALONE if devices == 1 else set()
    assert states == {name: "not run" if name in alone else "ok" for name in STAGES}
    figures = {line["stage"]: line["figures"] for line in report["stages"]}
    tried = {name.removeprefix("error of FlashAttention ")[0] for name in figures["kernels"]}
    assert tried == ({"2", "3", "4"} if packages else {"2"})
    if packages:
        assert figures["overlap"]["sm_margin"] in MARGINS


@pytest.mark.full
def test_a_margin_is_found_for_version_3() -> None:
    built_or_skip()
    command = [sys.executable, "-m", "distca", "tune", "overlap"]
    ran = Machine(2, CAPACITY, ("flash-attn-3",)).run(command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    times, flag = ran.stdout.splitlines()
    margin = re.search(r"; (\d+) multiprocessors left free, with none both take", times)
    assert margin is not None, times
    assert int(margin[1]) in MARGINS
    assert flag == f"--distca-sm-margin {margin[1]}"


def trained(devices: int) -> subprocess.CompletedProcess[str]:
    return verify(Machine(devices, CAPACITY), "--json", "--stages", "training")


@pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
def test_training_ends_with_0(devices: int) -> None:
    """With what Megatron needs where Transformer Engine and apex are missing."""
    ran = trained(devices)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [line] = json.loads(ran.stdout)["stages"]
    assert line["state"] == "ok", line
    assert line["figures"]["losses_apart"] < 0.001, line


def fails_with(status: int, printed: str, stage: str, text: str) -> None:
    """Fails unless the command ended with 1, the stage's line and what to do."""
    assert status == 1, printed
    first, cure, last = printed.splitlines()
    assert first.split()[:2] == ["failed", stage]
    assert text in first
    assert cure.strip()
    assert last == f"{stage} failed"


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[int, str]]:
    """Status and output of the command with each fault of one GPU; all run in one process."""
    built_or_skip()
    command = [sys.executable, "-m", "support.verify_faults"]
    ran = Machine(1, CAPACITY).run(command, seconds=900)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, tuple[int, str]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("name", SAYS)
def test_a_fault_fails_its_stage(said: dict[str, tuple[int, str]], name: str) -> None:
    fails_with(*said[name], FAULTS[name].stage, SAYS[name])


@pytest.fixture(scope="module")
def said_of_ranks(full: bool) -> dict[str, tuple[int, str] | str]:
    """Status and output of the command with each fault of two GPUs; all are forks of a process."""
    built_or_skip()
    names = SAYS_OF_RANKS if full else IN_CI
    command = [sys.executable, "-m", "support.verify_faults", *names]
    ran = Machine(2, CAPACITY).run(command, seconds=1500)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, tuple[int, str] | str] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.full) for name in SAYS_OF_RANKS],
)
def test_a_fault_of_two_gpus_fails_its_stage(
    said_of_ranks: dict[str, tuple[int, str] | str], name: str
) -> None:
    found = said_of_ranks[name]
    assert not isinstance(found, str), found
    fails_with(*found, FAULTS[name].stage, SAYS_OF_RANKS[name])


def test_all_faults_are_tried() -> None:
    assert FAULTS.keys() == SAYS.keys() | SAYS_OF_RANKS.keys()

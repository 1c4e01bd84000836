"""The CPUs that a rank stays on, on machines that are made up."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from megatron_patches.loop.near_gpu import stay_near_gpu

ALL = set(range(16))


def sysfs(folder, node: str):
    """A machine of two nodes, with a GPU on one of them."""
    device = folder / "bus/pci/devices/0001:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    for number, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        of_node = folder / f"devices/system/node/node{number}"
        of_node.mkdir(parents=True)
        (of_node / "cpulist").write_text(f"{cpus}\n")
    return folder


@pytest.mark.parametrize(
    ("node", "allowed", "of_parent", "expected"),
    [
        pytest.param("1", ALL, ALL, {4, 5, 6, 7, 12, 13, 14, 15}, id="binds to the node"),
        pytest.param("0", set(range(6)), set(range(6)), {0, 1, 2, 3}, id="within a container"),
        pytest.param("1", set(range(4)), set(range(4)), None, id="none of the node is allowed"),
        pytest.param("1", set(range(8)), ALL, None, id="bound by torchrun or Slurm"),
        pytest.param("-1", ALL, ALL, None, id="no node told"),
        pytest.param("nothing", ALL, ALL, None, id="nothing told"),
        pytest.param("1", {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}, None, id="one CPU of the node"),
        pytest.param("1", {4}, {4}, None, id="one CPU"),
    ],
)
def test_a_rank_stays_on_its_gpus_node(
    tmp_path, monkeypatch, caplog, node, allowed, of_parent, expected
) -> None:
    me, other, own = (100 + number for number in range(3))
    masks = {0: allowed, me: allowed, other: allowed, own: {5}, os.getppid(): of_parent}
    monkeypatch.setattr(os, "listdir", lambda folder: [str(me), str(other), str(own), "103"])

    def affinity(thread: int) -> set[int]:
        if thread not in masks:
            raise ProcessLookupError
        return masks[thread]

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(os, "sched_setaffinity", masks.__setitem__)
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {2: gpu}.__getitem__)
    with caplog.at_level(logging.INFO):
        stay_near_gpu(2, sysfs(tmp_path, node))
    assert masks[me] == masks[other] == (expected or allowed)
    assert masks[own] == {5}
    assert ("NUMA node" in caplog.text) == (expected is not None)
    assert ("one CPU alone" in caplog.text) == (len(allowed) == 1)

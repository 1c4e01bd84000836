"""`distca doctor`: versions, and the loop of Megatron-LM."""

from __future__ import annotations

import importlib.util
import platform

import pytest
import torch

from distca.commands import doctor


def finding(name: str) -> doctor.Finding:
    return next(each for each in doctor.examine() if each.name == name)


@pytest.mark.parametrize(
    ("version", "state", "says"),
    [
        ("0.17.1", "ok", ""),
        ("0.19.2", "ok", ""),
        ("0.20.0", "ok", "tried so far: 0.17.1 to 0.19.2"),
        ("0.16.0", "problem", "pip install"),
        (None, "missing", "pip install"),
    ],
)
def test_versions_of_megatron_core(monkeypatch, version, state, says) -> None:
    monkeypatch.setattr(
        doctor, "_version", lambda package: version if package == "megatron-core" else "1.0"
    )
    found = finding("megatron-core")
    assert found.state == state
    assert says in found.cure
    assert bool(says) == bool(found.cure)


def test_python_and_torch_beyond_those_tried_are_named(monkeypatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.14.1")
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    assert finding("Python").cure == "tried so far: 3.11 to 3.13"
    assert finding("torch").cure == "tried so far: 2.13 to 2.15"
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    assert finding("torch").cure == ""


@pytest.mark.parametrize("there", [True, False])
def test_the_loop_of_megatron_lm(monkeypatch, there) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (there or None) if name == "megatron.training" else found(name),
    )
    loop = finding("Megatron-LM's loop")
    assert loop.state == ("ok" if there else "missing")
    assert ("Python 3.12" in loop.cure) is not there


@pytest.mark.parametrize(
    ("cards", "parameters", "nvshmem", "state", "says"),
    [
        ("mlx5_0 mlx5_1", 'RegistryDwords: "PeerMappingOverride=1;"', "3.3.9", "ok", "(IBGDA), by"),
        ("mlx5_0", 'RegistryDwords: ""', "3.4.5", "ok", "by mlx5_0, which the host then rings"),
        ("mlx5_0", None, "3.3.20", "missing", "a thread of the host would"),
        ("efa_0", None, "3.8.0", "missing", "no ConnectX network card"),
        ("", None, "3.8.0", "missing", "no ConnectX network card"),
    ],
)
def test_who_starts_transfers_between_machines(
    tmp_path, cards, parameters, nvshmem, state, says
) -> None:
    for card in cards.split():
        (tmp_path / "sys/class/infiniband" / card).mkdir(parents=True)
    if parameters is not None:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/params").write_text(parameters)
    found = doctor._transfers_between_machines(nvshmem, tmp_path)
    assert found.state == state
    assert says in found.found
    assert ("PeerMappingOverride" in found.cure) == (cards == "mlx5_0")

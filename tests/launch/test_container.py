"""The container file: its steps as far as they can be checked without Docker and a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from support.launches import ROOT

PINS = ROOT / "launch" / "container-pins.txt"
NOT_HERE = {"nvshmem4py-cu13"}
"""Packages that no environment of tests has."""


def steps() -> list[tuple[str, str]]:
    """The instructions of the file, with what follows each in one line."""
    text = (ROOT / "launch" / "Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]  # type: ignore[misc]


def those_of(name: str) -> list[str]:
    return [text for step, text in steps() if step == name]


def pins() -> dict[str, str]:
    lines = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    return dict(tuple(line.split("==")) for line in lines)  # type: ignore[misc]


def required() -> list[Requirement]:
    """What the file installs, by the names of its extras."""
    (step,) = (text for text in those_of("RUN") if "requirements.py" in text)
    (extras,) = re.findall(r"requirements\.py (\S+)", step)
    found = subprocess.run(
        [sys.executable, "launch/requirements.py", extras],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    named = re.findall(r"container-pins\.txt (.*?) -r", step)[0].split()
    return [Requirement(each) for each in [*found, *named] if each]


def test_instructions_are_docker_s() -> None:
    assert {step for step, _ in steps()} <= {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "CMD"}
    (base,) = those_of("FROM")
    assert re.fullmatch(r"python:3\.1[23]\.\d+-slim-bookworm", base)
    (command,) = those_of("CMD")
    assert json.loads(command) == ["distca", "doctor"]
    for text in those_of("RUN"):
        done = subprocess.run(["sh", "-n", "-c", text], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_is_copied_is_there() -> None:
    copied = set()
    for text in those_of("COPY"):
        *sources, target = shlex.split(text)
        for source in sources:
            assert (ROOT / source).exists(), source
            copied.add(source)
            if (ROOT / source).is_dir():
                assert target == source
    # All that the project's packages and their metadata are made of.
    project = (ROOT / "pyproject.toml").read_text()
    assert {"distca", "megatron_patches", "README.md", "LICENSE", "pyproject.toml"} <= copied
    assert 'readme = "README.md"' in project
    launched = {"pretrain_gpt.py", "launch", "benchmarks"}
    assert launched <= copied


def test_every_requirement_is_pinned_to_a_version_that_was_tested() -> None:
    pinned = pins()
    found = required()
    assert {each.name for each in found} == {*pinned}
    for each in found:
        assert each.specifier.contains(pinned[each.name]), each
    for name, version in pinned.items():
        if name not in NOT_HERE and not name.startswith("nvidia-"):
            assert Version(version) <= Version(importlib.metadata.version(name)), name
    # A compiler takes the headers of its own version alone, and NVSHMEM is that of torch's builds.
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"nvidia-nvshmem-cu13=={pinned["nvidia-nvshmem-cu13"]}"' in project
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-cccl"):
        assert pinned[name].startswith("13.0.")
        assert f'"{name}==13.0.*"' in project


def test_debian_has_its_packages() -> None:
    if shutil.which("apt-cache") is None:
        pytest.skip("there is no apt-cache: this is not Debian")
    (step,) = (text for text in those_of("RUN") if "apt-get install" in text)
    (names,) = re.findall(r"--no-install-recommends (.*?) &&", step)
    assert len(names.split()) > 4
    done = subprocess.run(
        ["apt-cache", "policy", *names.split()], capture_output=True, text=True, check=True
    )
    if "Candidate: " not in done.stdout:
        pytest.skip("apt has no lists of packages: apt-get update")
    found = re.findall(r"^(\S+):\n.*\n  Candidate: (\S+)", done.stdout, re.M)
    assert {name for name, version in found if version != "(none)"} == {*names.split()}


@pytest.mark.full
def test_the_index_has_every_pinned_version() -> None:
    """Downloads no package: pip lists the versions that there are."""
    for name, version in pins().items():
        command = [sys.executable, "-m", "pip", "index", "versions", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode and not re.search(r"No matching distribution", done.stderr):
            pytest.skip(f"there is no index here: {done.stderr[-200:]}")
        versions = re.findall(r"^Available versions: (.*)$", done.stdout, re.M)
        assert versions, f"{name}: {done.stderr}"
        assert version in versions[0].split(", "), name

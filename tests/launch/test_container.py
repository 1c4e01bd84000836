"""The container file: its steps as far as they can be checked without Docker and a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from support.dockerfile import Step, broken_rules, read_steps
from support.launches import ROOT

FILE = ROOT / "launch" / "Dockerfile"
PINS = ROOT / "launch" / "container-pins.txt"
NOT_HERE = {"nvshmem4py-cu13"}
"""Packages that no environment of tests has."""


def steps() -> list[Step]:
    """The instructions of the file."""
    return read_steps(FILE.read_text())


def those_of(name: str) -> list[str]:
    return [step.text for step in steps() if step.name == name]


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
    assert {step.name for step in steps()} <= {
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ARG",
        "ENV",
        "CMD",
    }
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


def test_rules_of_container_files_hold() -> None:
    assert broken_rules(FILE.read_text()) == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("WORKDIR /distca", "WORKDIR distca"), "DL3000"),
        (("RUN python", "RUN cd / && python"), "DL3003"),
        (("RUN apt-get", "RUN sudo true && apt-get"), "DL3004"),
        (("python:3.13.0-slim-bookworm", "python"), "DL3006"),
        (("python:3.13.0-slim-bookworm", "python:latest"), "DL3007"),
        ((" && rm -rf /var/lib/apt/lists/*", ""), "DL3009"),
        (("RUN apt-get update && ", "RUN apt-get update\nRUN "), "DL3009"),
        (("-c container-pins.txt ", ""), "DL3013"),
        (("apt-get install -y ", "apt-get install "), "DL3014"),
        (("--no-install-recommends ", ""), "DL3015"),
        (("COPY data data", "ADD data data"), "DL3020"),
        (('["distca", "doctor"]', "distca doctor"), "DL3025"),
        (("RUN apt-get", "RUN apt list && apt-get"), "DL3027"),
        (("--no-cache-dir --no-deps", "--no-deps"), "DL3042"),
        (("WORKDIR ", "LABEL "), "DL3045"),
        (("RUN apt-get", "RUN true | true && apt-get"), "DL4006"),
        (("ENV NVIDIA_VISIBLE_DEVICES=all", "ENV NVIDIA_VISIBLE_DEVICES all"), "docker ENV"),
    ],
)
def test_a_broken_rule_is_found(change: tuple[str, str], rule: str) -> None:
    text = re.sub(r"\\\n\s*", "", FILE.read_text())
    assert change[0] in text
    (found,) = broken_rules(text.replace(*change))
    assert found.startswith(rule)


@pytest.mark.full
def test_all_packages_resolve_for_a_machine_with_cuda(tmp_path: Path) -> None:
    """As the image installs them: pip reads metadata, and installs and builds nothing."""
    wanted = [f"{each.name}=={pins()[each.name]}" for each in required()]
    if (sys.platform, platform.machine(), sys.version_info[:2]) != ("linux", "x86_64", (3, 13)):
        pytest.skip("pip chooses wheels of the machine that it runs on: this is not the image's")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--only-binary", ":all:", "--target", str(tmp_path / "none")]
    command += ["--quiet", "--report", str(tmp_path / "report.json"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if re.search(r"Connection|Temporary failure|timed out", done.stderr):
        pytest.skip(f"there is not an index here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["install"]
    names = {each["metadata"]["name"].lower().replace("_", "-") for each in found}
    assert {*pins()} <= names
    # torch's build for CUDA, with NVIDIA's libraries.
    assert sum(name.startswith("nvidia-") for name in names) > 10
    assert not (tmp_path / "none").exists()

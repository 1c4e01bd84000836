"""What the distributions of the package hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta; build_meta.build_{}('built')"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, since setuptools writes beside them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    folder = tmp_path_factory.mktemp("checkout")
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(checkout: Path, what: str) -> Path:
    command = [sys.executable, "-c", BUILD.format(what)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (found,) = (checkout / "built").glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[what])
    return found


def test_a_source_distribution_has_all_but_the_tests(checkout: Path) -> None:
    tracked = {str(path.relative_to(checkout)) for path in checkout.rglob("*") if path.is_file()}
    with tarfile.open(built(checkout, "sdist")) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in tracked if name.split("/")[0] not in ("tests", ".ci", ".gitignore")}
    assert "pretrain_gpt.py" in wanted
    assert wanted <= held
    assert not [name for name in held if name.startswith("tests")]


def test_a_wheel_has_the_packages_with_their_data(checkout: Path) -> None:
    with zipfile.ZipFile(built(checkout, "wheel")) as archive:
        held = set(archive.namelist())
        (metadata,) = (name for name in held if name.endswith("METADATA"))
        said = archive.read(metadata).decode()
    packages = {
        str(path.relative_to(checkout))
        for folder in ("distca", "megatron_patches")
        for path in (checkout / folder).rglob("*")
        if path.is_file()
    }
    assert packages <= held
    assert "megatron_patches/pretrain.py" in held
    assert "Requires-Python: >=3.11" in said


def test_the_oldest_python_is_that_of_the_pages_and_the_doctor() -> None:
    from distca.commands.doctor import PYTHONS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = (f"{major}.{minor}" for major, minor in PYTHONS)
    assert project["requires-python"] == f">={oldest}"
    named = [each for each in project["classifiers"] if "Python :: 3." in each]
    assert (named[0].rpartition(" ")[2], named[-1].rpartition(" ")[2]) == (oldest, newest)
    assert "also run on Python 3.11" in (ROOT / "docs/quick_start.md").read_text()

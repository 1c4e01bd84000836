"""The checkout that is mutated, and scratch copies of it, in which tests run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_OURS = ("COVERAGE_", "MUTATION_", "PYTEST_")
_TOOLS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Checkout:
    """A working tree and the packages in it whose code is mutated.

    Attributes:
        root: top folder of the working tree, of git.
        packages: folders of Python files, relative to `root`.
    """

    root: Path
    packages: tuple[str, ...] = ("distca", "megatron_patches")

    @cached_property
    def files(self) -> list[str]:
        """What git knows or would add, relative to `root`."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True)
        return sorted(
            name for name in set(done.stdout.split("\0")) - {""} if (self.root / name).is_file()
        )

    @cached_property
    def mutable(self) -> list[str]:
        """The Python files of the packages."""
        return [
            name
            for name in self.files
            if name.endswith(".py") and name.startswith(tuple(f"{p}/" for p in self.packages))
        ]

    @cached_property
    def test_files(self) -> list[str]:
        """The files of which pytest collects tests."""
        return [
            name
            for name in self.files
            if name.startswith("tests/") and Path(name).match("test_*.py")
        ]

    @cached_property
    def sources(self) -> dict[str, str]:
        """The text of each mutable file."""
        return {name: (self.root / name).read_text(encoding="utf-8") for name in self.mutable}

    def digest_of_code(self) -> str:
        """Changes with the code that is mutated."""
        return self._digest(self.mutable)

    def digest_of_surroundings(self) -> str:
        """Changes with what decides which lines a test runs, but for the test files."""
        suffixes = (".py", ".sh", ".h", ".cpp", ".cu", ".toml", ".json")
        apart = {*self.test_files, *(f for f in self.files if f.startswith("tests/mutation/"))}
        return self._digest([f for f in self.files if f.endswith(suffixes) and f not in apart])

    def digest_of_file(self, name: str) -> str:
        """Changes with one file."""
        return self._digest([name])

    def _digest(self, names: list[str]) -> str:
        digest = hashlib.sha256()
        for name in names:
            content = (self.root / name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()[:16]


class Copy:
    """A scratch copy of a checkout, from which code and tests are imported.

    Args:
        checkout: what is copied.
    """

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout
        self._folder = tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True)
        self.root = (Path(self._folder.name) / "copy").resolve()
        for name in checkout.files:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout.root / name, self.root / name)
        # Times of files are too coarse to tell a mutant from the file that it replaces.
        compiling = "-m compileall -q --invalidation-mode checked-hash".split()
        compiling += checkout.packages
        subprocess.run([sys.executable, *compiling], cwd=self.root, check=True)
        self._assert_imported()

    def environment(self, **more: str) -> dict[str, str]:
        """What a process finds that imports from the copy, wherever else a package is installed."""
        # The last holds these modules, for a checkout that does not.
        path = os.pathsep.join(map(str, (self.root, self.root / "tests", _TOOLS)))
        bare = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        return bare | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | more

    def write(self, name: str, text: str) -> None:
        """Replaces one file's text."""
        (self.root / name).write_text(text, encoding="utf-8")

    def restore(self, name: str) -> None:
        """Puts the checkout's file back."""
        self.write(name, self._checkout.sources[name])

    def close(self) -> None:
        """Removes the copy."""
        self._folder.cleanup()

    def _assert_imported(self) -> None:
        packages = [p for p in self._checkout.packages if (self.root / p / "__init__.py").is_file()]
        code = f"import {', '.join(packages)}\n" + "\n".join(
            f"print({p}.__file__)" for p in packages
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        for path in done.stdout.split():
            assert Path(path).is_relative_to(self.root), f"{path} is imported, not {self.root}"

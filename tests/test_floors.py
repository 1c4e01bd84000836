"""The floors of the house: which folder may import which, and that there are no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Every folder or module may import itself and those named beside it.
PURE = {"distca.plan", "distca.documents", "distca.cost", "distca.schedule"}
FLOORS: dict[str, set[str]] = {
    "distca.__version__": set(),
    "distca.checkpoints": set(),
    "distca.json_files": set(),
    "distca.lifetime": set(),
    "distca.scratch": set(),
    "distca.machine": set(),
    "distca.native": set(),
    "distca.palette": set(),
    "distca.progress": set(),
    "distca.quiet": set(),
    "distca.run_figures": set(),
    "distca.timeline": {"distca.whole_file"},
    "distca.torchrun": set(),
    "distca.whole_file": set(),
    "distca.wording": set(),
    "distca.plan": {"distca.json_files", "distca.whole_file"},
    "distca.documents": {"distca.json_files", "distca.plan", "distca.whole_file"},
    "distca.cost": {"distca.json_files", "distca.plan", "distca.whole_file"},
    "distca.schedule": {
        *("distca.plan", "distca.cost", "distca.lifetime", "distca.quiet", "distca.whole_file"),
        *("distca.json_files", "distca.wording"),
    },
    "distca.attention": {"distca.machine", "distca.plan", "distca.cost", "distca.native"},
    "distca.transport": {"distca.native", "distca.wording"},
    "distca.simulate": {
        *(*PURE, "distca.json_files", "distca.timeline", "distca.whole_file", "distca.wording")
    },
    "distca.runtime": {*PURE, "distca.attention", "distca.transport", "distca.timeline"},
}
FLOORS["distca.runtime.serving"] = {*FLOORS["distca.runtime"], "distca.runtime"}
FLOORS["distca.inference"] = {*FLOORS["distca.runtime.serving"], *FLOORS["distca.simulate"]}
FLOORS["distca.inference"] |= {"distca.runtime.serving", "distca.simulate", "distca.lifetime"}
FLOORS["distca.inference"] |= {"distca.scratch", "distca.checkpoints", "distca.torchrun"}
FLOORS["distca.inference"] |= {"distca.wording"}
FLOORS["distca.library"] = {*FLOORS["distca.runtime"], "distca.runtime"}
FLOORS["distca.prefill"] = {*FLOORS["distca.inference"], "distca.inference"}
FLOORS["distca.vllm"] = {*FLOORS["distca.prefill"], "distca.prefill"}
FLOORS["distca.commands"] = {*FLOORS}
FLOORS["distca.__main__"] = {"distca.commands"}
# Nor does training import what only inference runs.
FLOORS["megatron_patches"] = {*FLOORS} - {"distca.__main__", "distca.runtime.serving"}
# From below: each floor of training may import those before it.
TRAINING = """
    versions checkpoint_data cpu mcore_fixes flags families model batches pipeline loop hooks
    megatron_lm parts pretrain check_run launcher launch convert
""".split()
for floor in TRAINING:
    below = {f"megatron_patches.{each}" for each in TRAINING[: TRAINING.index(floor)]}
    FLOORS[f"megatron_patches.{floor}"] = FLOORS["megatron_patches"] | below
FLOORS["data"] = {*FLOORS} - {"distca.__main__"}


def sources() -> Iterator[tuple[str, Path]]:
    """The modules of all floors and their files."""
    for folder in ("distca", "megatron_patches", "data"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def floor_of(module: str) -> str | None:
    """The entry of `FLOORS` that a module belongs to."""
    found = [floor for floor in FLOORS if module == floor or module.startswith(floor + ".")]
    return max(found, key=len, default=None)


def imports_of(path: Path) -> Iterator[str]:
    """What a file imports of ours, wherever in it, for type checking alike."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("distca", *ROOMS))


ROOMS = ("megatron_patches", "data")
MODULES = dict(sources())


def module_of(name: str) -> str | None:
    """The module that an imported name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def test_a_file_imports_from_its_own_floor_or_below() -> None:
    for module, path in MODULES.items():
        if module == "distca":
            assert not list(imports_of(path)), "importing distca imports nothing"
            continue
        floor = floor_of(module)
        assert floor is not None, f"{module} is on no floor: add it to FLOORS"
        for name in imports_of(path):
            other = floor_of(name)
            allowed = other == floor or other in FLOORS[floor]
            assert allowed, f"{module} imports {name}, which is not on a floor below {floor}"


def test_no_floor_is_below_itself() -> None:
    """`FLOORS` itself says no circle."""
    for floor, below in FLOORS.items():
        assert all(floor not in FLOORS[other] for other in below), floor


def find_circle(edges: dict[str, set[str]]) -> list[str] | None:
    """The modules of a circle of imports, if there is one."""
    done: set[str] = set()
    trail: list[str] = []

    def visit(module: str) -> list[str] | None:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return None
        trail.append(module)
        for other in sorted(edges[module]):
            circle = visit(other)
            if circle:
                return circle
        trail.pop()
        done.add(module)
        return None

    return next(filter(None, map(visit, sorted(edges))), None)


def test_modules_import_in_no_circle() -> None:
    """Imports for type checking and those within functions count, too."""
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        found = {module_of(name) for name in imports_of(path)} - {module, None}
        edges[module] = {other for other in found if other is not None}
    assert find_circle(edges) is None
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize(
    "module",
    [
        *(*sorted(PURE), "distca.simulate"),
        *(f"distca.commands.{name}" for name in ("plan", "prepare", "simulate")),
    ],
)
def test_planning_and_simulating_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_tests_share_helpers_and_not_each_other() -> None:
    """What two files of tests need is in `tests/support`; a file is read in one sitting."""
    tests = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(tests) == len(list((ROOT / "tests").rglob("test_*.py"))), "two of one name"
    for path in tests.values():
        text = path.read_text()
        imported = {
            name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
        }
        assert not {name.split(".")[-1] for name in imported} & tests.keys(), path
        assert text.count("\n") <= 500, path

"""Mutation testing, on a project of a few lines."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cosmic_ray import work_item

from mutation import __main__ as mutation
from mutation import running
from mutation.copies import copied, files_of
from mutation.covering import Asked, Covering, in_order
from mutation.explained import Explained, outdated, read_explained, report
from mutation.near import near_tests
from mutation.running import choose, pytest_arguments, run
from mutation.sampling import sample, without_effect
from mutation.warm import Warm

ROOMS = "distca/rooms.py"
TESTS = "tests/rooms/test_rooms.py"
DOORS = "tests/test_doors.py"
FILES = {
    "distca/__init__.py": "",
    ROOMS: """
from __future__ import annotations

DOORS = 4

def area(width: int | None, length):
    return width * length

def unlike(a):
    return a and 3

def never():
    return 1 + 1
""",
    TESTS: """
import multiprocessing
import subprocess
import sys

import pytest

from distca.rooms import DOORS, area, unlike

@pytest.fixture(scope="module")
def elsewhere():
    code = "from distca.rooms import area; print(area(3, 5))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout

def send(pipe):
    pipe.send(area(2, 5))

def test_elsewhere(elsewhere):
    assert elsewhere == "15\\n"

def test_child():
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe()
    child = context.Process(target=send, args=(its,))
    child.start()
    assert mine.recv() == 10
    child.terminate()
    child.join()

@pytest.mark.parametrize("kind", [1, 2])
def test_unlike(kind):
    assert unlike(kind)

@pytest.mark.parametrize("kind", [1, 2])
def test_fails(kind):
    assert not unlike(1) or kind == 2
""",
    DOORS: """
from distca.rooms import DOORS

def test_doors():
    assert DOORS == 4
""",
    ".gitignore": "build/\n__pycache__/\n",
    # Names of tests begin here, whatever lies above.
    "pytest.ini": "[pytest]\n",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A small project."""
    root = tmp_path_factory.mktemp("project").resolve()
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def covering(root) -> Covering:
    """What its tests run."""
    return Covering(root, root / "build" / "mutation" / "lines", [TESTS, DOORS], 1)


def test_a_sample_has_one_mutant_of_each_place_and_its_order_is_that_of_the_seed(root):
    orders = [[item.mutations[0] for item in sample(root, [ROOMS], seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    places = [[(m.start_pos, m.end_pos) for m in order] for order in orders]
    assert sorted(places[0]) == sorted(set(places[2]))
    # The annotation is none.
    assert {line for (line, _), _ in places[0]} == {4, 7, 10, 13}


def test_the_newest_files_come_first_and_uncommitted_ones_before_them(tmp_path):
    def git(*command: str) -> None:
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)

    def commit(day: int, **files: list[str]) -> None:
        for name, lines in files.items():
            (tmp_path / f"{name}.py").write_text("\n".join(lines))
        git("add", "--all")
        who = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        git(*who, "commit", "-qm", "Change", f"--date=2026-01-0{day}T00:00:00Z")

    lines = [f"X{n} = {n} + {n}" for n in range(30)]
    changed = ["X = 5 + 5", "Y = 6 + 6", "Z = 7 + 7", "A = 8 + 8", *lines[4:]]
    git("init", "-q")
    commit(1, **dict.fromkeys("abcd", lines))
    commit(2, b=changed)
    # A new name, and a word in a comment, are no news.
    git("mv", "c.py", "renamed.py")
    commit(3, d=["# One", *lines])
    (tmp_path / "new.py").write_text("X = 1")
    paths = ["a.py", "b.py", "d.py", "new.py", "renamed.py"]
    found = [item.job_id.split() for item in sample(tmp_path, paths, seed=0)]
    assert [int(number) for number, _ in found] == list(range(len(found)))
    order = list(dict.fromkeys(place.partition(":")[0] for _, place in found))
    assert order == ["new.py", "b.py", "a.py", "d.py", "renamed.py"]
    evenly = [item.job_id.partition(" ")[2] for item in sample(tmp_path, paths, 0, evenly=True)]
    assert sorted(evenly) == sorted(place for _, place in found)
    assert len({place.partition(":")[0] for place in evenly[:20]}) >= 3


@pytest.mark.parametrize(
    ("source", "idle"),
    [
        ("x: int | None = 3", ["int | None"]),
        ("def f(a: 1 + 1) -> 2: return 3", ["1 + 1", "2"]),
        ("Floats = int | str", ["Floats = int | str"]),
        ("MOST = 3 | 4", []),
        ("raise ValueError(f'{n + 1}')", ["f'{n + 1}'"]),
        ("raise ValueError(n + 1)", []),
        ("raise ValueError('a' + b)", ["'a' + b"]),
        ("logger.info('%d', n + 1)", ["logger.info('%d', n + 1)"]),
        ("assert n + 1, n - 1", ["assert n + 1, n - 1"]),
        ("zip(a, b + c, strict=True)", ["True"]),
        ("@dataclass(frozen=True)\nclass A: x = 1 + 2", ["True"]),
        ("cast(int | str, a + b)", ["int | str"]),
        ("class A(B, Protocol): x = 1 + 2", ["class A(B, Protocol): x = 1 + 2"]),
        ("class A(B): x = 1 + 2", []),
        ("if TYPE_CHECKING: import a", ["if TYPE_CHECKING: import a"]),
    ],
)
def test_code_without_effect_is_no_place(source, idle):
    ranges = sorted(without_effect(source))
    assert [source[begin:end] for (_, begin), (_, end) in ranges] == idle


def test_exceptions_of_another_module_are_left_alone(tmp_path):
    source = "import a\ntry:\n    b = 1 + 1\nexcept (a.b.C, a.D):\n    pass\n"
    (tmp_path / "new.py").write_text(source)
    lines = {item.mutations[0].start_pos[0] for item in sample(tmp_path, ["new.py"], seed=0)}
    assert lines == {3}


def test_a_mutant_changes_the_copy_alone_and_the_copy_is_what_is_imported(root):
    with copied(root, files_of(root)) as copy:
        assert not (copy.root / "build").exists()
        path = copy.root / ROOMS
        show = copy.command("-c", "import distca.rooms; print(distca.rooms.DOORS)")
        for doors in (4, 5, 4):
            path.write_text(FILES[ROOMS].replace("DOORS = 4", f"DOORS = {doors}"))
            assert subprocess.check_output(show, text=True) == f"{doors}\n"
    assert (root / ROOMS).read_text() == FILES[ROOMS]
    assert not copy.root.exists()


def test_the_map_knows_functions_other_processes_fixtures_and_what_fails(covering):
    asked = {line: covering.tests(ROOMS, line) for line in (4, 7, 10, 13)}
    assert [each.names for each in asked[7]] == [(TESTS,)]
    functions = tuple(f"{TESTS}::{name}" for name in ("test_fails", "test_unlike"))
    assert [sorted(each.names) for each in asked[10]] == [[*functions]]
    assert asked[10][0].failing == (f"{TESTS}::test_fails[1]",)
    assert asked[13] == []
    # What runs as the file is imported belongs to all that import it.
    assert [each.names for each in asked[4]] == [(DOORS,), (TESTS,)]


def test_only_files_whose_code_changed_are_run_again(root, covering, monkeypatch):
    ran = []
    monkeypatch.setattr(Covering, "_record", lambda self, name, copy: ran.append(name))
    folder = root / "build" / "mutation" / "lines"
    tests = [TESTS, DOORS]
    (root / "distca/other.py").write_text("A = 1")
    Covering(root, folder, tests, 1)
    (root / DOORS).write_text(FILES[DOORS] + "\n")
    Covering(root, folder, tests, 1)
    (root / ROOMS).write_text(FILES[ROOMS] + "\n")
    Covering(root, folder, tests, 1)
    (root / "distca/other.py").unlink()
    for name in (DOORS, ROOMS):
        (root / name).write_text(FILES[name])
    assert ran == [DOORS, TESTS, DOORS]


def test_quick_tests_come_before_slow_ones_and_near_before_far():
    seconds = {"tests/rooms/a": 9.0, "tests/rooms/b": 0.5, "tests/c": 0.1, "tests/d": 5.0}
    found = [Asked((name,), (), each) for name, each in seconds.items()]
    order = [asked.names[0][-1] for asked in in_order(found, "distca/rooms/rooms.py")]
    assert order == ["b", "c", "a", "d"]


def test_the_nearest_are_chosen_as_long_as_they_fit_and_at_least_one():
    found = [Asked((name,), (), seconds) for name, seconds in (("a", 3), ("b", 9), ("c", 1))]
    assert [asked.names for asked in choose(found, 4)] == [("a",), ("c",)]
    assert [asked.names for asked in choose(found, 2)] == [("a",)]
    assert choose([], 9) == []


@pytest.mark.usefixtures("_imports_little")
def test_an_error_that_a_failing_test_logs_is_no_test(root):
    (root / "tests/test_logs.py").write_text(
        "import logging\nfrom distca.rooms import DOORS\ndef test():\n"
        "    logging.error('the house has %d doors', DOORS)\n    assert DOORS == 4\n"
    )
    items = list(mutants(root, {4: "NumberReplacer"}))
    asked = Asked(("tests/test_logs.py",), (), 9.0)
    ((_, result),) = run(items, root, lambda path, line: [asked], 240, 1)
    (root / "tests/test_logs.py").unlink()
    assert "ERROR    root:test_logs.py" in result.output
    assert result.is_killed


@pytest.fixture
def _imports_little(monkeypatch):
    """Lets the processes that fork import pytest alone; nothing here needs torch."""
    monkeypatch.setattr(running, "Warm", lambda copy: Warm(copy, ["pytest"]))


def mutants(root, operators: dict[int, str]):
    """Mutants of a line and an operator each."""
    found = [item for seed in range(9) for item in sample(root, [ROOMS], seed)]
    for line, operator in operators.items():
        yield next(
            item
            for item in found
            for mutation in item.mutations
            if mutation.start_pos[0] == line and mutation.operator_name == f"core/{operator}"
        )


@pytest.mark.usefixtures("_imports_little")
def test_mutants_are_caught_survive_or_are_not_covered(root, covering):
    wanted = {4: "NumberReplacer", 10: "ReplaceAndWithOr", 13: "NumberReplacer"}
    items = list(mutants(root, wanted))
    ran = run(items, root, covering.tests, seconds=240, jobs=1)
    results = {item.job_id: result for item, result in ran}
    doors, unlike, never = (results[item.job_id] for item in items)
    assert doors.is_killed
    assert "test_doors.py::test_doors" in doors.output
    assert not unlike.is_killed
    assert unlike.output.startswith("tests of 1 of 1 files that run this line passed:\n")
    assert f"--- a/{ROOMS}" in unlike.diff
    assert "-    return a and 3\n+    return a or 3" in unlike.diff
    assert (never.is_killed, never.output) == (False, "no test runs this line")
    assert (root / ROOMS).read_text() == FILES[ROOMS]


@pytest.mark.usefixtures("_imports_little")
def test_a_test_that_fails_without_the_mutant_has_not_caught_it(root):
    failing = Asked((f"{TESTS}::test_fails",), (), 9.0)
    items = list(mutants(root, {13: "NumberReplacer"}))
    ((_, result),) = run(items, root, lambda path, line: [failing], 240, 1)
    assert not result.is_killed
    assert result.output == (
        f"only {TESTS}::test_fails[1] failed, and it fails without the mutant as well"
    )


def test_a_mutant_that_was_run_is_not_run_again(root, capfd, monkeypatch):
    ran = []

    def pretend(items, *_):
        ran.append([item.job_id for item in items])
        for item in items:
            outcome = "survived" if len(ran) < 3 else "killed"
            yield item, work_item.WorkResult("normal", "because", outcome, "+ more")

    monkeypatch.setattr(mutation, "run", pretend)
    monkeypatch.setattr(mutation, "Covering", lambda *_: type("", (), {"tests": None}))
    every = [item.job_id for item in itertools.islice(sample(root, [ROOMS], 5), 6)]
    for number in ("4", "6"):
        assert mutation.main(["--seed", "5", "--mutants", number], root) == 0
    listed = capfd.readouterr().out
    assert "+ more" in listed
    assert "because" in listed
    assert "surviving mutants: 6 of 6 (100.00%), 0 of them explained" in listed
    assert mutation.main(["--seed", "5", "--mutants", "5", "--again"], root) == 0
    assert "surviving mutants: 1 of 6 (16.67%), 0 of them explained" in capfd.readouterr().out
    assert ran == [every[:4], every[4:], every[:5]]


def test_survivors_with_a_reason_are_not_listed(root):
    diff = f"--- a/{ROOMS}\n+++ b/{ROOMS}\n@@ -1 +1 @@\n-    return a and 3\n+    return a or 3\n"
    survived, killed = (
        work_item.WorkResult("normal", "because", outcome, diff)
        for outcome in ("survived", "killed")
    )
    (item,) = mutants(root, {10: "ReplaceAndWithOr"})
    known = Explained(ROOMS, ("return a and 3",), ("return a or 3",), "It may be.")
    other = replace(known, becomes=("return a",))
    assert [*report([(item, survived), (item, killed)], [known])] == [
        "surviving mutants: 1 of 2 (50.00%), 1 of them explained"
    ]
    listed = [*report([(item, survived)], [other])]
    assert "because" in listed
    assert listed[-1] == "surviving mutants: 1 of 1 (100.00%), 0 of them explained"
    assert [*report([], [known])] == ["no mutant was run"]
    assert outdated(
        root, [known, replace(known, was=("return 3",)), replace(known, file="no")]
    ) == [
        replace(known, was=("return 3",)),
        replace(known, file="no"),
    ]


def test_reasons_are_of_lines_that_are_there():
    table = read_explained()
    assert not outdated(Path(__file__).parents[2], table)
    assert all(each.why and each.was != each.becomes for each in table)


def test_code_of_some_folders_alone_is_mutated(root, monkeypatch):
    ran = []
    monkeypatch.setattr(mutation, "run", lambda items, *_: ran.extend(items) or ())
    monkeypatch.setattr(mutation, "Covering", lambda *_: type("", (), {"tests": None}))
    for code in (["distca/rooms.py"], ["distca/"], ["distca/__init__.py"]):
        mutation.main(["--seed", "8", "--mutants", "99", "--code", *code], root)
        names = {str(mutant.module_path) for item in ran for mutant in item.mutations}
        assert names == ({ROOMS} if code != ["distca/__init__.py"] else set())
        ran.clear()


def test_test_files_near_code_are_found(tmp_path):
    sources = {
        "distca/__init__.py": "",
        "distca/a/rooms.py": "from distca.b import doors",
        "distca/b/doors.py": "",
        "distca/a/roof.py": "",
        "tests/support/houses.py": "def build():\n    import distca.a.rooms",
        "tests/a/test_a.py": "from distca.a.rooms import area",
        "tests/b/test_b.py": "from support import houses",
        "tests/a/test_c.py": "from distca.a import roof",
        "tests/a/test_d.py": "import os",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    tests = [name for name in sources if "test_" in name]
    for code, letters in (("b/doors", "b"), ("a/rooms", "a"), ("a/roof", "c")):
        found = near_tests(tmp_path, tests, [f"distca/{code}.py"], sources)
        assert [name[-4] for name in found] == [*letters]
    both = ["distca/a/rooms.py", "distca/b/doors.py"]
    assert [name[-4] for name in near_tests(tmp_path, tests, both, sources)] == ["a", "b"]


def test_only_near_tests_are_recorded(root, monkeypatch):
    recorded = []
    monkeypatch.setattr(mutation, "run", lambda *_: ())
    monkeypatch.setattr(
        mutation, "Covering", lambda *found: recorded.append(found[2]) or type("", (), {"tests": 0})
    )
    monkeypatch.setattr(mutation, "near_tests", lambda root, tests, *_: tests[1:])
    mutation.main(["--mutants", "0", "--near"], root)
    mutation.main(["--mutants", "0"], root)
    tests = ["tests/rooms/test_rooms.py", DOORS]
    assert recorded == [tests[1:], tests]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--mutants", "-1"],
        ["--mutants", "1", "--tests", "tests/no.py"],
        ["--mutants", "1", "--code", "distca/no"],
    ],
)
def test_what_cannot_run_is_refused(root, capsys, wrong):
    with pytest.raises(SystemExit, match="2"):
        mutation.main(wrong, root)
    assert wrong[-1] in capsys.readouterr().err


@pytest.mark.usefixtures("_imports_little")
def test_what_hangs_is_ended_with_all_that_it_started(root, tmp_path, monkeypatch):
    child = f"import os; os.setsid(); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    hangs = (
        f"import subprocess, sys\ndef test(): subprocess.run([sys.executable, '-c', {child!r} + "
    )
    hangs += "'; import time; time.sleep(60)'])"
    monkeypatch.setattr(running, "_SETTLING_SECONDS", 3.0)
    (root / "tests/test_hangs.py").write_text(hangs)
    items = list(mutants(root, {13: "NumberReplacer", 4: "NumberReplacer"}))
    # What comes next runs, though on a busy machine it may take long.
    asked = {13: Asked(("tests/test_hangs.py",), (), 0.0), 4: Asked((DOORS,), (), 20.0)}
    ran = run(items, root, lambda path, line: [asked[line]], 240, 1)
    hanging, doors = (result for _, result in ran)
    (root / "tests/test_hangs.py").unlink()
    assert (hanging.is_killed, hanging.output) == (True, "timeout")
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        # Nobody may have waited for the dead.
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert "test_doors.py::test_doors" in doors.output


CHANGES = {
    "nothing": ("", ""),
    "what is made as a module is imported": ("DOORS = 4", "DOORS = 5"),
    "what other processes import": ("width * length", "width + length"),
    "an operator": ("a and 3", "a or 3"),
    "the module's syntax": ("DOORS = 4", "DOORS ="),
    "nothing, after changes": ("", ""),
}


def test_a_fork_decides_as_a_fresh_process(root):
    arguments = pytest_arguments([Asked((TESTS, DOORS), (), 0.0)])
    arguments.remove("-x")
    failures = {}
    with copied(root, files_of(root)) as copy, contextlib.closing(Warm(copy, ["pytest"])) as warm:
        fresh = copy.command("-m", "pytest", *arguments)
        for what, (was, becomes) in CHANGES.items():
            (copy.root / ROOMS).write_text(FILES[ROOMS].replace(was, becomes))
            done = subprocess.run(fresh, stdout=subprocess.PIPE, text=True)
            first, second = (done.returncode, done.stdout), warm.run(arguments, 60)
            failed = [running._FAILED.findall(printed) for _, printed in (first, second)]
            assert (first[0], failed[0]) == (second[0], failed[1]), what
            failures[what] = len(failed[0])
    assert [*failures.values()] == [1, 2, 3, 1, 2, 1]

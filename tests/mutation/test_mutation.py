"""Mutation testing, on a project of a few lines."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys

import coverage
import psutil
import pytest

from mutation import __main__ as mutation
from mutation.checkout import Checkout, Copy
from mutation.covering import Covering, covering_of
from mutation.history import last_changes, newest_first
from mutation.mapping import Map
from mutation.processes import Commands
from mutation.recorded import Record, TestRecord
from mutation.recording import CONTEXT, NO_TEST, InContext
from mutation.running import Result, Runner
from mutation.sampling import Sample, may_change_behaviour

FILES = {
    "house/__init__.py": "",
    "house/rooms.py": """
from __future__ import annotations

DOORS = 4

def area(width: int | None, length):
    return width * length

def unlike(a):
    return a and 3

def never():
    return 1 + 1
""",
    "tests/test_rooms.py": """
import multiprocessing
import subprocess
import sys
from functools import cache

import pytest

from house.rooms import DOORS, area, unlike

@pytest.fixture(scope="module")
def elsewhere():
    code = "from house.rooms import area; print(area(3, 5))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout

@cache
def shared():
    return unlike(1)

def send(pipe):
    pipe.send(area(2, 5))

def test_first(elsewhere):
    assert shared()

def test_second(elsewhere):
    assert elsewhere == "15\\n" and shared()

@pytest.mark.parametrize("time", [1, 2])
def test_child(time):
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe()
    child = context.Process(target=send, args=(its,))
    child.start()
    assert mine.recv() == 10
    child.kill()

def test_doors():
    assert DOORS * area(1, 1) == 4

def test_fails():
    assert area(1, 1) == 2
""",
    ".gitignore": "build/\n__pycache__/\n",
    # Names of tests begin here, whatever lies above.
    "pytest.ini": "[pytest]\n",
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Checkout:
    """A small project."""
    root = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return Checkout(root, ("house",))


@pytest.fixture(scope="module")
def covering(checkout) -> Covering:
    """Its map."""
    folder = checkout.root / "build" / "mutation"
    record = Map(checkout, folder, Commands()).record(checkout.test_files)
    return covering_of(record, checkout.root, checkout.mutable)


def sampled(checkout: Checkout, seed: int, number: int = 100) -> list[str]:
    """Names of mutants."""
    return [m.name for m in itertools.islice(everything(checkout, seed), number)]


def everything(checkout: Checkout, seed: int = 0) -> Sample:
    """All mutants, of files of any age."""
    return Sample(checkout.sources, seed, [checkout.mutable])


def test_a_longer_sample_begins_with_the_shorter_and_another_seed_gives_another(checkout):
    assert sampled(checkout, 0)[:3] == sampled(checkout, 0, 3)
    assert sorted(sampled(checkout, 0)) == sorted(sampled(checkout, 1))
    places = [[name.split()[0] for name in sampled(checkout, seed, 8)] for seed in (0, 1)]
    assert places[0] != places[1]


def test_every_place_has_a_mutant_before_one_has_two(checkout):
    places = [name.split()[0] for name in sampled(checkout, 0)]
    first_again = next(n for n in range(len(places)) if places[n] in places[:n])
    assert set(places[:first_again]) == set(places)


def test_the_newest_files_come_first(checkout):
    sources = {f"{name}.py": f"{name} = {'1 + ' * 9}1" for name in "abcd"}
    groups = newest_first({"a.py": 3.0, "b.py": 9.0, "c.py": float("inf"), "d.py": 3.0}, 2)
    assert groups == [["c.py", "b.py"], ["a.py", "d.py"]]
    assert newest_first({"a.py": 1.0, "b.py": 2.0}, 10) == [["b.py"], ["a.py"]]
    orders = []
    for seed in range(2):
        paths = [mutant.path for mutant in Sample(sources, seed, groups)]
        # Each place of a group, then each of the next; only then a second mutant of one.
        places = 19
        assert set(paths[: 2 * places]) == {"c.py", "b.py"}
        assert set(paths[2 * places : 4 * places]) == {"a.py", "d.py"}
        assert {"c.py", "b.py"} & set(paths[4 * places :])
        orders.append(paths[: 2 * places])
    assert orders[0] != orders[1]


def test_a_file_is_as_new_as_its_behaviour(tmp_path):
    """Not as its comments, messages or name, and newest where it is not committed yet."""

    def git(*command: str) -> None:
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)

    def commit(day: int, **files: str | None) -> None:
        for name, text in files.items():
            path = tmp_path / f"{name}.py"
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
        git("add", "--all")
        who = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        git(*who, "commit", "-qm", "Change", f"--date=2026-01-0{day}T00:00:00Z")

    body = "def f(a):\n    return a + {}\n" + "".join(f"X{n} = {n}\n" for n in range(30))
    git("init", "-q")
    same = {name: body.format(1) for name in "abcde"}
    sources = {f"{name}.py": text for name, text in same.items()}
    (tmp_path / "a.py").write_text(same["a"])
    assert last_changes(tmp_path, {"a.py": same["a"]}) == {"a.py": float("inf")}
    commit(1, **same)
    commit(2, b=body.format(2), c=body.format("1  # one"))
    # Renamed, and changed in a word of its docstring.
    commit(3, d=None, moved='"""Moved."""\n' + body.format(1), e=body.format(3))
    commit(4, e=body.format("int(3)"))
    commit(5, e='"""Text."""\n' + body.format("int(3)"))
    names = ("a.py", "b.py", "c.py", "moved.py", "e.py")
    sources = {name: (tmp_path / name).read_text() for name in names}
    first = last_changes(tmp_path, sources)
    days = {name: 1 + (seconds - first["a.py"]) / 86400 for name, seconds in first.items()}
    assert days == {"a.py": 1, "b.py": 2, "c.py": 1, "moved.py": 1, "e.py": 4}
    for name, text in (("a.py", body.format(9)), ("b.py", sources["b.py"] + "# End\n")):
        (tmp_path / name).write_text(text)
        sources[name] = text
    (tmp_path / "new.py").write_text("")
    (tmp_path / "added.py").write_text("")
    git("add", "added.py")
    now = last_changes(tmp_path, sources | {"new.py": "", "added.py": ""})
    assert [name for name, seconds in now.items() if seconds == float("inf")] == [
        *("a.py", "new.py", "added.py")
    ]
    assert {name: now[name] for name in names[1:]} == {name: first[name] for name in names[1:]}


@pytest.mark.parametrize(
    ("before", "after", "differ"),
    [
        ("x: int | None = 3", "x: int & None = 3", False),
        ("x: int | None = 3", "x: int | None = 4", True),
        ("def f(a: 1 + 1) -> 2: 'x'", "def f(a: 1 - 1) -> 3: pass; 'x'", True),
        ("def f(a: 1 + 1) -> 2: return a", "def f(a: 1 - 1) -> 3: return a", False),
        ("Floats = int | str", "Floats = int & str", False),
        ("MOST = 3 | 4", "MOST = 3 & 4", True),
        ("raise ValueError(f'{n + 1}')", "raise ValueError(f'{n - 1}')", False),
        ("raise ValueError(n + 1)", "raise ValueError(n - 1)", True),
        ("assert n, f'{n + 1}'", "assert n, f'{n - 1}'", False),
        ("if TYPE_CHECKING: pass", "if not TYPE_CHECKING: pass", False),
        ("x = 1", "x = ", False),
    ],
)
def test_what_cannot_change_behaviour_is_no_mutant(before, after, differ):
    assert may_change_behaviour(before, after) is differ


def test_a_mutant_changes_the_copy_alone_and_the_copy_is_what_is_imported(checkout):
    copy = Copy(checkout)
    name = "house/rooms.py"
    copy.write(name, checkout.sources[name].replace("DOORS = 4", "DOORS = 5"))
    code = "import house.rooms; print(house.rooms.DOORS)"
    command = [sys.executable, "-c", code]
    environment = copy.environment()
    assert subprocess.check_output(command, cwd=copy.root, env=environment) == b"5\n"
    copy.restore(name)
    assert subprocess.check_output(command, cwd=copy.root, env=environment) == b"4\n"
    assert (checkout.root / name).read_text() == FILES[name]
    copy.close()
    assert not copy.root.exists()


def test_the_map_knows_other_processes_shared_fixtures_and_kept_results(checkout, covering):
    files = "tests/test_rooms.py::"
    names = ("test_first", "test_second", "test_child[1]", "test_child[2]", "test_doors")
    area = {files + name for name in names}
    assert [set(group) for group in covering.groups("house/rooms.py", 7)] == [area]
    kept = {files + "test_first", files + "test_second"}
    assert [set(group) for group in covering.groups("house/rooms.py", 10)] == [kept]
    assert covering.groups("house/rooms.py", 13) == []
    assert {n for n in area if covering.starts_processes(n)} == area - {files + "test_doors"}
    # What runs at import is tried on all tests of the file.
    assert [set(group) for group in covering.groups("house/rooms.py", 4)] == [area]


def test_a_process_that_is_ended_as_it_saves_saves_all_first(monkeypatch):
    order = []

    class Measuring:
        def switch_context(self, context):
            if context == NO_TEST:
                os.kill(os.getpid(), signal.SIGTERM)
                order.append("leaves")

        def save(self):
            os.kill(os.getpid(), signal.SIGTERM)
            order.append("saves")

    monkeypatch.setattr(coverage.Coverage, "current", Measuring)
    monkeypatch.setenv(CONTEXT, NO_TEST)
    before = signal.signal(signal.SIGTERM, lambda *_: order.append("ends"))
    try:
        assert InContext(order.append, "c1")("runs") is None
    finally:
        signal.signal(signal.SIGTERM, before)
    assert order == ["runs", "leaves", "saves", "ends"]


def test_few_seconds_choose_the_cheapest_and_many_of_each_file():
    record = Record()
    for name, seconds in (("a::1", 1), ("a::2", 2), ("b::1", 3), ("b::2", 9), ("c::1", 100)):
        record.tests[name] = TestRecord(True, seconds, [])
    covering = Covering(record, {})
    assert covering.choose([list(record.tests)], 4) == ["a::1", "b::1"]
    assert covering.choose([list(record.tests)], 6) == ["a::1", "a::2", "b::1"]
    assert covering.choose([["c::1"]], 6) == ["c::1"]
    assert covering.choose([["b::2"], ["a::1"]], 9) == ["b::2"]


def test_a_mutant_is_caught_and_another_survives(checkout, covering, monkeypatch):
    left = []
    close = Copy.close

    def look_and_close(copy):
        left.append((copy.root / "house/rooms.py").read_text())
        close(copy)

    monkeypatch.setattr(Copy, "close", look_and_close)
    runner = Runner(checkout, covering, Commands(), seconds=240, jobs=1)
    wanted = {(4, "NumberReplacer"), (10, "ReplaceAndWithOr"), (13, "NumberReplacer")}
    mutants = [
        mutant
        for mutant in everything(checkout)
        if (mutant.line, mutant.operator.removeprefix("core/")) in wanted
    ]
    by_line = {mutant.line: mutant for mutant in mutants}
    doors, unlike, never = runner.run([by_line[4], by_line[10], by_line[13]])
    assert (doors.outcome, doors.covering) == ("caught", 5)
    assert "test_rooms.py::test_doors" in doors.by
    assert (unlike.outcome, unlike.tests) == ("survived", 2)
    assert unlike.difference == ["-    return a and 3", "+    return a or 3"]
    assert (never.outcome, never.tests) == ("uncovered", 0)
    assert left == [FILES["house/rooms.py"]]


def test_a_test_that_fails_without_the_mutant_has_not_caught_it(checkout, covering, monkeypatch):
    runner = Runner(checkout, covering, Commands(), seconds=240, jobs=1)
    (mutant,) = itertools.islice((m for m in everything(checkout) if m.line == 7), 1)
    failed = "FAILED tests/test_rooms.py::test_second - late"
    steady = iter([(0, ""), (1, failed), (0, ""), (0, ""), (1, failed), (1, failed)])
    monkeypatch.setattr(Runner, "_pytest", lambda *_: next(steady))
    assert [result.outcome for result in runner.run([mutant, mutant])] == ["caught", "unsteady"]


def test_a_mutant_that_was_run_is_not_run_again(checkout, covering, capsys, monkeypatch):
    ran = []

    def run(runner, mutants):
        ran.append([mutant.name for mutant in mutants])
        for mutant in mutants:
            yield Result(mutant.name, "survived" if len(ran) < 3 else "caught", ["+ more"])

    monkeypatch.setattr(Runner, "run", run)
    every = sampled(checkout, 5)
    assert mutation.main(["--seed", "5", "--mutants", "4"], checkout) == 0
    assert mutation.main(["--seed", "5", "--mutants", "6"], checkout) == 0
    report = capsys.readouterr().out
    assert "+ more" in report
    assert "6 mutants of 8 places: 0 caught (0%" in report
    again = ["--seed", "5", "--mutants", "5", "--again", "--at-least"]
    assert mutation.main([*again, "100"], checkout) == 0
    assert "+ more" not in capsys.readouterr().out
    assert ran == [every[:4], every[4:6], every[:5]]
    assert mutation.main(["--seed", "5", "--mutants", "6", "--at-least", "84"], checkout) == 1


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    child = f"sleep 60 & echo $! > {tmp_path / 'pid'}; wait"
    command = ["bash", "-c", f"setsid bash -c {shlex.quote(child)}"]
    status, _ = Commands().run(command, tmp_path, dict(os.environ), seconds=2)
    assert status is None
    pid = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        # Nobody may have waited for the dead.
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

"""Plugin of pytest that says which test, or which shared fixture, runs the lines of the moment.

It switches coverage's context in this process, in ranks that stay alive and in children of
multiprocessing; other processes find theirs in the environment, which coverage's configuration
reads as they start. Contexts are numbers; the log names them.
"""

from __future__ import annotations

import functools
import json
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coverage
import pytest

CONTEXT = "MUTATION_CONTEXT"
LOG = "MUTATION_LOG"
NO_TEST = "c0"


class InContext:
    """A function that runs in a test's context, in whichever process.

    Args:
        function: what runs.
        context: context of the test.
    """

    def __init__(self, function: Callable[..., Any], context: str) -> None:
        self._function, self._context = function, context

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the function and saves which lines it ran, as the process may be killed later."""
        measuring = coverage.Coverage.current()
        if measuring is None:
            return self._function(*args, **named)
        os.environ[CONTEXT] = self._context
        measuring.switch_context(self._context)
        try:
            return self._function(*args, **named)
        finally:
            with _nothing_lost():
                measuring.switch_context(NO_TEST)
                measuring.save()


@contextmanager
def _nothing_lost() -> Generator[None]:
    """Puts off a request to end until the block is done: what is saved by halves is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for number in asked[:1]:
            os.kill(os.getpid(), number)


class Recorder:
    """Writes which test each context is, how tests end, how long they take.

    Args:
        log: JSON lines are appended to it.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._numbers: dict[str, str] = {}
        self._current = NO_TEST
        self._in_fixtures = 0.0
        self._seconds = 0.0
        self._passed = True
        self._write(pid=os.getpid())

    def context(self) -> str:
        """Of what runs now."""
        return self._current

    @contextmanager
    def within(self, kind: str, name: str) -> Generator[None]:
        """Lines that run inside are those of this test or fixture."""
        before = self._current
        number = self._numbers.setdefault(f"{kind} {name}", f"c{len(self._numbers) + 1}")
        self._write(context=number, kind=kind, name=name)
        self._switch(number)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, context: str) -> None:
        self._current = os.environ[CONTEXT] = context
        measuring = coverage.Coverage.current()
        assert measuring is not None, "coverage does not run"
        measuring.switch_context(context)

    def _write(self, **record: Any) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(record) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        """One test, its fixtures and its end."""
        self._in_fixtures, self._seconds, self._passed = 0.0, 0.0, True
        _forget_results(str(item.config.rootpath))
        with self.within("test", item.nodeid):
            result = yield
        self._write(
            test=item.nodeid,
            passed=self._passed,
            seconds=round(self._seconds - self._in_fixtures, 3),
            fixtures=_shared_fixtures(item),
        )
        if nextitem is None or nextitem.path != item.path:
            measuring = coverage.Coverage.current()
            assert measuring is not None
            measuring.save()
            self._write(finished=item.nodeid.partition("::")[0])
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A skip or an expected failure is no pass: it can notice nothing."""
        self._seconds += report.duration
        self._passed &= report.passed and not hasattr(report, "wasxfail")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """What a fixture runs for several tests counts for each of them, not for the first."""
        if fixturedef.scope == "function":
            return (yield)
        name = _name(fixturedef, getattr(request, "param_index", 0))
        begin, inside_before = time.monotonic(), self._in_fixtures
        with self.within("fixture", name):
            try:
                return (yield)
            finally:
                seconds = time.monotonic() - begin
                own = seconds - (self._in_fixtures - inside_before)
                self._in_fixtures = inside_before + seconds
                self._write(fixture=name, seconds=round(own, 3))


def pytest_configure(config: pytest.Config) -> None:
    """Begins to record."""
    recorder = Recorder(Path(os.environ[LOG]))
    config.pluginmanager.register(recorder)
    _follow_children(recorder)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Follows live ranks, where the project has them."""
    ranks = sys.modules.get("support.ranks")
    (recorder,) = (p for p in session.config.pluginmanager.get_plugins() if type(p) is Recorder)
    if ranks is not None:
        run = ranks.Ranks.run

        def run_in_context(pool: Any, function: Any, *args: Any, **named: Any) -> Any:
            return run(pool, InContext(function, recorder.context()), *args, **named)

        ranks.Ranks.run = run_in_context


def _follow_children(recorder: Recorder) -> None:
    """Sets the contexts of children: those of a fork server have its environment, not a test's."""
    start = multiprocessing.process.BaseProcess.start
    kill = multiprocessing.process.BaseProcess.kill

    def start_in_context(process: Any) -> None:
        if process._target is not None:
            process._target = InContext(process._target, recorder.context())
        start(process)

    def kill_after_saving(process: Any) -> None:
        # Coverage saves its data on this signal, where Python's code runs or waits.
        process.terminate()
        process.join(10)
        kill(process)

    multiprocessing.process.BaseProcess.start = start_in_context  # type: ignore[method-assign]
    multiprocessing.process.BaseProcess.kill = kill_after_saving  # type: ignore[method-assign]


def _forget_results(root: str) -> None:
    """Empties caches of functions: each test runs the lines that it would run alone."""
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None)).startswith(root):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _shared_fixtures(item: pytest.Item) -> list[str]:
    assert isinstance(item, pytest.Function)
    found = []
    for argument in item.fixturenames:
        for fixture in item._fixtureinfo.name2fixturedefs.get(argument, ()):
            if fixture.scope != "function":
                indices = item.callspec.indices if hasattr(item, "callspec") else {}
                found.append(_name(fixture, indices.get(argument, 0)))
    return found


def _name(fixture: pytest.FixtureDef[Any], index: int) -> str:
    return f"{fixture.baseid}::{fixture.argname}[{index}]"

"""Fixtures that all tests share."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from support.pretraining import ROOT
from support.ranks import Chosen, Ranks

LONG = (
    *("tests/simgpu/test_simulated_verify", "tests/simgpu/", "tests/training/"),
    *("tests/megatron_patches/loop/", "tests/commands/", "tests/docs/test_commands"),
    *("tests/benchmarks/", "tests/prefill/", "tests/library/", "tests/examples/"),
    *("tests/inference/", "tests/megatron_patches/", "tests/transport/", "tests/launch/"),
)
"""How the paths of files begin that take long, those that take longest first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        choices=("collective", "shm"),
        default="collective",
        help="what moves rows in the tests of --distca and of core attention",
    )
    parser.addoption(
        "--no-ping-pong",
        action="store_true",
        help="run whole micro-batches in the tests of --distca, but in those of ping-pong itself",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="run all cases of parity, and storms, soaks and tables at their stated size, instead "
        "of a short part of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known, and lets random examples take their time on a busy machine."""
    config.addinivalue_line("markers", "full: runs with --full alone")
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what `--full` runs; where xdist hands files out, what takes long comes first."""
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="runs with --full"))
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Returns the place of a test's file among those that are handed out."""
    long = [at for at, begin in enumerate(LONG) if item.nodeid.startswith(begin)]
    return min(long, default=len(LONG))


HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


def _misses_megatron(error: str) -> bool:
    """Whether an error comes of Megatron's not being installed."""
    told = "No module named 'megatron", "needs megatron-core: `pip install"
    return not HAS_MEGATRON and any(each in error for each in told)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skips files that import Megatron, where it is not installed."""
    report = yield
    if report.failed and _misses_megatron(report.longreprtext):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, "Skipped: needs megatron-core")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Skips tests that turn out to need Megatron, on whatever rank, where it is not installed."""
    try:
        yield
    except Exception as error:
        if not _misses_megatron(str(error)):
            raise
        pytest.skip("needs megatron-core")


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether storms, soaks and tables run at their stated size."""
    return pytestconfig.getoption("--full")


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Live ranks for functions that need several processes."""
    chosen = Chosen(
        pytestconfig.getoption("--transport"), not pytestconfig.getoption("--no-ping-pong")
    )
    pool = Ranks(chosen)
    yield pool
    pool.close()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the ranks that commands start on CPUs be forks, since their imports take seconds."""
    from support.forks import start_process

    for module in ("distca.inference.rank_processes", "distca.commands.verify.ranks"):
        monkeypatch.setattr(f"{module}.start_process", start_process)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real dataset of the source files of this project, one document a file."""
    from distca.commands.prepare import main

    folder = tmp_path_factory.mktemp("corpus")
    inputs = ["--input", str(ROOT / "distca"), str(ROOT / "tests")]
    tokenizer = ["--tokenizer-type", "ByteLevelTokenizer"]
    # Compiled files are no text.
    for cache in (*ROOT.glob("distca/**/__pycache__"), *ROOT.glob("tests/**/__pycache__")):
        shutil.rmtree(cache, ignore_errors=True)
    assert main([*inputs, *tokenizer, "--output-prefix", str(folder / "source")]) == 0
    return str(folder / "source")

"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Chosen, Ranks


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


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Live ranks for functions that need several processes."""
    chosen = Chosen(
        pytestconfig.getoption("--transport"), not pytestconfig.getoption("--no-ping-pong")
    )
    pool = Ranks(chosen)
    yield pool
    pool.close()

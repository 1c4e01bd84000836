"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        choices=("collective", "shm"),
        default="collective",
        help="what moves rows in the tests of --distca and of core attention",
    )


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    """Live ranks for functions that need several processes."""
    pool = Ranks(pytestconfig.getoption("--transport"))
    yield pool
    pool.close()

"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Live ranks for functions that need several processes."""
    pool = Ranks()
    yield pool
    pool.close()

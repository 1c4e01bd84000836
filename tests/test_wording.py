"""Numbers and commands in messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from distca import wording
from distca.wording import counted, install, ordinal


def test_places_in_a_row() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)
    places = "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th"
    assert " ".join(map(ordinal, numbers)) == places


def test_an_extra_is_installed_from_where_the_package_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """These tests run in a checkout, which may be installed with `-e`."""
    assert install("plot") == "pip install -e '.[plot]', in the checkout of DistCA"
    # Installed without a checkout. Another package may leave its own file there.
    monkeypatch.setattr(wording, "_ABOVE", tmp_path)
    assert install("plot") == "pip install 'distca[plot]'"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert install("plot") == "pip install 'distca[plot]'"


def test_one_thing_is_singular_and_large_numbers_have_commas() -> None:
    assert [counted(number, "document") for number in (0, 1, 1234)] == [
        "0 documents",
        "1 document",
        "1,234 documents",
    ]

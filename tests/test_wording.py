"""Numbers and commands in messages."""

from __future__ import annotations

import importlib.metadata

import pytest

from distca.wording import counted, install, ordinal


def test_places_in_a_row() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)
    places = "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th"
    assert " ".join(map(ordinal, numbers)) == places


def test_an_extra_is_installed_from_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    assert install("plot") == "pip install 'distca[plot]'"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert install("plot") == "pip install -e '.[plot]', in the checkout of DistCA"


def test_one_thing_is_singular_and_large_numbers_have_commas() -> None:
    assert [counted(number, "document") for number in (0, 1, 1234)] == [
        "0 documents",
        "1 document",
        "1,234 documents",
    ]

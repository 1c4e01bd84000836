"""Numbers with their nouns, in messages."""

from __future__ import annotations

from distca.wording import counted


def test_one_thing_is_singular_and_large_numbers_have_commas() -> None:
    assert [counted(number, "document") for number in (0, 1, 1234)] == [
        "0 documents",
        "1 document",
        "1,234 documents",
    ]

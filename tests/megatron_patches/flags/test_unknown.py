"""Flags that there are not: one line that says what to give instead."""

from __future__ import annotations

import re

import pytest

from support.arguments import parse


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iter 5", "there is no --train-iter: did you mean --train-iters?"),
        ("--lr-decay-itres=5", "there is no --lr-decay-itres: did you mean --lr-decay-iters?"),
        ("--no-such-flag 1", "there is no --no-such-flag: --help lists all flags"),
        ("--distca-server x", "there is no --distca-server: did you mean --distca-servers?"),
        (
            "--no-such-flag --train-iter 5",
            "there is no --no-such-flag: --help lists all flags; "
            "there is no --train-iter: did you mean --train-iters?",
        ),
        ("5", "unrecognized arguments: 5"),
        (
            "--freeze-all-layers",
            "DistCA does not cover frozen layers: remove --freeze-all-layers",
        ),
    ],
)
def test_a_line_says_what_to_give(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(*flags.split())

"""Flags that the lean loop has not: one line that says what to give instead."""

from __future__ import annotations

import re

import pytest

from megatron_patches.flags.unknown import message_for
from support.arguments import parse

LEAN_HAS_NOT = "the lean loop has no "


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iter 5", "there is no --train-iter: did you mean --train-iters?"),
        ("--lr-decay-itres=5", "there is no --lr-decay-itres: did you mean --lr-decay-iters?"),
        ("--no-such-flag 1", "there is no --no-such-flag: --help lists all flags"),
        ("--fp16", LEAN_HAS_NOT + "--fp16: --training-loop megatron has it"),
        (
            "--lr-wsd-decay-iters 3",
            LEAN_HAS_NOT + "--lr-wsd-decay-iters: --training-loop megatron has it",
        ),
        (
            "--log-max-attention-logit",
            LEAN_HAS_NOT
            + "--log-max-attention-logit: --training-loop megatron has it, without --distca",
        ),
        (
            "--mtp-num-layers 1",
            "DistCA does not cover multi-token prediction: remove --mtp-num-layers",
        ),
        (
            "--mock-data",
            "DistCA does not cover made-up data, or phases:"
            " remove --mock-data, give files (`distca prepare` makes them)",
        ),
        (
            "--dsa-indexer-n-heads 2",
            LEAN_HAS_NOT + "--dsa-indexer-n-heads, and needs none: remove it. "
            "Refines attention of other kinds, which is refused",
        ),
        (
            "--no-mmap-bin-files",
            LEAN_HAS_NOT + "--no-mmap-bin-files, and needs none: remove it. There is no DataLoader "
            "and no cache: a thread makes micro-batches ahead",
        ),
        (
            "--fp16 --train-iter 5",
            LEAN_HAS_NOT + "--fp16: --training-loop megatron has it; "
            "there is no --train-iter: did you mean --train-iters?",
        ),
    ],
)
def test_a_line_says_what_to_give(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(*flags.split())


def test_a_value_without_a_flag() -> None:
    assert message_for(["5"], ["--train-iters"]) == "5 belongs to no flag"

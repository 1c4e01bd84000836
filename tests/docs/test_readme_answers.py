"""The README's job for which the answer is no, and figures that it shares with the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distca.commands import simulate

ROOT = Path(__file__).parents[2]


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def test_the_answer_may_be_no(capsys: pytest.CaptureFixture[str]) -> None:
    readme = words_of("README.md")
    ((flags, answer),) = re.findall(
        r"The answer may be no\. With `([^`]+)`, where lengths are equal, the answer is \"(.+? "
        r"which is simpler\.)\"",
        readme,
    )
    assert simulate.main(flags.split()) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == answer


def test_both_pages_say_the_same_of_faster_kernels() -> None:
    found = re.findall(
        r"With `--attention-tflops 640` DistCA is (\S+) \(.*? in this job, and (\S+) \(",
        words_of("docs/when_it_helps.md"),
    )
    assert len(found) == 1
    over_megatron, over_wlb_llm = found[0]
    assert (
        "With `--attention-tflops 640`, near FlashAttention 3's speed, the two ratios are "
        f"{over_megatron} and {over_wlb_llm}."
    ) in words_of("README.md")

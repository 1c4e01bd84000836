"""What a command line must have, and what contradicts itself, is said before anything is built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.arguments import GOOD, parse


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--save=", "--save is empty: give a path"),
        ("--load=", "--load is empty"),
        ("--load FILE", "is a file: give the folder"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 must be less than --train-iters 10"),
        (
            "--lr-warmup-iters 4 --lr-decay-iters 4",
            "--lr-warmup-iters 4 must be less than --lr-decay-iters 4",
        ),
        (
            "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
            "remove one of the two",
        ),
        (
            "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 5",
            "--moe-router-topk 5 is more than --num-experts 4",
        ),
    ],
)
@pytest.mark.parametrize("distca", [[], ["--distca"]], ids=["plain", "distca"])
def test_contradictions(flags: str, said: str, distca: list[str], tmp_path: Path) -> None:
    file = tmp_path / "corpus.bin"
    file.touch()
    with pytest.raises(ValueError, match=said):
        parse(*flags.replace("FILE", str(file)).split(), *distca)


def test_what_megatron_needs_a_package_for_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron-LM says so by a RuntimeError."""
    # Importing it fails then, whether it is installed or not.
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    flags = ["--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "1"]
    with pytest.raises(ValueError, match=r"^Megatron-LM refuses the flags: nvidia_resiliency_ext"):
        parse(*flags)


def test_samples_bound_the_warm_up_of_a_run_of_samples() -> None:
    with pytest.raises(ValueError, match="--lr-warmup-samples 40 must be less than --train-sam"):
        parse("--lr-warmup-samples", "40", length="--train-samples 40")
    parse("--lr-warmup-samples", "39", length="--train-samples 40")


@pytest.mark.parametrize("flag", ["--lr", "--micro-batch-size"])
def test_missing_flags_are_named_together(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = GOOD.index(flag)
    monkeypatch.setattr("support.arguments.GOOD", GOOD[:place] + GOOD[place + 2 :])
    with pytest.raises(ValueError, match=f"give {flag}, --train-iters or --train-samples: there"):
        parse(length="")
    with pytest.raises(ValueError, match=f"give {flag}: there is no default"):
        parse()


def test_a_run_that_only_evaluates_needs_no_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    place = GOOD.index("--lr")
    monkeypatch.setattr("support.arguments.GOOD", GOOD[:place] + GOOD[place + 2 :])
    parse("--skip-train")

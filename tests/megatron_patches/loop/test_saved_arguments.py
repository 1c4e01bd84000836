"""Flags of a checkpoint's run that differ from this run's are named."""

from __future__ import annotations

import logging
from argparse import Namespace

import pytest

from megatron_patches.loop.saved_arguments import check_model, saved_arguments
from support.arguments import parse


def of_run(*flags: str, rank: int = 0) -> Namespace:
    args = parse(*flags)
    args.rank = rank
    return args


WEIGHTS_ALONE = "--no-load-optim", "--finetune"


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("--num-layers 8", "--num-layers 4", "--num-layers 8 (now 4)"),
        (
            "--group-query-attention --num-query-groups 2",
            "",
            "--num-query-groups 2 (now 8)",
        ),
        ("", "--num-experts 4", "--num-experts None (now 4)"),
        ("--num-experts 2", "--num-experts 4", "--num-experts 2 (now 4)"),
        ("--softmax-type learnable", "", "--softmax-type learnable (now vanilla)"),
        ("", "--disable-bias-linear", "no --disable-bias-linear"),
        ("--swiglu", "", "--swiglu"),
    ],
)
def test_another_model_is_refused_by_the_flag(before, now, named) -> None:
    saved, args = of_run(*before.split()), of_run(*now.split())
    with pytest.raises(ValueError, match="another model, trained with") as refused:
        check_model(saved, args, "folder")
    assert named in str(refused.value)
    for more in WEIGHTS_ALONE:
        with pytest.raises(ValueError, match="another model"):
            check_model(saved, of_run(*now.split(), more), "folder")


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("", "--optimizer sgd", "--optimizer adam (now sgd)"),
        ("--bf16", "", "--bf16"),
        ("", "--bf16", "no --bf16"),
        ("", "--use-distributed-optimizer", "no --use-distributed-optimizer"),
        ("", "--decoupled-lr 1e-3", "no --decoupled-lr"),
        (
            "--num-experts 4",
            "--num-experts 4 --expert-model-parallel-size 2",
            "--expert-model-parallel-size 1 (now 2)",
        ),
        ("--no-save-optim", "", "--no-save-optim"),
    ],
)
def test_another_optimizer_is_refused_by_the_flag_unless_weights_load_alone(
    before, now, named
) -> None:
    saved = of_run(*before.split())
    with pytest.raises(ValueError, match=r"--no-load-optim$") as refused:
        check_model(saved, of_run(*now.split()), "folder")
    assert named in str(refused.value)
    for more in WEIGHTS_ALONE:
        check_model(saved, of_run(*now.split(), more), "folder")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--rotary-base 5000", "--rotary-base 10000 (now 5000)"),
        ("--window-size 64,0", "--window-size None (now (64, 0))"),
        ("--norm-epsilon 1e-6", "--norm-epsilon 1e-05 (now 1e-06)"),
        ("--softmax-type off-by-one", "--softmax-type vanilla (now off-by-one)"),
        ("--seed 7", "--seed 1234 (now 7)"),
        ("--adam-beta2 0.9", "--adam-beta2 0.999 (now 0.9)"),
    ],
)
def test_what_changes_silently_is_warned_of_once(flags, named, caplog) -> None:
    for rank in (0, 1):
        check_model(of_run(), of_run(*flags.split(), rank=rank), "folder")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert named in record.getMessage()


def test_equal_flags_and_those_that_a_version_lacks_say_nothing(caplog) -> None:
    older = of_run("--window-size", "64,0")
    older.window_size = [64, 0]
    del older.moe_router_topk, older.softmax_type, older.num_experts
    check_model(older, of_run("--window-size", "64,0"), "folder")
    # Without groups Megatron-LM has 1 there, which nobody reads.
    args = of_run()
    args.num_query_groups = 1
    check_model(of_run(), args, "folder")
    # Experts that ranks share may be shared by more.
    for more in (2, 4):
        flags = "--num-experts", "4", "--expert-model-parallel-size"
        check_model(of_run(*flags, "2"), of_run(*flags, str(more)), "folder")
    assert not caplog.records
    with pytest.raises(ValueError, match="no flags of the run"):
        saved_arguments({})

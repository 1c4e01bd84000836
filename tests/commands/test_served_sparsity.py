"""Flags of prefills from near to far: what they give, and what is wrong with them, in one line."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from distca.commands.command_line import Parser
from distca.commands.plan import main as plan_or_load
from distca.commands.served_sparsity import add_sparsity_flags, near_to_far, refuse_check
from distca.commands.serving_step import plan, simulate
from distca.plan import load_stepped_plan
from distca.schedule.serving.csps import Sparsity
from distca.schedule.serving.csps.pipeline import NearToFar

PREFILL = "prefill --new-tokens 4000 --context-parallel-size 8 --model llama-8b"
CSPS = f"{PREFILL} --prefill-strategy csps"


def strategy_of(*flags: str, tensor_parallel: int = 1, ranks: int = 8) -> NearToFar | None:
    """The strategy of flags, for a model of 5 layers of 4 key-value heads."""
    parser = Parser("generate", "", "")
    parser.add_argument("--prefill-strategy", default="csps")
    add_sparsity_flags(parser.add_argument_group("how"))
    args = parser.parse([*flags])
    return near_to_far(args, [None] * 5, 4, tensor_parallel, ranks, ranks)


def test_flags_give_levels_ratios_and_partitions(tmp_path: Path) -> None:
    plain = strategy_of()
    assert plain is not None
    assert not plain.sparsity.drops
    assert (plain.levels.count, plain.partitions) == (2, (2,))
    given = "--sparsity 0.2 --ranks-per-node 2 --nodes-per-rack 2 --micro-partitions 4,2".split()
    sparse = strategy_of(*given)
    assert sparse is not None
    assert (sparse.levels.count, sparse.partitions) == (4, (4, 2))
    assert sparse.sparsity == Sparsity.of_drop_ratio(0.2, 5, 4)
    of_both = strategy_of("--sparsity", "0.2,0.1")
    assert of_both is not None
    assert of_both.sparsity == Sparsity.of_drop_ratio(0.2, 5, 4, drop_of_queries=0.1)
    file = tmp_path / "sparsity.json"
    sparse.sparsity.save(file)
    # Tensor-parallel ranks have a head of keys each, or several have one.
    for size, heads in ((2, 4), (8, 8)):
        shared = strategy_of("--sparsity", str(file), tensor_parallel=size)
        assert shared is not None
        assert shared.sparsity == Sparsity.of_drop_ratio(0.2, 5, heads)
    assert strategy_of("--prefill-strategy", "pass-kv") is None


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    Sparsity.of_drop_ratio(0.2, 4, 4).save(small)
    for flags, message in (
        (["--sparsity", "-0.1"], "--sparsity -0.1: -0.1 of the rows can't be dropped"),
        (["--sparsity", "1"], "give 0 to below 1"),
        (["--sparsity", "nan"], "give 0 to below 1"),
        (["--sparsity", "0.2,1"], "--sparsity 0.2,1: 1.0 of the rows can't be dropped"),
        (["--sparsity", "0.2,0.1,0.1"], "does not exist: give a file of ratios"),
        (["--sparsity", "none.json"], "does not exist: give a file of ratios"),
        (["--sparsity", str(small)], "is of 4 layers of 4 key-value heads, but the model has 5"),
        (["--micro-partitions", "0"], "give a number of at least 1"),
        (["--micro-partitions", "2,x"], "give a number of at least 1"),
        (["--ranks-per-node", "0"], "a node needs at least one rank"),
        (["--ranks-per-node", "2", "--nodes-per-rack", "3"], "don't cover 8 ranks"),
        (["--prefill-strategy", "auto", "--sparsity", "0.2"], "needs --prefill-strategy csps"),
    ):
        with pytest.raises(ValueError, match=message):
            strategy_of(*flags)


def test_answers_that_drop_keys_are_not_held_against_dense_ones() -> None:
    args = argparse.Namespace(check=True, sparsity="0.2")
    with pytest.raises(ValueError, match="--check holds answers against dense attention"):
        refuse_check(args, strategy_of("--sparsity", "0.2"))
    refuse_check(args, strategy_of("--sparsity", "0"))
    refuse_check(args, "pass-kv")
    refuse_check(argparse.Namespace(check=False), strategy_of("--sparsity", "0.2"))


def test_plans_are_shown_saved_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    flags = f"{CSPS} --sparsity 0.5 --ranks-per-node 4"
    assert plan([*flags.split(), "--save", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "csps" in shown
    # Of 8 + 2 * 12 * 0.5 + 2 * 16 * 0.25 half pairs of 64, and of 34 parts of keys, 9 in each node,
    # 18 * 0.5 + 16 * 0.25.
    assert re.search(r"drops rows: 4[34]\.\d% of the pairs, 38\.\d% of the keys that", shown), shown
    read, _ = load_stepped_plan(file)
    assert read.drops
    assert not read.relays
    assert plan_or_load(["--load", str(file)]) == 0
    assert capsys.readouterr().out == shown
    seconds = []
    for drop in ("0", "0.5"):
        assert simulate([*CSPS.split(), "--sparsity", drop, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["simulated"]
        assert [*found] == ["csps"]
        seconds.append(found["csps"]["seconds"])
    assert seconds[1] < seconds[0]

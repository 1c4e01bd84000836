"""What `distca simulate prefill` and `decode` compare, choose, and say of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from distca.commands.serving_case import read_case
from distca.commands.serving_step import build_parser
from distca.inference.cuda_graphs import SIZES, capture_for
from distca.schedule.serving.scheduled import ScheduledTokens
from distca.simulate.requests.costs import PlannedCosts
from distca.simulate.serving import MOST_GRAPH_ROWS, PARTS
from support.commands import Command

SIZES_OF_MODEL = "--layers 3 --hidden-size 512 --kv-heads 8 --head-dim 64 --ffn-hidden-size 1024"
MODEL = [*SIZES_OF_MODEL.split(), "--heads", "8"]
LLAMA = "--model llama-8b".split()


@pytest.fixture
def simulate(capsys) -> Command:
    return Command("simulate", capsys)


def figures(simulate: Command, *flags: str) -> dict[str, Any]:
    return json.loads(simulate.run(*flags, "--json"))


def ranks(context: int, tensor: int = 1) -> list[str]:
    return f"--context-parallel-size {context} --tensor-parallel-size {tensor}".split()


def test_all_exact_strategies_are_compared(simulate: Command) -> None:
    """Each row is what its own flags give; the fastest and the choice of auto are marked."""
    turn = ["prefill", "--new-tokens", "20000", *MODEL]
    found = figures(simulate, *turn, *ranks(4))
    names = ["pass-kv", "pass-q", "all-gather", "sp-ntp", "runahead", "csps", "plain TP"]
    assert [*found["simulated"]] == names
    seconds = {name: each["seconds"] for name, each in found["simulated"].items()}
    assert found["fastest"] == min(seconds, key=seconds.__getitem__)
    for name in names:
        flags, layout = ["--prefill-strategy", name], ranks(4)
        if name == "runahead":
            flags += ["--partition", "searched"]
        if name == "plain TP":
            flags[1], layout = "pass-kv", ranks(1, 4)
        (alone,) = figures(simulate, *turn, *layout, *flags)["simulated"].items()
        assert alone[0] == name
        assert alone[1]["seconds"] == seconds[name]
    text = simulate.run(*turn, *ranks(4))
    marked = {line.split()[0]: line for line in text.splitlines() if line.endswith("fastest")}
    assert [*marked] == [found["fastest"]] or found["fastest"] == "plain TP"
    (auto,) = (line for line in text.splitlines() if line.endswith("auto"))
    assert auto.split()[0] == found["strategy"]
    assert "--context-parallel-size 1 --tensor-parallel-size 4 --prefill-strategy pass-kv" in text
    assert f"give --prefill-strategy {found['fastest']}" in text
    title = simulate.run(*turn, *ranks(4), "--prefill-strategy", "runahead").splitlines()[0]
    assert "0 cached; runahead;" in title


def test_what_heads_do_not_allow_is_said(simulate: Command) -> None:
    odd = [*SIZES_OF_MODEL.replace("--kv-heads 8", "--kv-heads 3").split(), "--heads", "6"]
    text = simulate.run("prefill", "--new-tokens", "2000", *odd, *ranks(4))
    assert "plain TP does not fit here: tensor-parallel size 4 does not divide 6 heads" in text
    assert not any(line.startswith("plain TP   ") for line in text.splitlines())


def test_one_gpu_has_a_row(simulate: Command) -> None:
    assert [
        *figures(simulate, "prefill", "--new-tokens", "900", *MODEL, *ranks(1))["simulated"]
    ] == ["one GPU"]


def test_a_token_over_cached_ones_is_a_decode_step(simulate: Command) -> None:
    """As in the engine, whatever strategy prefills have."""
    cached = ["--cached-tokens", "5000", *LLAMA, *ranks(4)]
    decode = figures(simulate, "decode", *cached)["simulated"]
    turn = ["prefill", "--new-tokens", "1", *cached]
    assert figures(simulate, *turn)["simulated"] == decode
    assert figures(simulate, *turn, "--prefill-strategy", "csps")["simulated"] == decode
    assert "is a decode step, as the engine runs it" in simulate.run(*turn)
    several = ["prefill", "--new-tokens", "1", "300", *cached]
    assert "The engine decodes them." in simulate.run(*several)
    prompts = ["prefill", "--new-tokens", "1", "300", *LLAMA, *ranks(4)]
    assert "The engine decodes them." not in simulate.run(*prompts)
    assert "--sparsity 0.2 needs --prefill-strategy csps" in simulate.refused(
        *turn, "--sparsity", "0.2"
    )


def test_the_simulated_choice_is_never_the_slower_one(simulate: Command) -> None:
    """The engine decides short prefills by the paper's rule, and the report says what it costs."""
    for tokens, cached in ((2, 500), (40, 5000), (4000, 0)):
        turn = f"prefill --new-tokens {tokens} --cached-tokens {cached} --cluster dgx-h200".split()
        found = figures(simulate, *turn, "--model", "llama-34b", *ranks(16))
        both = {name: found["simulated"][name]["seconds"] for name in ("pass-kv", "pass-q")}
        assert found["choices"]["simulated"] == min(both, key=both.__getitem__)
    turn = "prefill --new-tokens 2 --cached-tokens 500 --cluster dgx-h200 --model llama-34b".split()
    text = simulate.run(*turn, *ranks(16))
    slower = "pass-q, predicted 1.58 times as long"
    assert f"--selector paper chooses {slower}" in text
    assert f"it would choose {slower}." in text


def test_launches_of_decode_steps_are_the_engine_s(simulate: Command) -> None:
    """A graph ends before attention among ranks. It holds no collective. Its rows are limited."""
    assert SIZES[-1] == MOST_GRAPH_ROWS
    model = cast(Any, SimpleNamespace(tensor_parallel_size=2))
    assert capture_for(model, torch.device("cuda"), enforce_eager=False) is None
    step = ["decode", "--cached-tokens", "1000", *LLAMA]

    def host_ms(*flags: str) -> float:
        found = figures(simulate, *step, *flags)["simulated"]["pass-q"]
        return 1e3 * found["spent_seconds"]["host"]

    assert host_ms(*ranks(1)) == pytest.approx(1.5)
    # 32 layers of 0.65 ms, from which GPUs' own time is taken off.
    for layout in (ranks(4), ranks(1, 8), [*ranks(1), "--sequences", "257"]):
        assert host_ms(*layout) > 3
        assert host_ms(*layout, "--cuda-graphs", "whole") == pytest.approx(1.5)
    four, eight = (simulate.run(*step, *ranks(number)) for number in (4, 8))
    said = "Launches decide: hosts take 20.80 ms for 32 layers, 0.65 ms each"
    assert said in four
    assert said in eight
    assert "so CUDA graphs hold layers without their attention. --cuda-graphs whole" in four
    assert "hosts take 29.44 ms for 32 layers, 0.92 ms each" in simulate.run(*step, *ranks(1, 8))
    assert "collectives of tensor parallelism" in simulate.run(*step, *ranks(1, 8))
    many = simulate.run(*step, *ranks(1), "--sequences", "257")
    assert "no CUDA graphs have more than 256 rows of a rank" in many
    whole = simulate.run(*step, *ranks(4), "--cuda-graphs", "whole")
    assert "DistCA's engine has none: --cuda-graphs engine" in whole
    assert "Launches decide" not in whole
    assert "and in DistCA's engine." in simulate.run(*step, *ranks(1), "--cuda-graphs", "whole")
    ideal = [*step, *ranks(4), "--baseline-ideal"]
    assert "leave out --cuda-graphs whole" in simulate.refused(*ideal, "--cuda-graphs", "whole")


def test_many_prompts_on_ranks_of_their_own(simulate: Command, tmp_path: Path) -> None:
    """Seconds of both ways are those of an iteration of the engine, which has blocks of 128."""
    lengths, block = [900, 40_000, 300, 2000, 700, 1100], 128
    (path := tmp_path / "lengths.json").write_text(json.dumps(lengths))
    layout = [*LLAMA, *ranks(4)]
    turn = ["prefill", "--lengths", str(path), *layout]
    given = ["prefill", "--new-tokens", *map(str, lengths), *layout]
    found = figures(simulate, *turn)["simulated"]
    assert figures(simulate, *given)["simulated"] == found
    args = build_parser("simulate", "prefill").parse([*given[1:], "--prefill-strategy", "tiles"])
    case = read_case(args, "prefill")
    assert case.tiles is not None
    homes = case.new.rank.tolist()
    assert homes == [0, 1, 2, 3, 2, 0]
    feeds = [
        ScheduledTokens(number, 0, tokens, np.full(-(-tokens // block), homes[number]))
        for number, tokens in enumerate(lengths)
    ]
    for name, strategy in (("data-parallel", "pass-kv"), ("tiles", case.tiles)):
        engine = PlannedCosts(case.costs, 4, block, cast(Any, strategy))
        assert found[name]["seconds"] == pytest.approx(engine.seconds(feeds, ()), rel=1e-6)
    assert found["tiles"]["seconds"] < 0.8 * found["data-parallel"]["seconds"]
    # Earlier tokens of a prompt are on its rank, so that nothing travels for a short turn.
    turn = ["prefill", "--new-tokens", "50", "60", "--cached-tokens", "700", *layout]
    of_turn = figures(simulate, *turn)["simulated"]["data-parallel"]
    assert not any(map(sum, of_turn["bytes_sent"].values()))


@pytest.mark.parametrize(
    "flags",
    [
        "--new-tokens 99999999999999999999999",
        "--new-tokens 10000000000 --context-parallel-size auto",
        "--new-tokens 4000000000 --context-parallel-size 1",
        "--cached-tokens 9000000000000000000",
        "--new-tokens 2147483648 --cached-tokens 1",
    ],
)
def test_too_many_tokens_are_refused(simulate: Command, flags: str) -> None:
    turn = ["prefill", "--new-tokens", "10", *LLAMA, *ranks(2), *flags.split()]
    assert "give at most 2,147,483,648" in simulate.refused(*turn)


def test_what_else_is_refused(simulate: Command) -> None:
    turn = ["prefill", "--new-tokens", "10", *LLAMA]
    assert "5000: give at most 1,024" in simulate.refused(*turn, *ranks(5000))
    many = ["--new-tokens", "2000000000", "--context-parallel-size", "auto"]
    assert "at most 1,024 are planned" in simulate.refused(*turn, *many)
    step = ["decode", "--cached-tokens", "1000000000000000", *LLAMA, *ranks(2)]
    assert "give at most 2,147,483,648" in simulate.refused(*step)
    pass_kv = [*turn, *ranks(2), "--prefill-strategy", "pass-kv"]
    for flag, value in (("--max-ttft", "1.0"), ("--max-recall-loss", "0.1")):
        why = f"{flag} {value} needs --prefill-strategy csps"
        assert why in simulate.refused(*pass_kv, flag, value)
    why = "--selector paper needs --prefill-strategy auto"
    assert why in simulate.refused(*pass_kv, "--selector", "paper")


def test_columns_never_touch(simulate: Command) -> None:
    """Cells of a prefill that takes weeks are apart, and under their titles."""
    turn = ["prefill", "--new-tokens", "2000000000", *LLAMA, *ranks(8)]
    lines = simulate.run(*turn, "--prefill-strategy", "pass-kv").splitlines()
    titles = ["ms", "computes", "waits", "MB", "sent", "GB", "a", "GPU"]
    headings = (titles, [*PARTS], "step kernels us links us MB there MB back".split())
    for heading, cells in zip(headings, (6, 7, 5), strict=True):
        row = next(number for number, line in enumerate(lines) if line.split() == heading)
        assert len(lines[row + 1].removesuffix("out of memory").split()) == cells
        assert "," in lines[row + 1]

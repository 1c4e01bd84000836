"""`--context-parallel-size auto`: one rank fewer would have too little room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distca.commands import fewest_ranks, generate
from distca.commands.fewest_ranks import ranks_for_prompts
from distca.inference.models import ServedModel, read_model
from support.commands import Command
from support.small_models import save_small_model

BLOCK_BYTES = 12_288
"""Keys and values of 16 tokens in three layers of two heads of 16 elements, in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = save_small_model("llama", tmp_path_factory.mktemp("model"))
    return read_model(str(folder), torch.float32)


@pytest.mark.parametrize(
    ("flags", "unit"), [("", 1), ("--ranks-per-node 2 --nodes-per-rack 2 --sparsity 0.2", 4)]
)
def test_a_simulated_prompt_has_room(capsys, flags: str, unit: int) -> None:
    """Whole racks, if there are any."""
    simulate = Command("simulate", capsys)
    given = "prefill --new-tokens 2000000 --model llama-8b --prefill-strategy csps --json".split()
    given += flags.split()

    def run(ranks: str) -> dict:
        found = simulate.run(*given, "--context-parallel-size", ranks)
        return json.loads(found)["simulated"]["csps"]

    found = run("auto")
    ranks = len(found["memory_bytes"])
    assert found["fits"]
    assert ranks > unit
    assert ranks % unit == 0
    assert not run(str(ranks - unit))["fits"]
    shown = [flag for flag in given if flag != "--json"]
    plan = Command("plan", capsys).run(*shown, "--context-parallel-size", "auto")
    assert f"on {ranks} ranks" in plan


def test_prompts_have_room(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewest_ranks, "_processes", lambda: 4)

    def found(blocks: int, *flags: str) -> int:
        given = f"--block-size 16 --max-tokens 1 --kv-cache-memory-bytes {blocks * BLOCK_BYTES}"
        args = generate.build_parser().parse([model.path, *given.split(), *flags])
        return ranks_for_prompts(args, model, [3, 100, 50])

    assert [found(blocks) for blocks in (7, 6, 4, 3, 2)] == [1, 2, 2, 3, 4]
    # An answer's last token is never fed: 100 and 12 fill seven blocks.
    assert found(7, "--max-tokens", "13") == 1
    assert found(7, "--max-tokens", "14") == 2
    with pytest.raises(ValueError, match=r"need 86,016 bytes .*, and 4 ranks have 12,288"):
        found(1)
    with pytest.raises(ValueError, match="raise --kv-cache-memory-bytes"):
        found(3, "--tensor-parallel-size", "2")


def test_what_auto_cannot_go_by_is_refused(capsys, model: ServedModel, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2, 3]]")
    auto = ["--context-parallel-size", "auto"]
    answered = [model.path, "--prompt-ids", str(ids), *auto]
    room = ["--kv-cache-memory-bytes", "1000000"]
    large = "--new-tokens 9 --model llama-405b".split()
    for name, flags, why in (
        ("generate", answered, "give --kv-cache-memory-bytes, and --prompt or --prompt-ids"),
        ("generate", [*answered, *room, "--prefill-strategy", "runahead"], "parts are unequal"),
        ("simulate", ["prefill", *large, *auto], "weights take "),
        ("plan", ["prefill", *large, "--context-parallel-size", "x"], "give a number, or auto"),
    ):
        assert why in Command(name, capsys).refused(*flags), flags

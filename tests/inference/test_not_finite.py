"""Models whose logits are not finite: no answer is made of them, wherever an answer is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.inference.finite import Place, first_of_all_ranks
from distca.inference.messages import Completion, RequestOutput
from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams, TokenLogprobs, UnusableLogitsError
from distca.inference.verify import compare
from support.byte_tokenizer import save_chat_model
from support.commands import Command
from support.engines import one_process, run_on_a_rank, settings_of, tokens
from support.ranks import Ranks
from support.small_models import save_small_model, spoil

pytestmark = pytest.mark.usefixtures("forked_ranks")

NAN, INFINITE = float("nan"), float("inf")
SPOILT = 77
"""A token whose embedding Gemma scales to infinity."""
DRAWN = SamplingParams(temperature=0.7, top_k=2, top_p=0.9, min_p=0.1)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7), DRAWN])
def test_unusable_logits_are_refused_and_masked_ones_are_not(sampling: SamplingParams) -> None:
    for logits, what in (
        ([0.0, NAN, 1.0], "NaN"),
        ([NAN, INFINITE, -INFINITE], "NaN"),
        ([0.0, INFINITE, 1.0], "infinite"),
        ([-INFINITE] * 3, "all minus infinity"),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises(UnusableLogitsError, match=f"the logits are {what}"):
                sampling.choose(torch.tensor(logits, dtype=dtype), 0, 0)
        with pytest.raises(UnusableLogitsError, match=f"the logits are {what}"):
            TokenLogprobs.of(torch.tensor(logits), 0, 0)
    masked = torch.tensor([-INFINITE, 1.0, -INFINITE, 1.5, -INFINITE])
    assert {sampling.choose(masked, 0, position) for position in range(50)} <= {1, 3}
    assert TokenLogprobs.of(masked, 0, 2).token == -INFINITE
    # Of several highest logits the first one is taken, as ever.
    tied = torch.tensor([1.0, 3.0, 2.0, 3.0])
    assert SamplingParams().choose(tied, 0, 0) == int(tied.argmax()) == 1


def test_a_temperature_next_to_zero_takes_the_likeliest_token() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert SamplingParams(temperature=1e-320).choose(logits, 0, 0) == 1


def save_gemma(folder: Path, **changes: Any) -> Path:
    """Writes a model whose logits are NaN after `SPOILT`, though its weights are finite."""
    changes = {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": False, **changes}
    model = save_small_model("gemma3_text", folder, **changes)
    spoil(model, "model.embed_tokens.weight", 3e38, SPOILT)
    return model


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must fail, and returns all that it wrote to standard error."""

    def run(name: str, *arguments: str) -> str:
        # Saving a model shows its progress.
        capsys.readouterr()
        return Command(name, capsys).refused(*arguments)

    return run


def first_place(places: list[Place | None]) -> Place | None:
    return first_of_all_ranks(places[dist.get_rank()])


@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([None, (3, "norm"), (2, "mlp")], (2, "mlp")),
        ([(7, "norm"), None], (7, "norm")),
        ([None, None], None),
        ([(1, "mlp")], (1, "mlp")),
    ],
)
def test_all_ranks_name_the_first_place_of_any(
    ranks: Ranks, places: list[Place | None], first: Place | None
) -> None:
    assert ranks.run(first_place, places, world_size=len(places)) == [first] * len(places)


@pytest.mark.parametrize(
    ("name", "value", "flags", "said"),
    [
        (
            "model.layers.1.mlp.down_proj.weight",
            3e38,
            "--context-parallel-size 2 --dtype bfloat16",
            "NaN: the output of model.layers.1.mlp.down_proj is not finite in bfloat16",
        ),
    ],
)
def test_generate_names_the_prompt_and_the_layer(
    refused: Refused, tmp_path: Path, name: str, value: float, flags: str, said: str
) -> None:
    """Finite weights whose sums are too large; others are refused as they are read."""
    model = save_chat_model(tmp_path)
    spoil(model, name, value)
    line = refused("generate", str(model), "--prompt", "The sky is", *flags.split())
    assert line == (
        f"distca generate: prompt 0: no token can be chosen, since the logits are {said}\n"
    )


def test_generate_names_the_one_prompt_that_fails(refused: Refused, tmp_path: Path) -> None:
    model = save_gemma(tmp_path)
    ids = tmp_path / "ids.json"
    prompts = [[1, 2, 3], [4] * 30, [5, SPOILT, *[6] * 20], [7]]
    ids.write_text(json.dumps(prompts))
    flags = "--context-parallel-size 2 --json".split()
    line = refused("generate", str(model), "--prompt-ids", str(ids), *flags)
    assert line.startswith("distca generate: prompt 2: no token can be chosen")
    assert line.endswith("the output of model.embed_tokens is not finite in float32\n")


def test_a_conversation_is_named_as_such(refused: Refused, tmp_path: Path) -> None:
    model = save_chat_model(tmp_path)
    spoil(model, "model.layers.2.mlp.down_proj.weight", 3e38)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps([{"role": "user", "content": "Hello"}]))
    line = refused("generate", str(model), "--conversations", str(chats))
    assert line.startswith("distca generate: conversation 0: no token can be chosen")


def test_a_check_does_not_hold_against_nan(tmp_path: Path) -> None:
    """As where one process's own attention fails, and ours does not."""
    folder = save_small_model("llama", tmp_path)
    spoil(folder, "model.layers.2.mlp.down_proj.weight", 3e38)
    for dtype in (torch.float32, torch.bfloat16):
        model = read_model(str(folder), dtype)
        answer = Completion([1], logits=[torch.zeros(model.vocab_size)])
        found = compare(model, [RequestOutput([1, 2, 3], [answer])], greedy=True)
        assert not found.holds
        assert found.line.endswith("NOT EQUAL")


def test_tune_sparsity_measures_no_nan(refused: Refused, tmp_path: Path) -> None:
    folder = save_gemma(tmp_path, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    prompts, file = tmp_path / "prompts.json", tmp_path / "calibration.json"
    ids = [[each % SPOILT for each in range(n, 330 + n)] for n in range(4)]
    ids[2][100] = SPOILT
    prompts.write_text(json.dumps(ids))
    flags = ["--context-parallel-size", "4", "--samples", "2", "--output", str(file)]
    line = refused("tune", "sparsity", str(folder), "--prompts", str(prompts), *flags)
    assert line == ("distca tune: prompt 2 cannot be measured, since the logits are NaN\n")
    assert not file.exists()


def test_an_engine_fails_the_request_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Other requests are answered, also those whose prompts begin alike, and no block is left."""
    folder = save_gemma(tmp_path)
    prompts = [[each % SPOILT for each in tokens(30, n)] for n in range(4)]
    prompts[1] = [*prompts[0][:20], SPOILT, 5, 6]
    prompts[2] = [SPOILT]
    fails = {1: "no token can be chosen, since the logits are NaN"}
    fails[2] = fails[1]
    # With and without log-probabilities of the prompt's tokens.
    for scored in (False, True):
        submits: list[tuple[Any, ...]] = [
            (n, prompt, SamplingParams(max_tokens=3), Penalties(), 2, None, scored)
            for n, prompt in enumerate(prompts)
        ]
        settings = settings_of(str(folder), 2, 16)
        answered = ranks.run(run_on_a_rank, settings, 60, submits, 0, 0, world_size=2)[0]
        assert answered.failed == fails
        assert answered.tokens.keys() == answered.tokens.keys() - fails.keys() == {0, 3}
        loaded = read_model(str(folder), torch.float32).load(torch.device("cpu"), "eager")
        for number in (0, 3):
            assert answered.tokens[number] == one_process(loaded, submits[number][:4])
        assert answered.ranks == [(60, 0, 0)] * 2

"""Several answers to a prompt, which is computed once, and log-probabilities of its own tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams
from support.engines import BLOCK, one_process, run_on_a_rank, settings_of, tokens
from support.ranks import Ranks
from support.small_models import save_small_model

ANSWERS, NEW = 4, 5


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once(ranks: Ranks, tmp_path: Path, caching: bool) -> None:
    """Answers are one process's, and so are log-probabilities; the rest shares what is computed."""
    path = str(save_small_model("llama", tmp_path))
    settings = settings_of(path, 2, 16, prefix_caching=caching)
    prompt = tokens(42, 3)
    sampling = SamplingParams(max_tokens=NEW, temperature=0.9, seed=3)
    submits = [
        (
            choice,
            prompt,
            sampling,
            Penalties(),
            2,
            0 if choice else None,
            not choice,
        )
        for choice in (1, 2, 3, 0)
    ]
    answered = ranks.run(run_on_a_rank, settings, 60, submits, 0, 0, world_size=2)[0]
    model = read_model(path, torch.float32)
    loaded = model.load(torch.device("cpu"), "eager")
    for submit in submits:
        assert answered.tokens[submit[0]] == one_process(loaded, submit[:4])
    # Of each other answer the block that is not full, and the token that is fed last.
    others = (ANSWERS - 1) * (len(prompt) % BLOCK)
    assert answered.numbers["computed"] == len(prompt) + others + ANSWERS * (NEW - 1)
    assert answered.ranks == [(60, 0, 0)] * 2
    with torch.no_grad():
        expected = loaded(torch.tensor([prompt])).logits[0].double().log_softmax(1)
    (scores,) = answered.scores.values()
    assert len(scores) == len(prompt) - 1
    for position, found in enumerate(scores, 1):
        row = expected[position - 1]
        assert found.token == pytest.approx(float(row[prompt[position]]), abs=1e-4)
        assert [token for token, _ in found.top] == row.topk(2).indices.tolist()

"""Broken Llamas are imported as transformers reads them, or refused in one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from support.broken_checkpoints import break_checkpoint
from support.converted import add_tokenizer, converted_logits
from support.forks import forking
from support.ranks import forget_megatron
from support.small_models import VOCABULARY, save_multimodal_model, save_small_model

TOKENS = list(range(3, 43))


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A fresh process for the command: saving starts children, which `ranks` may not have."""
    with ProcessPoolExecutor(1, forking()) as pool:
        yield pool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small Llamas with tokenizers; one of them sees images, too."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "llama": save_small_model("llama", folder),
        "tied llama": save_small_model("llama", folder / "tied", tie_word_embeddings=True),
        "llava": save_multimodal_model("llava", folder),
    }
    for each in made.values():
        add_tokenizer(each, VOCABULARY)
    return made


def outcome(llama: Path, work: Path) -> torch.Tensor | tuple[int, str]:
    """Logits of what a folder is imported as, or the command's exit status and error."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            return converted_logits(llama, work, TOKENS)
        except SystemExit as ended:
            with contextlib.suppress(AssertionError):
                forget_megatron()
            return int(str(ended.code)), told.getvalue()


@torch.no_grad()
def reference(folder: Path) -> torch.Tensor:
    """Logits of transformers' own model of the whole checkpoint."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    if (sees := transformers.AutoConfig.from_pretrained(folder).model_type) != "llama":
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(
        # What is not loaded may be of another shape.
        folder,
        dtype=torch.float32,
        ignore_mismatched_sizes=sees != "llama",
    )
    logits: torch.Tensor = model.eval()(torch.tensor([TOKENS])).logits[0]
    return logits


def test_a_hundred_broken_checkpoints(process, models, tmp_path: Path, full: bool) -> None:
    outcomes = set()
    for seed in range(100 if full else 25):
        name = list(models)[seed % len(models)]
        folder, work = tmp_path / str(seed), tmp_path / f"work-{seed}"
        way, refused = break_checkpoint(models[name], folder, seed)
        # What a run trains must be what its flags say, and these tie embeddings.
        refused = refused or (way == "other_tying" and name != "tied llama")
        told = f"{seed}: {way} of {name}"
        found = process.submit(outcome, folder, work).result(timeout=600)
        if isinstance(found, torch.Tensor):
            assert not refused, told
            torch.testing.assert_close(found, reference(folder), rtol=1e-4, atol=1e-5, msg=told)
        else:
            assert refused, f"{told}: {found}"
            assert found[0] == 2
            # Where it takes more than two seconds, lines of progress come first.
            lines = found[1].splitlines()
            lines = [line for line in lines if not re.match(r"distca convert: \d+:\d\d, ", line)]
            assert len(lines) == 1, f"{told}: {found}"
            assert lines[0].startswith("distca convert: ")
        outcomes.add(refused)
    assert outcomes == {True, False}

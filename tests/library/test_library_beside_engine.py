"""The library and the engine register attentions of their own with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from distca.inference.defaults import configure
from distca.inference.llm import LLM
from distca.inference.models import read_model
from distca.inference.sampling import SamplingParams
from distca.library import hugging_face
from support.small_models import save_small_model


def test_the_engine_answers_after_the_library_registered(tmp_path: Path) -> None:
    """In one process, as where rollouts are checked by `LLM`."""
    folder = str(save_small_model("llama", tmp_path))
    hugging_face.register()
    llm = LLM(configure(read_model(folder, torch.float32), 1))
    try:
        (answer,) = llm.generate([list(range(3, 43))], SamplingParams(max_tokens=3))
    finally:
        torch.distributed.destroy_process_group()
    assert len(answer.outputs[0].token_ids) == 3

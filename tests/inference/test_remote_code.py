"""Code of a model's folder runs where it is allowed to, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from distca.inference.models import load_tokenizer, read_model
from support.byte_tokenizer import save_chat_model


def test_code_of_a_folder_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path)
    traces = []
    for file, entry in (("config", "AutoConfig"), ("tokenizer_config", "AutoTokenizer")):
        trace, path = tmp_path / file, folder / f"{file}.json"
        base = "LlamaConfig" if file == "config" else "PreTrainedTokenizerFast"
        (folder / f"own_{file}.py").write_text(
            f"from pathlib import Path\nfrom transformers import {base}\n"
            f"Path({str(trace)!r}).touch()\n\n\nclass Own({base}):\n    pass\n"
        )
        name = f"own_{file}.Own"
        found = json.loads(path.read_text())
        found["auto_map"] = {entry: name if file == "config" else [None, name]}
        if file == "config":
            found["auto_map"]["AutoModelForCausalLM"] = "own_model.OwnModel"
        path.write_text(json.dumps(found))
        traces.append(trace)
    (folder / "own_model.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .own_config import Own\n\n\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = Own\n"
    )
    for trusted in (False, True):
        model = read_model(str(folder), torch.float32, trust_remote_code=trusted)
        kind = type(model.load(torch.device("cpu"), "eager")).__name__
        assert kind == ("OwnModel" if trusted else "LlamaForCausalLM")
        load_tokenizer(str(folder))
        # A tokenizer's code never runs.
        assert [trace.exists() for trace in traces] == [trusted, False]

"""`--dtype`: what the machine's kernels are made for, and nothing that they lack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from distca.commands.engine_flags import served_dtype
from distca.commands.main import main

COMMANDS = [
    "generate no-model --prompt A --dtype float32",
    "prefill no-model --dtype float32",
    "tune groups no-model --context-parallel-size 2 --output DIR/times.json --dtype float32",
    "tune partitions no-model --context-parallel-size 2 --output DIR/table.json --dtype float32",
    "tune sparsity no-model --context-parallel-size 2 --prompts none --output DIR --dtype float32",
    "profile --output DIR/profile.json --dtype fp32",
]


@pytest.mark.parametrize("gpus", [False, True])
def test_default_is_what_the_kernels_have(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert served_dtype(None) == ("bfloat16" if gpus else "float32")
    assert served_dtype("bfloat16") == "bfloat16"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: " ".join(each.split()[:2]))
def test_float32_is_refused_on_gpus_before_a_model_is_read(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        main(command.replace("DIR", str(tmp_path)).split())
    told = capsys.readouterr().err
    assert re.search(r": --dtype (float32|fp32): attention kernels of GPUs .* leave the flag", told)

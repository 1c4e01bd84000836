"""What `distca convert` refuses before it reads weights, or ends with one line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.convert.to_megatron import to_megatron
from support.converted import convert, refused
from support.forks import ROOT, forking
from support.small_families import save_family, small_config


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A fresh process for the commands: saving starts children, which `ranks` may not have."""
    with ProcessPoolExecutor(1, forking()) as pool:
        yield pool


HEADS = "num_attention_heads in config.json is"
LAYERS = "num_hidden_layers in config.json is"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is no object of JSON"),
        ([], "config.json is no object of JSON"),
        ({"num_attention_heads": 0}, f"{HEADS} 0: it must be above 0"),
        ({"text_config": {"num_attention_heads": -1}}, f"{HEADS} -1: it must be above 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads in config.json is 0: it must be above 0"),
        ({"num_hidden_layers": 10**6}, f"{LAYERS} 1000000: it must be at most 1000"),
        ({"num_hidden_layers": True}, "no model can be read from .* got bool"),
        ({"rope_parameters": {"rope_theta": 1e300, "rope_type": "default"}}, r"is 1e\+300: only"),
    ],
)
def test_configurations_of_no_model(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, dict):
        content = small_config("llama").to_dict() | content
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        to_megatron(tmp_path, tmp_path / "checkpoint", bf16=True)


def test_files_that_are_read_beside_a_configuration(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    for sample, message in (("5,301", "gives 301 as a token: .* ids below 301"), ("", "no token")):
        with pytest.raises(ValueError, match=message):
            to_megatron(tmp_path, tmp_path / "checkpoint", bf16=True, sample=sample)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json cannot be read: it is no object"):
        to_megatron(tmp_path, tmp_path / "checkpoint", bf16=True)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": print}))
    with pytest.raises(ValueError, match="cannot be read: it is no pickle of tensors alone: down"):
        to_megatron(tmp_path, tmp_path / "checkpoint", bf16=True)
    assert not (tmp_path / "checkpoint").exists()


def refused_back(work: Path) -> list[str]:
    """What is said of samples, of another family, and of a broken file beside a checkpoint."""
    convert(work / "llama", "--to", work / "checkpoint")
    back = ["--checkpoint", work / "checkpoint", "--to", work / "back"]
    said = [refused(*back, "--check", sample) for sample in ("301", "5, 999")]
    said.append(refused(*back, "--hf-model", work / "mixtral"))
    settings = work / "checkpoint" / "tokenizer" / "generation_config.json"
    for content in ("{", "[]"):
        settings.write_text(content)
        said.append(refused(*back))
    settings.write_text('{"do_sample":  true}')
    convert(*back, "--check", "300,5")
    return [*said, (work / "back" / "generation_config.json").read_text()]


def test_what_cannot_be_converted_back(process, tmp_path: Path) -> None:
    for family in ("llama", "mixtral"):
        save_family(family, tmp_path / family)
    said = process.submit(refused_back, tmp_path).result(timeout=200)
    messages = [
        "'301' gives 301 as a token: give text, or ids below 301",
        "'5, 999' gives 999 as a token",
        "the model is not that of a mixtral: it was trained with ",
        "generation_config.json cannot be read (",
        "generation_config.json is no object of JSON, {...}: correct or remove it",
        '{"do_sample":  true}',
    ]
    for line, message in zip(said, messages, strict=True):
        assert message in line


def test_the_reason_is_the_last_line_on_a_full_disk(tmp_path: Path) -> None:
    save_family("llama", tmp_path / "model")
    small = f"ulimit -f 50; trap '' XFSZ; exec {sys.executable} -m megatron_patches.convert"
    ended = subprocess.run(
        ["bash", "-c", f'{small} "$@"', "-", tmp_path / "model", "--to", tmp_path / "checkpoint"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.endswith(f"; --to {tmp_path}/checkpoint stays as it was\n"), ended.stderr

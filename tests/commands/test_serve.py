"""`distca serve` refuses what cannot work with a line, before any process starts."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from support.byte_tokenizer import save_chat_model
from support.commands import Command
from support.small_models import save_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_chat_model(tmp_path_factory.mktemp("served")))


def test_bad_input_ends_in_a_line(capsys, model: str, tmp_path: Path) -> None:
    command = Command("serve", capsys)
    bare, other = save_small_model("llama", tmp_path / "bare"), tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "keys").write_text("\n\n")
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        port = taken.getsockname()[1]
        refused = command.refused(model, "--port", str(port))
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in refused
        assert "choose another --host or --port" in refused
    for flags, why in (
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:0"),
        (["--port", "70000"], "give 0 to 65535"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key-file", str(tmp_path / "keys")], "has no key: write one a line"),
        (["--api-key-file", str(tmp_path / "none")], "No such file"),
        (["--chat-template", str(tmp_path / "none")], "there is no such file"),
        (["--context-parallel-size", "0"], "give at least 1"),
        (["--tensor-parallel-size", "3"], "neither divides the model's 2"),
        (["--tensor-parallel-size", "0"], "give at least 1"),
        (["--cp-kv-cache-interleave-size", "24"], "is no multiple of --block-size 16"),
        (["--max-num-seqs", "0"], "give at least 1"),
        (["--max-num-batched-tokens", "63"], "raise --max-num-batched-tokens"),
        (["--max-queued-requests", "-1"], "give 0 or more"),
        (["--max-model-len", "5000"], "the model has 4,096 positions"),
        (["--kv-cache-memory-bytes", "1000"], "and there are 0: raise --kv-cache-memory-bytes"),
        (
            ["--kv-cache-memory-bytes", str(127 * 12288), "--context-parallel-size", "2"],
            "a sequence of 4,096 tokens needs 1,572,864 bytes of keys and values on each of 2 "
            "ranks, and there are 1,560,576",
        ),
        (["--gpu-memory-utilization", "0"], "give more than 0, at most 1"),
        (["--step-timeout", "nan"], "give more than 0"),
        (["--prefill-strategy", "none"], "none: choose from pass-kv, pass-q, auto"),
        (
            ["--prefill-strategy", "sp-tp", "--attention-servers", "1"],
            "give --tensor-parallel-size 2 and --context-parallel-size 1",
        ),
        (["--max-modellen", "9"], "is --max-model-len meant?"),
    ):
        # A flag that comes later wins.
        assert why in command.refused(model, "--port", "0", *flags), flags
    for folder, why in (
        (bare, "has no tokenizer that can be read"),
        (other, "is a gpt2: only models of these families"),
        (tmp_path, "has no config.json"),
    ):
        assert why in command.refused(str(folder), "--port", "0"), folder

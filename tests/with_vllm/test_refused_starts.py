"""Mistakes of whoever starts vLLM or its prefill ranks end in one line, before any request."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from distca.prefill.facts import NOT_QUANTIZED, frequencies_of_vllm, model_facts
from support.byte_tokenizer import chat_tokenizer
from support.ports import free_port
from support.prefills import NEEDS_NIXL, front_alone
from support.small_models import save_small_model, spoil
from support.vllm_server import POSITIONS, environment, serve_command

SIZES = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": POSITIONS}


@dataclass(frozen=True)
class Mistake:
    """What is wrong about a start of vLLM.

    Attributes:
        line: pattern of the line that says so.
        flags: flags beside those that are right.
        transfer: entries of `--kv-transfer-config` that are wrong; None: it is missing.
        extra: settings that are wrong; None: it is missing.
        spoils: function that changes the model's folder on vLLM's side.
        facts: what the ranks have otherwise.
    """

    line: str
    flags: tuple[str, ...] = ()
    transfer: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    spoils: Callable[[Path], object] | None = None
    facts: dict[str, str] = field(default_factory=dict)


def other_rope(folder: Path) -> None:
    """Gives a model another rotary embedding."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    (folder / "config.json").write_text(json.dumps(config))


def other_revision(folder: Path) -> None:
    """Gives a model other weights."""
    spoil(folder, "model.norm.weight", 2.0)


OURS = {
    "another protocol": Mistake(
        "protocol: the engine has ., and the .* have 4$", facts={"protocol": "4"}
    ),
    "another model": Mistake(
        "family: the engine has .*llama.*have .*qwen3", facts={"family": '"qwen3"'}
    ),
    "another revision": Mistake("weights: the engine has", spoils=other_revision),
    "another dtype": Mistake("dtype: the engine has bfloat16, .* float32", ("--dtype", "bfloat16")),
    "another rope": Mistake("rotary embedding: the engine has .* 5000.0,", spoils=other_rope),
    "another quantization": Mistake(
        "quantization of weights: the engine has none, .* have gptq",
        facts={"quantization of weights": "gptq"},
    ),
    "dtype of the cache": Mistake("leave --kv-cache-dtype out", ("--kv-cache-dtype", "fp8")),
    "name of the connector": Mistake(
        'give "DistCAConnector" and "distca.vllm"', transfer={"kv_connector": "DistCAConector"}
    ),
    "module path": Mistake(
        'give "DistCAConnector" and "distca.vllm"',
        transfer={"kv_connector_module_path": "distca.vlm"},
    ),
    "no module path": Mistake(
        'give "DistCAConnector" and "distca.vllm"', transfer={"kv_connector_module_path": None}
    ),
    "no address": Mistake('add "kv_connector_extra_config"', extra={"distca_address": None}),
    "port of no number": Mistake(
        "give an address as tcp://HOST:PORT", extra={"distca_address": "tcp://127.0.0.1:83x"}
    ),
    "unknown host": Mistake(
        "no.such.host.invalid cannot be found",
        extra={"distca_address": "tcp://no.such.host.invalid:8300"},
    ),
    "unknown key": Mistake(r"\(is distca_min_tokens meant\?\)", extra={"distca_min_token": 100}),
    "negative threshold": Mistake(
        "distca_min_tokens -1: give a number", extra={"distca_min_tokens": -1}
    ),
    "threshold of no number": Mistake(
        "distca_min_tokens '1k': give a number", extra={"distca_min_tokens": "1k"}
    ),
    "transfer of one side alone": Mistake(
        "the engine takes rows by nixl, and the prefill ranks send them by tcp",
        extra={"distca_transfer": "nixl"},
    ),
    "unknown transfer": Mistake(
        "distca_transfer 'rdma': choose from auto", extra={"distca_transfer": "rdma"}
    ),
    "role": Mistake('give "kv_role": "kv_consumer"', transfer={"kv_role": "kv_producer"}),
    "no policy": Mistake(
        'needs "kv_load_failure_policy": "recompute"', transfer={"kv_load_failure_policy": None}
    ),
    "pipeline stages": Mistake(
        "leave --pipeline-parallel-size out", ("--pipeline-parallel-size", "2")
    ),
}
"""Those that we find, in the process that the user has started."""

OF_VLLM = {
    "no JSON": Mistake("Invalid JSON", ("--kv-transfer-config", "{")),
    "unknown role": Mistake("Input should be 'kv_producer'", transfer={"kv_role": "consumer"}),
    "block size": Mistake("No common block size for 7", ("--block-size", "7")),
    "processes that do not divide heads": Mistake("divisible", ("--tensor-parallel-size", "3")),
    "too many positions": Mistake("max_model_len", ("--max-model-len", "999999")),
}
"""Those of vLLM's own flags, for which it has words of its own: `docs/vllm.md` names them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_small_model("llama", tmp_path_factory.mktemp("model"), **SIZES, end=2)
    chat_tokenizer().save_pretrained(made)
    return made


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    """A copy of the model, which a test may change."""
    copy = tmp_path / "model"
    copy.mkdir()
    for each in folder.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    return copy


@contextmanager
def ranks(folder: Path, **facts: str) -> Iterator[str]:
    """What vLLM sees of prefill ranks before it asks them for a prompt: their address."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    known = model_facts(
        config, str(folder), "float32", frequencies_of_vllm(POSITIONS), NOT_QUANTIZED
    )
    sizes = config.num_hidden_layers, config.num_key_value_heads, POSITIONS
    with front_alone("tcp://127.0.0.1:*", known | facts, *sizes) as (front, _):
        yield front.address
        assert front.engines == 0, "who only asks is not connected"


def flags_of(mistake: Mistake, address: str) -> list[str]:
    """Flags of `vllm serve` with a mistake."""
    extra = {"distca_address": address, "distca_connect_seconds": 5} | mistake.extra
    config = {
        "kv_connector": "DistCAConnector",
        "kv_connector_module_path": "distca.vllm",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {k: v for k, v in extra.items() if v is not None},
    } | mistake.transfer
    text = json.dumps({name: value for name, value in config.items() if value is not None})
    return ["--kv-transfer-config", text, *mistake.flags]


def configure(command: list[str]) -> Any:
    """Makes vLLM's configuration from a command, as `vllm serve` does."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--port")
    for name in ("--enable-auto-tool-choice", "--tool-call-parser"):
        parser.add_argument(name, nargs="?")
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(command[3:]))
    return args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does where the project is installed."""
    from vllm.engine.arg_utils import EngineArgs

    from distca.vllm.plugin import register

    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    register()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NEEDS_NIXL if "one side alone" in name else ()) for name in OURS],
)
def test_our_mistakes_are_a_line_before_vllm_starts_its_engine(
    name: str, folder: Path, model: Path, plugin: None, full: bool
) -> None:
    mistake = OURS[name]
    with ranks(folder, **mistake.facts) as address:
        if mistake.spoils is not None:
            mistake.spoils(model)
        command = serve_command(model, free_port(), *flags_of(mistake, address))
        with pytest.raises(SystemExit) as ended:
            configure(command)
        line = str(ended.value)
        assert re.search(mistake.line, line)
        assert line.startswith("vllm serve: ")
        assert len(line.splitlines()) == 1
        # The whole command takes half a minute.
        if full or name in ("another revision", "no policy"):
            assert printed(command)[-1] == line


def test_what_is_right_is_taken_and_what_is_not_ours_left_alone(folder: Path, plugin: None) -> None:
    with ranks(folder) as address:
        found = configure(serve_command(folder, 1, *flags_of(Mistake(""), address)))
    assert found.kv_transfer_config.kv_connector == "DistCAConnector"
    assert configure(serve_command(folder, 1)).kv_transfer_config is None
    # Nobody is there yet: they may come later.
    address = f"tcp://127.0.0.1:{free_port()}"
    configure(serve_command(folder, 1, *flags_of(Mistake(""), address)))


def test_weights_that_are_not_downloaded_yet_are_not_compared(
    folder: Path, model: Path, plugin: None
) -> None:
    (weights,) = model.glob("*.safetensors")
    weights.rename(model / "model-1.safetensors")
    names = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(names))
    with ranks(folder) as address:
        command = serve_command(model, 1, *flags_of(Mistake(""), address))
        configure(command)
        (model / "model-2.safetensors").write_bytes(b"")
        with pytest.raises(SystemExit, match="weights: the engine has"):
            configure(command)


def test_a_library_s_user_gets_an_exception(folder: Path, plugin: None) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from distca.vllm.plugin import Refused

    transfer = KVTransferConfig(kv_connector="DistCAConnector", kv_role="kv_consumer")
    args = EngineArgs(str(folder), kv_transfer_config=transfer)
    with pytest.raises(Refused, match='"kv_connector_module_path": null: give'):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.30.1", "needs vLLM 0.31.0 or later, and 0.30.1"), ("0.32.0+cpu", ""), ("dev", "")],
)
def test_versions(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from distca.vllm.plugin import Refused, check_version

    monkeypatch.setattr("vllm.__version__", version)
    if said:
        with pytest.raises(Refused, match=said):
            check_version()
    else:
        check_version()


def test_a_version_that_was_not_tested_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from distca.vllm import plugin

    told: list[str] = []
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    logger = SimpleNamespace(warning=lambda text, *parts: told.append(text % parts))
    monkeypatch.setattr(plugin, "logger", logger)
    plugin.check_version()
    assert told == ["DistCA: it was tested with vLLM 0.31.0 and 0.32.0, and this is 0.99.0"]


@pytest.mark.full
@pytest.mark.parametrize("name", OF_VLLM)
def test_mistakes_of_vllm_s_own_flags_are_named_by_it(name: str, folder: Path) -> None:
    mistake = OF_VLLM[name]
    flags = flags_of(mistake, f"tcp://127.0.0.1:{free_port()}")
    lines = printed(serve_command(folder, free_port(), *flags))
    assert re.search(mistake.line, "\n".join(lines))


def printed(command: list[str]) -> list[str]:
    """Runs a command that fails; returns what it prints."""
    done = subprocess.run(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode, done.stdout
    return done.stdout.rstrip().splitlines()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--prefill-strategy", "ring"], "invalid choice: 'ring'"),
        (["--tensor-parallel-size", "3"], "3"),
        (["--block-size", "0"], "--block-size 0: give at least 1"),
        (
            ["--context-parallel-threshold", "-1"],
            "--context-parallel-threshold -1: give at least 0",
        ),
        (["--max-model-len", "999999"], "--max-model-len 999,999: the model has"),
        (["--enable-lora"], "--enable-lora"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid cannot be found"),
    ],
)
def test_mistakes_of_the_ranks_command_are_its_last_line(
    folder: Path, capsys: pytest.CaptureFixture, flags: list[str], line: str
) -> None:
    assert line in refused(folder, capsys, "--model-impl", "transformers", *flags)


def test_a_port_in_use_a_missing_model_and_a_missing_vllm_are_told(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(folder, capsys, "--model-impl", "transformers", "--port", port)
    assert f"cannot listen at tcp://127.0.0.1:{port}: Address already in use" in line
    assert "none" in refused(folder / "none", capsys)
    monkeypatch.setattr("distca.commands.prefill_model.find_spec", lambda _: None)
    line = refused(folder, capsys, "--model-impl", "vllm")
    assert "--model-impl vllm: vLLM is not installed here" in line


def test_a_wrong_number_of_processes_is_told(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_WORLD_SIZE": 1}
    numbers |= {"TORCHELASTIC_RESTART_COUNT": 0, "RANK": 0, "LOCAL_RANK": 0}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    for name, value in numbers.items():
        monkeypatch.setenv(name, str(value))
    line = refused(folder, capsys, "--tensor-parallel-size", "2")
    assert "--tensor-parallel-size 2 does not divide torchrun's 3 processes" in line


def refused(folder: Path, capsys: pytest.CaptureFixture, *flags: str) -> str:
    """Starts ranks with a mistake; returns the last line on the screen."""
    from distca.commands.main import main

    with pytest.raises(SystemExit) as ended:
        main(["prefill", str(folder), *flags])
    assert ended.value.code == 2
    line: str = capsys.readouterr().err.strip().splitlines()[-1]
    assert "distca prefill" in line
    return line

"""Llama checkpoints of Hugging Face: the converted model computes what transformers' does."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.imported_llama import add_tokenizer, imported_logits
from support.ranks import forget_megatron

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "vocab_size": 301,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_llama(folder: Path, **changes: Any) -> Any:
    """A small Llama with random weights, saved with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    values = {name: value for name, value in (CONFIG | changes).items() if name != "model_type"}
    theta = values.pop("rope_theta")
    rope = {"rope_theta": theta, "rope_type": "default"} | values.pop("rope_scaling", {})
    model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms of all ones would hide one that is mistaken for another.
            scale = 0.3 if "norm" in name else 0.08
            weight.copy_(scale * torch.randn(weight.shape) + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    add_tokenizer(folder, CONFIG["vocab_size"])
    return model


def there_and_back(llama: Path, work: Path, tokens: list[int]) -> torch.Tensor:
    """Imports a Llama, runs the model that its checkpoint loads into, and exports that again.

    Returns:
        The logits without those of padding, float32 `[tokens, vocabulary]`.
    """
    from megatron_patches import llama as converter

    found = imported_logits(llama, work, tokens)
    checkpoint = ["--checkpoint", str(work / "checkpoint")]
    assert converter.main(["export", *checkpoint, "--output", str(work / "back")]) == 0
    forget_megatron()
    return found


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A fresh process for the commands: saving starts children, which `ranks` may not have."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    "changes",
    [{"rope_scaling": LLAMA3}, {"tie_word_embeddings": True}],
    ids=["llama3-rope", "tied"],
)
def test_the_converted_model_has_the_logits_of_transformers(process, tmp_path, changes) -> None:
    from transformers import LlamaForCausalLM

    reference = make_llama(tmp_path / "llama", **changes).eval()
    tokens = torch.randint(0, CONFIG["vocab_size"], (200,))
    with torch.no_grad():
        wanted = reference(tokens[None]).logits[0]
    job = process.submit(there_and_back, tmp_path / "llama", tmp_path, tokens.tolist())
    found = job.result(timeout=120)
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

    again = LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    for name, weight in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def flags_as_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """What pretrain_gpt.py takes from the flags of a model."""
    from megatron_patches.llama import model_flags
    from megatron_patches.parts import parse_args

    flags = model_flags(config)
    flags += "--seq-length 128 --micro-batch-size 1 --train-iters 1 --lr 1 --data-path -".split()
    flags += "--tokenizer-type NullTokenizer --vocab-size 999".split()
    flags += ["--max-position-embeddings", "128"]
    return vars(parse_args(flags))


@pytest.mark.parametrize("scaling", ["rope_scaling", "rope_parameters"])
def test_flags_of_either_version_of_the_library(scaling) -> None:
    """Up to version 4 the base stands beside the scaling, later in it."""
    rope = LLAMA3 if scaling == "rope_scaling" else LLAMA3 | {"rope_theta": 500000.0}
    config = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    config |= {scaling: rope} | ({"rope_theta": 500000.0} if scaling == "rope_scaling" else {})
    args = flags_as_arguments(config)
    assert args["rotary_base"] == 500000
    assert args["use_rope_scaling"]
    assert args["rope_scaling_factor"] == 32
    assert args["kv_channels"] == 24
    # From 0.18 on the argument has another name than the flag.
    assert args.get("layernorm_epsilon", args.get("norm_epsilon")) == 1e-6
    assert args["untie_embeddings_and_output_weights"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "only llama is converted"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "of type 'yarn'"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "'low_freq_factor': 2.0"),
    ],
)
def test_models_that_cannot_be_converted(changes, message) -> None:
    from megatron_patches.llama import model_flags

    with pytest.raises(ValueError, match=message):
        model_flags(CONFIG | changes)


def test_a_folder_without_a_model_is_refused(tmp_path, capsys) -> None:
    from megatron_patches.llama import main

    with pytest.raises(SystemExit) as ended:
        main(["import", "--llama", str(tmp_path), "--checkpoint", str(tmp_path / "c")])
    assert ended.value.code == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(SystemExit):
        main(["export", "--checkpoint", str(tmp_path / "c")])
    assert "export needs --output" in capsys.readouterr().err

"""Families of Hugging Face: Megatron computes what transformers does, and gives models back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.converted import add_tokenizer, convert, converted_logits
from support.forks import ROOT, forking
from support.small_families import (
    CONFIGS,
    LLAMA3,
    TWO_BASES,
    YARN,
    save_family,
    small_config,
)
from support.small_models import VOCABULARY, save_multimodal_model

PAGE = ROOT / "docs" / "converting.md"


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A fresh process for the commands: saving starts children, which `ranks` may not have."""
    with ProcessPoolExecutor(1, forking()) as pool:
        yield pool


def there_and_back(folder: Path, work: Path, tokens: list[int]) -> torch.Tensor:
    """Converts a model, runs what the checkpoint loads into, and converts the checkpoint back."""
    found = converted_logits(folder, work, tokens)
    # Beside the checkpoint is all that the way back needs.
    folder.rename(work / "gone")
    convert("--checkpoint", work / "checkpoint", "--to", work / "back")
    return found


def test_the_table_of_the_documentation() -> None:
    from megatron_patches.families.bridges import BRIDGES

    rows = re.findall(r"^\| `(\w+)` \| [^|]* \|([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    run: dict[str, list[str]] = {}
    for case in CONFIGS:
        family, _, variant = case.partition(", ")
        run.setdefault(family, []).extend([variant] * bool(variant))
    assert {name: cell.strip() for name, cell in rows} == {
        name: "; ".join(variants) for name, variants in run.items()
    }
    assert [name for name, _ in rows] == [*BRIDGES]


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_and_the_way_back(process, tmp_path: Path, case: str) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    reference = save_family(case, tmp_path / "model")
    files = {
        name: (tmp_path / "model" / name).read_bytes()
        for name in ("tokenizer.json", "generation_config.json")
    }
    given = load_file(tmp_path / "model" / "model.safetensors")
    tokens = torch.randint(0, reference.config.vocab_size, (200,))
    with torch.no_grad():
        wanted = reference(tokens[None]).logits[0]
    job = process.submit(there_and_back, tmp_path / "model", tmp_path, tokens.tolist())
    found = job.result(timeout=200)
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {*back} == {*given}
    assert [name for name in given if not torch.equal(back[name], given[name])] == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert again.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(tokens[None]).logits[0], wanted)
    for name, content in files.items():
        assert (tmp_path / "back" / name).read_bytes() == content


@pytest.mark.full
def test_the_language_model_of_a_multimodal_one(process, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = save_multimodal_model("gemma3", tmp_path)
    add_tokenizer(folder, VOCABULARY)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    given = load_file(folder / "model.safetensors")
    # `--check` holds the logits against transformers'.
    job = process.submit(back_and_forth, folder, tmp_path, "--float32", sample="5,3,200")
    job.result(timeout=200)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == (
        "gemma3_text"
    )
    theirs = {name.replace("language_model.", ""): each for name, each in given.items()}
    assert [name for name, each in back.items() if not torch.equal(each, theirs[name])] == []


def back_and_forth(folder: Path, work: Path, *given: str, sample: str = "5,3,300,17") -> None:
    """Converts a model and its checkpoint."""
    convert(folder, "--to", work / "checkpoint", *given)
    convert("--checkpoint", work / "checkpoint", "--to", work / "back", "--check", sample)


@pytest.mark.parametrize("case", ["deepseek_v3", "gemma2"])
def test_bfloat16(process, tmp_path: Path, case: str) -> None:
    from safetensors.torch import load_file, save_file

    save_family(case, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = {
        # As the published model has it.
        name: each if name.endswith("e_score_correction_bias") else each.bfloat16()
        for name, each in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    process.submit(back_and_forth, tmp_path / "model", tmp_path).result(timeout=200)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name: each.dtype for name, each in back.items()} == {
        name: each.dtype for name, each in weights.items()
    }
    assert [name for name in weights if not torch.equal(back[name], weights[name])] == []
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def flags_as_arguments(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What pretrain_gpt.py takes from the flags of a model with this `config.json`."""
    from distca.checkpoints.weights import Checkpoint
    from megatron_patches.convert.model import flags_of, parse_model

    (folder / "config.json").write_text(json.dumps(values))
    flags = flags_of(Checkpoint.read(str(folder)).config)
    flags += "--tokenizer-type NullTokenizer --vocab-size 999".split()
    return vars(parse_model([*flags, "--max-position-embeddings", "128"], bf16=False))


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "vocab_size": 301,
}


@pytest.mark.parametrize("scaling", ["rope_scaling", "rope_parameters"])
def test_flags_of_either_version_of_the_library(tmp_path: Path, scaling: str) -> None:
    """Up to version 4 the base stands beside the scaling, later in it."""
    rope = LLAMA3 if scaling == "rope_scaling" else LLAMA3 | {"rope_theta": 500000.0}
    values = LLAMA | {scaling: rope}
    args = flags_as_arguments(
        tmp_path, values | ({"rope_theta": 500000.0} if scaling == "rope_scaling" else {})
    )
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
        ({"model_type": "gemma"}, r"gemma, .* not converted \(Megatron-LM has no flags for GELU"),
        ({"model_type": "opt"}, "opt, which is not converted: only these are: llama"),
        ({"attention_bias": True}, "attention_bias in config.json is True: .* only .* with False"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "of type 'dynamic'"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "'low_freq_factor': 2.0"),
        ({"rope_theta": 10000.5}, "10000.5 is not a whole number"),
    ],
)
def test_models_that_cannot_be_converted(tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flags_as_arguments(tmp_path, LLAMA | changes)


def test_rows_beyond_the_tokenizer_s_tokens() -> None:
    from megatron_patches.families.flags import vocabulary_flags

    assert vocabulary_flags(256, 256, 1) == vocabulary_flags(1024, 1024) == []
    assert vocabulary_flags(301, 301, 1) == ["--make-vocab-size-divisible-by", "1"]
    # As Llama 3 has it: Megatron's default suits tensor parallelism of 1 and 2.
    assert vocabulary_flags(128256, 128256, 2) == []
    assert vocabulary_flags(128256, 128256) == ["--make-vocab-size-divisible-by", "1"]
    # 64 would be right without tensor parallelism alone.
    assert vocabulary_flags(259, 320) == ["--make-vocab-size-divisible-by", "80"]
    assert vocabulary_flags(259, 320, 2) == ["--make-vocab-size-divisible-by", "32"]
    with pytest.raises(ValueError, match="of 301 rows, which --tensor-model-parallel-size 2 does"):
        vocabulary_flags(300, 301, 2)
    # As Qwen3 has it: with 1187 the vocabulary fits, and tensor parallelism up to 128.
    assert vocabulary_flags(151669, 151936) == ["--make-vocab-size-divisible-by", "1187"]
    with pytest.raises(ValueError, match="has 302 tokens and the model weights for 301"):
        vocabulary_flags(302, 301)


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    from distca.commands.convert import main

    for arguments, message in (
        ([], "either the folder of a model"),
        (["m", "--checkpoint", "c"], "either the folder of a model"),
        (["m", "--force"], "--force is for --checkpoint"),
        (["m", "--hf-model", "m"], "--hf-model is for --checkpoint"),
        (["m", "--check", ""], "--check '' has no token"),
        (["m", "--check=5,-1"], "--check has the token id -1, which no model has: give text, or"),
        (["m", "--check", "9" * 5000], "--check has the token id 999999999999..., which no"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*arguments, "--to", str(tmp_path)])


@pytest.mark.parametrize("path", ["", "a\0b"])
@pytest.mark.parametrize("flag", ["MODEL", "--checkpoint", "--to", "--hf-model"])
def test_what_is_no_path_is_refused(capsys, flag: str, path: str) -> None:
    from distca.commands.convert import build_parser

    words = [path] if flag == "MODEL" else [flag, path]
    with pytest.raises(SystemExit):
        build_parser().parse(["--to", "there", *words])
    assert f"argument {flag}: {path!r} is no path: give one" in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys) -> None:
    from megatron_patches.convert.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--to", str(tmp_path / "c")])
    assert ended.value.code == 2
    assert "has no config.json" in capsys.readouterr().err


ONE_EXPERT = ({"num_experts_per_tok": 1}, "num_experts_per_tok in config.json is 1: megatron-core")
MIXED = {
    "deepseek_v2": (
        ({"num_experts_per_tok": 4}, "num_experts_per_tok 4 and topk_group 2 in config.json"),
        ({"topk_method": "noaux_tc"}, "topk_method in config.json is 'noaux_tc'"),
    ),
    "deepseek_v3": (
        ({"num_experts_per_tok": 1}, "num_experts_per_tok in config.json is 1"),
        ({"n_group": 2, "topk_group": 1}, "num_experts_per_tok 4 and topk_group 1 in config.json"),
        ({"norm_topk_prob": False}, "norm_topk_prob in config.json is False"),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, "'llama3' is not converted with multi"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "needs factor, mscale and",
        ),
    ),
    "gemma2": (
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping in config.json is 30.0"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping in config.json is None"),
        ({"hidden_activation": "silu"}, "hidden_activation in config.json is 'silu'"),
        ({"query_pre_attn_scalar": 17}, r"is 17: .* head_dim \(16\) or .*heads \(24\) are"),
    ),
    "gemma3_text": (
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in config.json is 50.0"),
        ({"sliding_window": None}, "sliding_window in config.json is null"),
        (
            {"rope_parameters": TWO_BASES | {"sliding_attention": {"rope_theta": 1e3}}},
            "layers with a window with {'rope_theta': 1000.0",
        ),
        (
            {"rope_parameters": TWO_BASES | {"full_attention": YARN}},
            "'yarn' by 32.0 is not converted with two rotary bases",
        ),
    ),
    "gpt_oss": (ONE_EXPERT,),
    "mixtral": (ONE_EXPERT,),
    "qwen3_moe": (ONE_EXPERT,),
    "qwen3": (({"attention_bias": True}, "attention_bias in config.json is True"),),
}


@pytest.mark.parametrize("case", MIXED)
def test_values_that_megatron_lacks(case: str) -> None:
    from megatron_patches.convert.model import flags_of

    for changes, message in MIXED[case]:
        with pytest.raises(ValueError, match=message):
            flags_of(small_config(case, **changes))


def test_layers_that_predict_more_tokens_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from distca.checkpoints.weights import Checkpoint

    save_family("deepseek_v3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    more = {f"model.layers.2.{name}.weight": torch.ones(2) for name in ("eh_proj", "hnorm")}
    save_file(weights | more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="2 not part of the model"):
        Checkpoint.read(str(tmp_path)).check()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    source = Checkpoint.read(str(tmp_path))
    assert source.check() == ("model.layers.2",)
    with source.opened(torch.float32) as tensors:
        assert {*tensors} == {*weights}


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    from megatron_patches.convert.to_megatron import to_megatron

    save_family("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ValueError, match="quantized weights, which are not converted"):
        to_megatron(tmp_path, tmp_path / "checkpoint", bf16=True)


def compared(folder: Path, other: Path, work: Path) -> tuple[Any, Any, Any]:
    """Logits of a model, and of another one, beside those of the first one's checkpoint; then of a
    model that computes otherwise."""
    from megatron_patches.convert.sample import compare_on_sample
    from megatron_patches.convert.to_megatron import to_megatron
    from support.ranks import forget_megatron

    _, model, args = to_megatron(folder, work, bf16=True)
    same = compare_on_sample("5,3,300,17", folder, work, model, args)
    different = compare_on_sample("5,3,300,17", other, work, model, args)
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.softmax_scale *= 2
    otherwise = compare_on_sample("5,3,300,17", folder, work, model, args)
    forget_megatron()
    return same, different, otherwise


def test_other_logits_are_seen(process, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    # In bfloat16, whose rounding both have.
    save_family("qwen3", tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.self_attn.k_norm.weight"] *= 1.1
    save_file(weights, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    job = process.submit(compared, tmp_path / "model", tmp_path / "other", tmp_path / "checkpoint")
    same, different, otherwise = job.result(timeout=200)
    assert same.equal, same.cause
    assert not different.equal
    assert different.difference > 1e-3
    assert different.cause == "different weights: model.layers.1.self_attn.k_norm.weight"
    assert not otherwise.equal
    assert otherwise.cause.startswith("all weights are equal; computed once more, Megatron's")


def test_samples(tmp_path: Path) -> None:
    from megatron_patches.convert.sample import Compared, sample_tokens

    add_tokenizer(tmp_path, 301)
    model = str(tmp_path)
    assert sample_tokens("5, 3,300", model, 301) == [5, 3, 300]
    assert sample_tokens("w7", model, 301) == [7]
    for sample, tokenizer in (("5,301", model), ("w7", None)):
        with pytest.raises(ValueError, match="ids below 301 with commas"):
            sample_tokens(sample, tokenizer, 301)
    assert Compared(1, 1e-5, 1.0).equal
    assert not Compared(1, float("inf"), 1.0).equal
    assert not Compared(1, 1e-3, 1.0).equal

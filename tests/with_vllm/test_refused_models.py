"""Models of vLLM that the prefill ranks cannot compute are refused by name, before ranks start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from vllm.model_executor.layers.attention import MLAAttention

from distca.commands.prefill import build_parser
from distca.commands.prefill_model import read_prefill_model
from distca.inference.small_models import save_model, save_small_model
from distca.vllm.families import check_layers, check_model
from distca.vllm.model import read_vllm_model

PLAIN: dict[str, Any] = {
    "model": "a model",
    "runner_type": "generate",
    "is_encoder_decoder": False,
    "is_attention_free": False,
    "is_hybrid": False,
    "has_inner_state": False,
    "is_multimodal_model": False,
    "uses_mrope": False,
    "use_mla": False,
    "quantization": None,
    "hf_config": SimpleNamespace(),
    "is_moe": False,
    "using_transformers_backend": lambda: False,
    "architectures": ["SomeForCausalLM"],
}


PLAIN_LATENTS: dict[str, Any] = {
    "impl": None,
    "indexer": None,
    "use_sparse": False,
    "sliding_window": None,
    "dcp_q_replicate": False,
    "kv_cache_dtype": "auto",
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"runner_type": "pooling"}, "does not generate text"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"is_attention_free": True}, "has no attention"),
        ({"is_hybrid": True}, "has Mamba or linear attention layers"),
        ({"has_inner_state": True}, "has Mamba or linear attention layers"),
        ({"is_multimodal_model": True}, "has encoders of images or sounds"),
        ({"uses_mrope": True}, "has rotary embeddings of several dimensions"),
        ({"quantization": "fp8"}, r"has quantized weights \(fp8\), which were not proved"),
        (
            {
                "quantization": "compressed-tensors",
                "hf_config": SimpleNamespace(quantization_config={"format": "float-quantized"}),
            },
            r"has quantized weights \(compressed-tensors float-quantized\), which were not proved",
        ),
        (
            {
                "quantization": "compressed-tensors",
                "hf_config": SimpleNamespace(quantization_config={"format": "int-quantized"}),
                "is_moe": True,
            },
            "has quantized experts, which were not proved",
        ),
        ({"using_transformers_backend": lambda: True}, "for which vLLM has no class"),
    ],
)
def test_what_a_model_is(changes: dict[str, Any], line: str) -> None:
    check_model(SimpleNamespace(**PLAIN))
    with pytest.raises(ValueError, match=f"^a model .*{line}"):
        check_model(SimpleNamespace(**PLAIN | changes))


def test_latents_are_computed_on_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of_latents = SimpleNamespace(**PLAIN | {"use_mla": True})
    check_model(of_latents)
    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("distca.vllm.families.current_platform", gpu)
    with pytest.raises(ValueError, match=r"^a model has multi-latent attention, .* for GPUs"):
        check_model(of_latents)


@pytest.mark.parametrize("method", ["none", "gptq", "auto_gptq", "awq", "auto_awq"])
def test_vllm_may_choose_the_kernel_of_quantized_weights(method: str) -> None:
    check_model(SimpleNamespace(**PLAIN | {"quantization": method if method != "none" else None}))


def layers(folder: Path) -> tuple[Any, dict[int, Any]]:
    """A model without weights, and its layers."""
    from unittest import mock

    found: dict[str, Any] = {}

    def keep(model: Any, made: Any, layers: dict[int, Any]) -> None:
        found.update(made=made, layers=layers)
        check_layers(model, made, layers)

    with mock.patch("distca.vllm.model.check_layers", keep):
        read_vllm_model(str(folder), torch.float32)
    return found["made"], found["layers"]


def test_what_layers_are(tmp_path: Path) -> None:
    folder = save_small_model("llama", tmp_path, hidden_size=128, head_dim=32)
    made, of_llama = layers(folder)
    model: Any = SimpleNamespace(model="a model")
    check_layers(model, made, of_llama)

    def refused(line: str, **changes: Any) -> None:
        # Each is set where vLLM's layers have it.
        kept = {}
        for name, value in changes.items():
            of_impl = name in ("alibi_slopes", "logits_soft_cap")
            owner = of_llama[1].impl if of_impl else of_llama[1]
            kept[name] = owner, getattr(owner, name)
            setattr(owner, name, value)
        try:
            with pytest.raises(ValueError, match=f"^a model has {line}"):
                check_layers(model, made, of_llama)
        finally:
            for name, (owner, value) in kept.items():
                setattr(owner, name, value)

    refused("ALiBi in layer 1", alibi_slopes=torch.ones(4))
    refused("keys of another layer in layer 1", kv_sharing_target_layer_name="model.layers.0")
    refused("values of another size in layer 1", head_size_v=16)
    refused("quantized keys and values in layer 1", kv_cache_dtype="fp8")
    refused("layers of different heads", num_kv_heads=1)
    refused("layers of different soft caps", logits_soft_cap=30.0)
    refused("attention to a prefix in both directions in layer 1", use_mm_prefix=True)
    latents = object.__new__(MLAAttention)
    latents.__dict__.update(PLAIN_LATENTS, use_sparse=True)
    with pytest.raises(ValueError, match="has a choice of keys by an indexer in layer 0"):
        check_layers(model, made, {0: latents})

    class Mamba:
        impl = None

    with pytest.raises(ValueError, match=r"^a model has a Mamba in layer 2"):
        check_layers(model, made, {**of_llama, 2: Mamba()})
    with pytest.raises(ValueError, match=r"^a model has layers without attention"):
        check_layers(model, made, {0: of_llama[0], 2: of_llama[2]})
    with pytest.raises(ValueError, match=r"^a model is a Other of vLLM, which was not proved"):
        check_layers(model, type("Other", (), {})(), of_llama)


def test_flags_say_whose_code_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_small_model("llama", tmp_path, hidden_size=128, head_dim=32)

    def read(*flags: str) -> tuple[Any, str]:
        args = build_parser().parse([str(folder), "--dtype", "float32", *flags])
        return read_prefill_model(args)

    model, told = read()
    assert told == "vLLM's LlamaForCausalLM computes the layers"
    assert model.positions == 4096
    assert read("--max-model-len", "512")[0].positions == 512
    assert read("--model-impl", "transformers")[1] == "transformers' code computes the layers"
    with pytest.raises(ValueError, match="max_model_len"):
        read("--model-impl", "vllm", "--max-model-len", "5000")
    with monkeypatch.context() as patch:
        patch.setattr("distca.vllm.families.PROVED", ())
        with pytest.raises(ValueError, match="was not proved"):
            read("--model-impl", "vllm")
        model, told = read()
        assert told.startswith("transformers' code computes the layers: ")
        assert told.endswith("was not proved: prefill ranks run ")
        assert model.windows == (None, None, None)
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    (folder / "config.json").write_text(json.dumps(config | quantized))
    with pytest.raises(ValueError, match=r"quantiz.*fp8.*; and by transformers' code:") as refused:
        read()
    assert len(str(refused.value).splitlines()) == 1


def test_a_class_that_was_not_proved_is_named(tmp_path: Path) -> None:
    import transformers

    config = transformers.GraniteConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=260
    )
    folder = save_model(transformers.AutoModelForCausalLM, config, tmp_path / "granite")
    with pytest.raises(ValueError, match="is a GraniteForCausalLM of vLLM, which was not proved"):
        read_vllm_model(str(folder), torch.float32)


def test_vllm_s_own_context_parallelism_is_for_latents_on_gpus_alone(tmp_path: Path) -> None:
    """As docs/vllm.md says of the version that is installed."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.pcp_manager import PCPManager

    folder = save_small_model("llama", tmp_path, hidden_size=128, head_dim=32)
    args = EngineArgs(str(folder), skip_tokenizer_init=True, prefill_context_parallel_size=2)
    with pytest.raises(ValueError, match="does not support: prefill context parallel"):
        args.create_engine_config()
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(prefill_context_parallel_size=2),
        model_config=SimpleNamespace(use_mla=False),
    )
    with pytest.raises(NotImplementedError, match="supports MLA models only"):
        PCPManager.validate_config(config, supports_mm_inputs=False)

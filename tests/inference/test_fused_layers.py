"""Fused norms, rotary embeddings and experts compute what the layers of transformers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distca.attention.fused import ExpertKernels, FusedKernels
from distca.inference.fused_layers import fuse_experts, fuse_layers, products_ask_host
from support.simgpu import fused, fused_experts
from support.small_models import FAMILIES, SIZES, VOCABULARY

PARTS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
}


class Counted:
    """Stand-ins of the kernels on CPUs, which count their launches."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.kernels = FusedKernels(fused.stand_ins(self._launch, lambda each: each))
        its = fused_experts.stand_ins(self._launch, lambda each: each)
        self.of_experts = ExpertKernels(its)

    def _launch(self, name: str, reads: Any, writes: Any, call: Any) -> None:
        self.launches.append(name.removeprefix("distca::"))
        call(*reads, *writes)


def model_of(family: str, dtype: torch.dtype, **changes: object) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    name, special = FAMILIES[family]
    config = getattr(transformers, name)(**SIZES | special | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for each, weight in model.named_parameters():
        if each.endswith("norm.weight"):
            weight.data.uniform_(-1.0, 1.0)
    return model


def launches_of(model: Any) -> list[str]:
    """Launches of a pass; fails unless its logits have the bits of the model as it is."""
    ids, counted = torch.arange(40)[None] % VOCABULARY, Counted()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        fuse_layers(model, counted.kernels)
        fuse_experts(model, counted.of_experts)
        found = model(input_ids=ids).logits
    assert torch.equal(found, expected)
    return counted.launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_bits_of_transformers(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    norms = sum(type(each).__name__.endswith("RMSNorm") for each in model.modules())
    launches = launches_of(model)
    assert launches.count("normalize_rows") == norms > 0
    assert launches.count("rotate_heads") == len(model.model.layers)
    experts = (
        launches.count("sort_rows"),
        launches.count("gate_rows"),
        launches.count("combine_rows"),
    )
    of_family = "num_experts_per_tok" in FAMILIES[family][1]
    assert experts == (3 * of_family,) * 3


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"experts_implementation": "eager"}])
def test_experts_that_are_not_covered_are_left_to_transformers(change: dict[str, str]) -> None:
    assert "sort_rows" not in launches_of(model_of("qwen3_moe", torch.float32, **change))


@pytest.mark.parametrize(
    ("family", "changes", "all_call"),
    [
        ("qwen3_moe", {}, True),
        ("gpt_oss", {}, True),
        ("llama", {}, True),
        ("qwen3_moe", {"experts_implementation": "eager"}, False),
    ],
)
def test_whether_all_experts_call_the_kernels(
    family: str, changes: dict[str, str], all_call: bool
) -> None:
    model = model_of(family, torch.float32, **changes)
    assert fuse_experts(model, Counted().of_experts) is all_call


def test_one_layer_of_other_experts_is_enough_to_say_so() -> None:
    model = model_of("qwen3_moe", torch.float32)
    experts = model.model.layers[1].mlp.experts
    experts.__class__ = type("OtherExperts", (type(experts),), {})
    assert not fuse_experts(model, Counted().of_experts)


@pytest.mark.parametrize(
    ("capability", "dtype", "asks"),
    [
        ((9, 0), torch.bfloat16, False),
        ((10, 0), torch.bfloat16, False),
        ((9, 0), torch.float16, True),
        ((8, 0), torch.bfloat16, True),
        ((12, 0), torch.bfloat16, True),
    ],
)
def test_sizes_of_grouped_products_are_read_on_some_gpus(
    capability: tuple[int, int], dtype: torch.dtype, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert products_ask_host(torch.device("cuda", 0), dtype) is asks


def test_heads_that_are_rotated_in_part_are_left_to_transformers() -> None:
    launches = launches_of(model_of("phi3", torch.float32, **PARTS))
    assert "rotate_heads" not in launches
    assert "normalize_rows" in launches


def test_other_models_of_a_class_stay_as_they_are() -> None:
    """Neither classes nor modules of transformers are changed."""
    counted, fused, plain = Counted(), *(model_of("llama", torch.float32) for _ in range(2))
    fuse_layers(fused, counted.kernels)
    plain(input_ids=torch.arange(4)[None])
    assert counted.launches == []


def test_families_that_are_not_known_stay_as_they_are() -> None:
    model, counted = model_of("llama", torch.float32), Counted()
    model.config.model_type = "another"
    fuse_layers(model, counted.kernels)
    model(input_ids=torch.arange(4)[None])
    assert counted.launches == []

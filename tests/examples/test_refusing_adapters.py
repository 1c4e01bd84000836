"""What adapters for other trainers refuse before any work."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.trainer_loops import import_adapters, write_model
from support.verl_engine import step


@pytest.fixture(autouse=True)
def _adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    import_adapters()


@pytest.mark.parametrize(
    ("section", "name", "value", "why"),
    [
        ("parallelism", "tensor_parallel_degree", 2, "there is no tensor parallelism"),
        ("parallelism", "context_parallel_degree", 2, "there is no context parallelism"),
        ("parallelism", "spmd_backend", "spmd_types", "set parallelism.spmd_backend to"),
        ("validator", "enable", True, "validation has a loop of its own"),
    ],
)
def test_torchtitan(section: str, name: str, value: Any, why: str) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    import torchtitan_adapter as adapter

    config = adapter.llama3_debugmodel()
    setattr(getattr(config, section), name, value)
    with pytest.raises(ValueError, match=why):
        config.build()


def test_torchtitan_s_windows() -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    import torchtitan_adapter as adapter
    from torchtitan.models.common.attention import VarlenAttention

    with pytest.raises(ValueError, match=r"a layer has the window \(128, 0\)"):
        adapter.varlen(VarlenAttention.Config(window_size=(128, 0)))
    layer = adapter.varlen(VarlenAttention.Config()).build()
    with pytest.raises(ValueError, match="the batch was not placed by DistCA"):
        layer(*[torch.zeros(1, 2, 4, 16)] * 3, attention_masks=None)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("average_tokens_across_devices", False, "set --average_tokens_across_devices true"),
        ("label_smoothing_factor", 0.1, "set --label_smoothing_factor 0"),
        ("eval_strategy", "steps", "set --eval_strategy no"),
    ],
)
def test_ms_swift(name: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swift", reason="ms-swift is not installed")
    import ms_swift_adapter as adapter

    given = {"average_tokens_across_devices": True, "label_smoothing_factor": 0.0}
    given |= {"eval_strategy": "no"} | {name: value}

    def made(self: Any) -> None:
        self.args = SimpleNamespace(**given)
        self.template = SimpleNamespace(sequence_parallel_size=1)
        self.model = SimpleNamespace(model_meta=SimpleNamespace(is_multimodal=False))

    monkeypatch.setattr(adapter.Seq2SeqTrainer, "__init__", made)
    with pytest.raises(ValueError, match=why):
        adapter.DistcaTrainer()


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "cp_size", "ulysses_size", "channel"])
def test_veomni(name: str) -> None:
    pytest.importorskip("veomni", reason="VeOmni is not installed")
    import veomni_adapter as adapter

    sizes = dict.fromkeys(("tp_size", "pp_size", "cp_size", "ulysses_size"), 1)
    sizes |= {name: 2} if name in sizes else {}
    channel = SimpleNamespace(enable=name == "channel")
    train = SimpleNamespace(accelerator=SimpleNamespace(**sizes), channel_loss=channel)
    with pytest.raises(ValueError, match=name):
        adapter.check(SimpleNamespace(train=train))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"distributed": {"tp_size": 2}}, "distributed.tp_size"),
        ({"distributed": {"cp_size": 2}}, "distributed.cp_size"),
        ({"packed_sequence": {"packed_sequence_size": 512}}, "remove packed_sequence"),
    ],
)
def test_automodel(config: dict[str, Any], why: str) -> None:
    pytest.importorskip("nemo_automodel", reason="NeMo Automodel is not installed")
    import automodel_adapter as adapter
    from nemo_automodel.components.config.loader import ConfigNode

    with pytest.raises(ValueError, match=why):
        adapter.DistcaRecipe(ConfigNode(config)).setup()


def refuse(model: str) -> str:
    """What is said on this rank, where the last one has another micro-batch."""
    try:
        step(model, True, 2, 1, differs=True)
    except ValueError as error:
        return str(error)
    return "no error"


def test_verl(ranks: Any, tmp_path: Path) -> None:
    """All ranks refuse what one cannot do."""
    pytest.importorskip("verl", reason="verl is not installed")
    pytest.importorskip("ray", reason="verl's engines need ray, which is not installed")
    said = ranks.run(refuse, str(write_model(tmp_path / "model")), world_size=2)
    assert (
        said
        == ["rank 1: DistCA does not compute what distillation_use_topk needs: turn it off"] * 2
    )

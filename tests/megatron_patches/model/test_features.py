"""What a spec of `--spec` asks of a model beside Megatron's flags."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.validation import _validate_cuda_graphs
from megatron_patches.model.features import check_features, features_of
from megatron_patches.model.latent_attention import softmax_scale
from support.arguments import parse

GEMMA2 = "--spec megatron_patches.model.gemma GEMMA2".split()
GEMMA3 = "--spec megatron_patches.model.gemma GEMMA3_27B".split()
GIVEN = "--swiglu --disable-bias-linear --normalization RMSNorm --transformer-impl local".split()


def test_features_and_scales() -> None:
    args = parse(*GIVEN, *GEMMA2, "--kv-channels", "16")
    features = features_of(args)
    assert features is not None
    assert (features.score_cap, features.logit_cap) == (50, 30)
    assert softmax_scale(args) == 16**-0.5
    # As many elements as the hidden size has for each head.
    assert softmax_scale(parse(*GIVEN, *GEMMA3, "--kv-channels", "16")) == 8**-0.5
    assert features_of(parse(*GIVEN)) is None
    assert features_of(parse(*GIVEN, "--spec", "support.own_layers", "DAMPED")) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-experts", "4"], "have no experts: remove --num-experts"),
        (["--fp16", "--apply-query-key-layer-scaling"], "remove --apply-query-key-layer-scaling"),
        (["--fp16"], "scores need more range: give --bf16"),
        (["--position-embedding-type", "none"], "two rotary bases: add --position-embedding-t"),
    ],
)
def test_flags_that_the_layers_do_not_follow(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^--spec .*gemma GEMMA3_27B: .*{message}"):
        parse(*GIVEN, *GEMMA3, *flags)


def test_flags_that_the_layers_need() -> None:
    args = parse(*GIVEN, *GEMMA2)
    # Without a GPU it is local in any case.
    args.transformer_impl = "transformer_engine"
    with pytest.raises(ValueError, match="local ones: add --transformer-impl local"):
        check_features(args)
    for missing, message in (("--swiglu", "add --swiglu"), ("--disable-bias-linear", "no biases")):
        given = [flag for flag in GIVEN if flag != missing]
        with pytest.raises(ValueError, match=message):
            parse(*given, *GEMMA2)


def test_graphs_would_pass_over_a_layer_s_own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(*GIVEN, *GEMMA2, "--distca", "--hidden-dropout", "0")
    args.distca_cuda_graphs = True
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="layers of --spec may have another form, so remove one"):
        _validate_cuda_graphs(DistcaConfig.from_args(args), args)

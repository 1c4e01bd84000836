"""Configurations of Hugging Face that transformers reads otherwise than flags, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.small_families import CONFIGS, TWO_BASES, small_config

FAMILIES = [case for case in CONFIGS if "," not in case]
LATENT = ["deepseek_v2", "deepseek_v3"]
BASE = {"rope_theta": 1e4, "rope_type": "default"}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32, "beta_slow": 1},
    **{"mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 4096},
}
LAYERS = ["sliding_attention", "full_attention"]
SLIDING = {"sliding_window": 4, "use_sliding_window": True}
ROPE = "of the rotary embedding in config.json is"


def logits_of_transformers(case: str, **changes: Any) -> torch.Tensor:
    import transformers

    torch.manual_seed(1)
    config = small_config(case, **changes)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape))
        logits: torch.Tensor = model(torch.arange(3, 40)[None], use_cache=False).logits
    return logits


def flags(case: str, **changes: Any) -> list[str]:
    from megatron_patches.convert.model import flags_of

    return flags_of(small_config(case, **changes))


@pytest.mark.parametrize("case", FAMILIES)
def test_families_turn_whole_keys_where_transformers_does(case: str) -> None:
    from megatron_patches.families.bridges import BRIDGES

    part = {"partial_rotary_factor": 0.5}
    rope = (
        {kind: each | part for kind, each in TWO_BASES.items()}
        if case == "gemma3_text"
        else BASE | part
    )
    whole = TWO_BASES if case == "gemma3_text" else BASE | {"partial_rotary_factor": 1.0}
    same = torch.equal(
        logits_of_transformers(case, rope_parameters=rope),
        logits_of_transformers(case, rope_parameters=whole),
    )
    assert same != BRIDGES[case].turns_part
    assert "--rotary-percent" not in flags(case, rope_parameters=whole)
    if BRIDGES[case].turns_part:
        found = flags(case, rope_parameters=rope)
        assert found[found.index("--rotary-percent") + 1] == "0.5"
        return
    message = f"partial_rotary_factor in config.json is 0.5, .* not apply to {case}"
    for changes in ({"rope_parameters": rope}, part):
        with pytest.raises(ValueError, match=message):
            flags(case, **changes)


@pytest.mark.parametrize("case", FAMILIES)
def test_families_have_windows_where_transformers_has_them(case: str) -> None:
    from megatron_patches.families.bridges import BRIDGES

    family = BRIDGES[case]
    given = SLIDING if family.has_windows else {}
    each = {"layer_types": LAYERS if family.reads_layer_types else LAYERS[:1] * 2}
    other = {"layer_types": LAYERS[1:] * 2}
    read = not torch.equal(
        logits_of_transformers(case, **given, **each),
        logits_of_transformers(case, **given, **other),
    )
    assert read == family.reads_layer_types
    assert not family.has_windows or "--window-size" in flags(case, **given, **each)
    with pytest.raises(ValueError, match=r"layer_types in config\.json has 'chunked"):
        flags(case, **given, layer_types=["chunked_attention"] * 2)
    if family.reads_layer_types:
        flags(case, **given, **other)
        with pytest.raises(ValueError, match=r"sliding_window in config\.json is (null|0), but"):
            flags(case, sliding_window=None, layer_types=LAYERS)
    else:
        with pytest.raises(ValueError, match=r"layer_types in config\.json has '(full|sliding)"):
            flags(case, **given, layer_types=LAYERS)


@pytest.mark.parametrize("case", LATENT)
def test_norms_of_latents_have_an_epsilon_of_their_own(case: str) -> None:
    import transformers

    from megatron_patches.families.bridges import LATENT_EPSILON

    config = small_config(case, rms_norm_eps=1e-3)
    attention = transformers.AutoModelForCausalLM.from_config(config).model.layers[0].self_attn
    for norm in (attention.q_a_layernorm, attention.kv_a_layernorm):
        assert norm.variance_epsilon == LATENT_EPSILON
    with pytest.raises(ValueError, match=r"rms_norm_eps in config\.json is 0.001: .* 1e-06 "):
        flags(case, rms_norm_eps=1e-3)


@pytest.mark.parametrize("case", LATENT)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads in config.json is 2: .*, 4$"),
        ({"topk_group": 0}, "topk_group in config.json is 0: .* from 1 to n_group, 4"),
        ({"topk_group": 5}, "topk_group in config.json is 5"),
        ({"topk_group": None}, "topk_group in config.json is None"),
        ({"n_group": 3}, "n_group in config.json is 3: .* n_routed_experts, 8"),
        ({"n_group": None}, "n_group in config.json is None"),
        ({"n_group": 0}, "n_group in config.json is 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok in config.json is 5: .* from 1 to 4"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok in config.json is None"),
        ({"rope_parameters": YARN | {"truncate": False}}, "'truncate': False.* is not in megat"),
        ({"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0}}, "other than 0"),
        ({"rope_parameters": YARN | {"mscale_all_dim": 0}}, "other than 0"),
        ({"rope_parameters": YARN | {"rope_theta": None}}, f"rope_theta {ROPE} None"),
    ],
)
def test_latents_and_groups_that_cannot_be(case: str, changes: dict[str, Any], message) -> None:
    flags(case, rope_parameters=YARN | {"truncate": True})
    sizes = {"topk_group": 1} if message.startswith("num_experts_per_tok") else {}
    with pytest.raises(ValueError, match=message):
        flags(case, **changes, **({"n_group": 2} | sizes if sizes else {}))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_theta": None}, f"rope_theta {ROPE} None: give a number above 0"),
        ({"rope_theta": "x"}, f"rope_theta {ROPE} 'x'"),
        ({"rope_theta": -1.0}, f"rope_theta {ROPE} -1.0"),
        ({"rope_theta": float("inf")}, f"rope_theta {ROPE} inf"),
        (BASE | {"rope_type": "linear"}, f"factor {ROPE} None"),
        (BASE | {"rope_type": "linear", "factor": "x"}, f"factor {ROPE} 'x'"),
        (None, "full_attention of rope_parameters in config.json is None"),
    ],
)
def test_rotary_embeddings_that_are_none(rope: dict[str, Any] | None, message: str) -> None:
    from megatron_patches.convert.model import flags_of

    config = small_config("gemma3_text")
    # Some of these transformers refuses itself where it makes a configuration.
    config.rope_parameters = TWO_BASES | {
        "full_attention": rope and {"rope_type": "default"} | rope
    }
    with pytest.raises(ValueError, match=message):
        flags_of(config)
    assert flags("gemma3_text")

"""Rotary angles of documents' tokens against those of megatron-core's `RotaryEmbedding`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.model.core_attention import DocumentParams
from support.models import HEAD_DIM, parse

# Flags, and what they mean to megatron-core's class.
CASES: dict[str, dict[str, Any]] = {
    "": {},
    "--rotary-seq-len-interpolation-factor 3": {"seq_len_interpolation_factor": 3},
    "--rotary-base 500000": {"rotary_base": 500000},
    "--rotary-percent 0.5": {"rotary_percent": 0.5},
    "--use-rope-scaling": {"rope_scaling": True},
    "--use-rope-scaling --rope-scaling-factor 32": {
        "rope_scaling": True,
        "rope_scaling_factor": 32.0,
    },
    "--rotary-seq-len-interpolation-factor 2 --rotary-percent 0.75 --rotary-base 20000 "
    "--use-rope-scaling --rope-scaling-factor 4": {
        "seq_len_interpolation_factor": 2,
        "rotary_percent": 0.75,
        "rotary_base": 20000,
        "rope_scaling": True,
        "rope_scaling_factor": 4.0,
    },
}
# A document from its start, one that goes on from another rank, a token, one beyond the 8192 tokens
# from which on Llama 3 scales.
POSITIONS = [*range(100), *range(4000, 4100), 0, *range(20_000, 20_050)]


@pytest.fixture(scope="module")
def angles(ranks) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each case, ours and megatron-core's."""
    found = ranks.run(both_angles, list(CASES.items()), world_size=1)[0]
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("flags", CASES)
def test_angles_are_megatron_s_at_each_token_s_position(angles, flags: str) -> None:
    ours, theirs = angles[flags]
    share = CASES[flags].get("rotary_percent", 1)
    assert ours.shape == (len(POSITIONS), 1, 1, int(share * HEAD_DIM))
    assert torch.equal(ours, theirs)


def both_angles(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Angles of the model that the flags give, and of a `RotaryEmbedding` made by hand."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_patches.model.gpt import build_model
    from support import training

    common = ["--seq-length", "128", "--num-layers", "1", "--distca"]
    started = training.initialize(parse(common))
    positions = torch.tensor(POSITIONS)
    results = []
    for flags, meaning in cases:
        args = parse([*common, *flags.split()])
        args.padded_vocab_size = started.padded_vocab_size
        transformer = core_transformer_config_from_args(args)
        rotary = build_model(DistcaConfig.from_args(args), args, transformer).rotary_pos_emb
        rotary.positions = positions
        keywords = {"kv_channels": HEAD_DIM, "rotary_percent": 1.0, "use_cpu_initialization": True}
        reference = RotaryEmbedding(**keywords | meaning)
        results.append((rotary(len(POSITIONS)), reference(max(POSITIONS) + 1)[positions]))
    return results


YARN = """
    --position-embedding-type yarn --rotary-base 150000 --rotary-scaling-factor 32
    --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 16 --yarn-beta-slow 2
    --no-yarn-correction-range-round-to-int
""".split()


def test_angles_of_yarn(ranks) -> None:
    """They come with a factor of sines and cosines, which attention applies."""
    (ours, factor), (theirs, expected) = ranks.run(yarn_angles, world_size=1)[0]
    assert ours.shape == (len(POSITIONS), 1, 1, HEAD_DIM)
    assert torch.equal(ours, theirs)
    assert factor == expected > 1


def yarn_angles() -> tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]]:
    """Ours, and those of a `YarnRotaryEmbedding` made by hand, with their factors."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_patches.model.gpt import build_model
    from support import training

    args = parse(["--seq-length", "128", "--num-layers", "1", "--distca", *YARN])
    training.initialize(args)
    transformer = core_transformer_config_from_args(args)
    model = build_model(DistcaConfig.from_args(args), args, transformer)
    model.rotary_pos_emb.positions = torch.tensor(POSITIONS)
    reference = YarnRotaryEmbedding(
        HEAD_DIM,
        rotary_base=150000,
        scaling_factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=16,
        beta_slow=2,
        correction_range_round_to_int=False,
        use_cpu_initialization=True,
    )
    angles, factor = reference(max(POSITIONS) + 1)
    layer = model.decoder.layers[0].self_attention
    assert layer._yarn_concentration_factor == factor
    return model.rotary_pos_emb(len(POSITIONS)), (angles[POSITIONS], factor)


def test_interleaved_angles(ranks) -> None:
    ours, theirs = ranks.run(interleaved_angles, world_size=1)[0]
    assert torch.equal(ours, theirs)


def interleaved_angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and megatron-core's where a frequency turns neighbouring channels."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_patches.hooks import adapt_megatron_core
    from megatron_patches.model.rotary import TokenRotaryEmbedding

    adapt_megatron_core()
    reference = RotaryEmbedding(HEAD_DIM, 1.0, rotary_interleaved=True, use_cpu_initialization=True)
    rotary = TokenRotaryEmbedding(reference)
    rotary.positions = torch.tensor(POSITIONS)
    return rotary(len(POSITIONS)), reference(max(POSITIONS) + 1)[rotary.positions]


@pytest.mark.parametrize("kind", ["rope", "yarn"])
def test_angles_of_latent_attention(ranks, kind: str) -> None:
    """Of each layer's own embedding, by the positions that come with packed documents."""
    ours, theirs, factors = ranks.run(angles_of_latents, kind, world_size=1)[0]
    assert ours.shape == (len(POSITIONS), 1, 1, 8)
    assert torch.equal(ours, theirs)
    assert (factors[0] == factors[1] > 1) == (kind == "yarn")


def angles_of_latents(kind: str) -> tuple[torch.Tensor, torch.Tensor, tuple[float, float]]:
    """Ours, megatron-core's, and the factors of both."""
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_patches.model.gpt import build_model
    from support import training

    flags = "--seq-length 128 --num-layers 1 --distca --multi-latent-attention"
    flags += f" --qk-pos-emb-head-dim 8 --rope-type {kind} --rotary-scaling-factor 4"
    args = parse(flags.split())
    training.initialize(args)
    transformer = core_transformer_config_from_args(args)
    (layer,) = build_model(DistcaConfig.from_args(args), args, transformer).decoder.layers
    rotary, positions = layer.self_attention.rotary_pos_emb, torch.tensor(POSITIONS)
    documents = DocumentParams(max_seqlen_q=9, max_seqlen_kv=9, token_positions=positions)
    rotary.get_rotary_seq_len(None, None, None, layer.config, documents)
    found = rotary(9, packed_seq=True), rotary._rotary(max(POSITIONS) + 1)
    (ours, *factor), (theirs, *expected) = (x if isinstance(x, tuple) else (x,) for x in found)
    return ours, theirs[positions], (*factor, *expected) or (1.0, 1.0)

"""Flags: what follows from them, and what is refused, before anything starts."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

import pytest
import torch

from distca.cost.volume import AttentionShape
from distca.plan import LayerMasks, Mask
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import (
    mask_of_window,
    masks_from_args,
    masks_of_a_chunk,
)
from megatron_patches.flags.planning import schedule_config
from megatron_patches.flags.sizes import ModelSizes
from support.arguments import check, parse
from support.versions import NEWER_FLAGS


def test_heads_that_no_gpu_kernel_has_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(parse("--distca", "--bf16", "--kv-channels", "96"))
    with pytest.raises(ValueError, match="heads of 100 elements: choose --kv-channels"):
        check(parse("--distca", "--bf16", "--kv-channels", "100"))


@pytest.mark.parametrize("text", ["100,0", "(100,0)", "(100, 0)"])
def test_windows(text: str) -> None:
    assert mask_of_window(parse("--window-size", text).window_size).window_left == 100
    assert mask_of_window(parse("--window-size", "(-1,0)").window_size).window_left is None
    assert mask_of_window(parse().window_size).window_left is None


def test_several_validation_sets_are_whole_ones_with_prefixes_of_their_own() -> None:
    flags = ["--multiple-validation-sets", "--full-validation"]
    for given, said in (
        (flags[:1], "needs --full-validation, in Megatron-LM, too"),
        (flags, "needs --valid-data-path or --per-split-data-args-path"),
        (["--validation-set-names", "a"], "needs --multiple-validation-sets"),
    )[: 3 if NEWER_FLAGS else 2]:
        with pytest.raises(ValueError, match=said):
            parse(*given)


def test_windows_on_some_layers() -> None:
    """Megatron counts layers from 1, of which every Nth has no window."""
    six = ("--num-layers", "6", "--window-size", "100,0", "--window-attn-skip-freq")
    for pattern in ("3", "[1,1,0]*2"):
        masks = masks_from_args(parse(*six, pattern))
        assert masks.masks == (Mask(), Mask(100))
        lefts = [masks.of_layer(layer).window_left for layer in range(6)]
        assert lefts == [100, 100, None] * 2
    stages = parse(*six, "3", "--distca", "--pipeline-model-parallel-size", "2")
    assert masks_of_a_chunk(stages).pattern == (1, 1, 0)
    # All layers of this chunk are alike.
    assert masks_of_a_chunk(parse(*six, "1", "--distca")) == LayerMasks.of([Mask()] * 6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 3", "Megatron-LM refuses the flags: world size .4. is not"),
        (
            "--num-attention-heads 7",
            "--hidden-size 64 is not a multiple of --num-attention-heads 7",
        ),
        ("--num-layers two", "argument --num-layers: invalid int value: 'two'"),
        ("--seq-length 200", "not a multiple of the attention block of 128: use 128"),
        ("--window-size 100,5", "the second number must be 0"),
        ("--window-attn-skip-freq 0", "out of range: give a whole number from 1"),
        ("--window-attn-skip-freq [1,0,1]", "has 3 values, but --num-layers is "),
        (
            "--distca --window-size 9,0 --window-attn-skip-freq 3 --num-layers 4 "
            "--pipeline-model-parallel-size 2",
            "layer 3 another mask than layer 1, which runs at the same time",
        ),
        ("--distca-tolerance 1.5", "--distca-tolerance 1.5 is out of range"),
        ("--distca-max-document-length 0", "out of range"),
        (
            "--distca --pipeline-model-parallel-size 2 --distca-backward keep",
            "keep needs --pipeline-model-parallel-size 1",
        ),
        ("--distca --distca-transport nvshmem", "nvshmem needs GPUs"),
        (
            "--distca --distca-transport shm --distca-nvshmem-mode copy-engine",
            "copy-engine says how nvshmem copies",
        ),
        ("--distca --distca-nccl-max-ctas 0", "give a whole number from 1 to 64"),
        ("--distca --distca-nccl-max-ctas 12", "not a power of two"),
        ("--distca --distca-max-in-flight 2", "bounds a pipeline's stages"),
        (
            "--distca --pipeline-model-parallel-size 2 --distca-max-in-flight 0",
            "--distca-max-in-flight 0 is out of range",
        ),
        ("--distca-chain 0", "--distca-chain 0 is out of range"),
        (
            "--distca --pipeline-model-parallel-size 2 --distca-chain 3 --distca-max-in-flight 2",
            "keeps the activations of 3 micro-batches",
        ),
        ("--distca --distca-chain 2 --distca-backward keep", "needs --distca-backward resend"),
        ("--distca --distca-chain 2 --distca-cuda-graphs", "not covered by --distca-cuda-graphs"),
        ("--distca --distca-sm-margin 8", "--distca-sm-margin needs GPUs, but torch sees none"),
        ("--distca --distca-sm-margin -1", "--distca-sm-margin -1 is out of range"),
        ("--distca --distca-pool-size 0", "--distca-pool-size 0 is out of range"),
        ("--distca --distca-pool-size 3", "must divide the"),
        ("--distca --distca-token-pairs 900", "is for server pools: add --distca-pool-size"),
        ("--distca --distca-wide-documents 9", "is for server pools: add --distca-pool-size"),
        ("--distca --distca-memory-gb 9", "is for server pools: add --distca-pool-size"),
        ("--distca --distca-pool-size 1 --distca-memory-gb 0", "--distca-memory-gb 0.0 is out of"),
        (
            "--distca --distca-pool-size 1 --distca-wide-documents 9 "
            "--pipeline-model-parallel-size 2",
            "does not work with pipelines",
        ),
        ("--distca --distca-share-prefixes", "finds what conversations share: add --sft"),
        ("--distca --distca-pool-size 1 --distca-chain 2", "together with --distca-chain 2"),
        (
            "--distca --distca-head-parallel-size 3",
            "must divide the 4 data-parallel ranks",
        ),
        (
            "--distca --distca-head-parallel-size 2 --group-query-attention --num-query-groups 1",
            "must divide the 1 key-value heads",
        ),
        (
            "--distca --distca-head-parallel-size 2 --distca-pool-size 1",
            "must divide --distca-pool-size 1",
        ),
        (
            "--distca --distca-head-parallel-size 2 --distca-scheduler wlb-llm",
            "add --distca-placement sequential",
        ),
        (
            "--distca --distca-pool-size 1 --distca-placement sequential",
            "together with --distca-placement sequential",
        ),
        (
            "--distca --distca-pool-size 1 --distca-scheduler wlb-llm",
            "together with --distca-scheduler wlb-llm",
        ),
        (
            "--distca --distca-pool-size 1 --distca-servers dedicated:1",
            "makes 3 pools, which need equally many of the processes of "
            "--distca-servers dedicated:1: give a multiple of 3",
        ),
        ("--distca --distca-trace t --distca-trace-iterations 3 2", "must lie in 1 .. "),
        (
            "--distca --distca-servers dedicated:2 --distca-scheduler packed",
            "needs a --distca-scheduler that shares tasks out",
        ),
        (
            "--distca --distca-servers dedicated:2 --distca-backward keep",
            "needs --distca-backward resend",
        ),
        (
            "--distca --distca-servers dedicated:2 --no-distca-pool-stages",
            "remove --no-distca-pool-stages",
        ),
        (
            "--distca --recompute-granularity selective --recompute-modules mlp layernorm",
            "does not cover --recompute-modules layernorm",
        ),
        ("--distca --attention-backend unfused", "Megatron's own attention, which it replaces"),
        ("--distca --distca-profile nowhere.json", "does not exist: make one"),
    ],
)
def test_bad_input(flags: str, message: str) -> None:
    if torch.cuda.is_available() and "GPU" in message:
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=message):
        parse(*flags.split())


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("context_parallel_size", 2, "remove --context-parallel-size 2"),
        ("attention_dropout", 0.1, "set --attention-dropout 0"),
        ("cache_mla_latents", True, "does not cover layers for inference"),
        ("moe_expert_capacity_factor", 1.5, "does not cover tokens that experts drop"),
        ("cuda_graph_impl", "local", "remove --cuda-graph-impl local"),
        ("qk_clip", True, "remove --qk-clip"),
        ("decoder_first_pipeline_num_layers", 1, "remove --decoder-first-pipeline-num-layers"),
        ("num_layers", 3, "equally many layers on all 2 pipeline stages"),
        ("position_embedding_type", "learned_absolute", "needs --position-embedding-type rope"),
        ("fp4", "e2m1", "does not cover --fp4: give --no-distca-ping-pong"),
        ("tp_comm_overlap", True, "does not cover --tp-comm-overlap"),
    ],
)
def test_what_distca_does_not_cover(flag: str, value, message: str) -> None:
    """Under Megatron-LM's own loop more can be asked for than our parser accepts."""
    args = parse("--distca", "--pipeline-model-parallel-size", "2")
    setattr(args, flag, value)
    with pytest.raises(ValueError, match=message):
        check(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--group-query-attention", "mutually exclusive with multi latent attention"),
        ("--qk-pos-emb-head-dim 7", "turns pairs, so give an even number"),
        ("--v-head-dim 0", "--v-head-dim 0 is out of range"),
        ("--tensor-model-parallel-size 2 --kv-lora-rank 33", "latent of --kv-lora-rank (97 in"),
        ("--tensor-model-parallel-size 2 --q-lora-rank 9", "latent of --q-lora-rank (9 in"),
        (
            "--distca --recompute-granularity selective --recompute-modules mla_up_proj",
            "does not cover --recompute-modules mla_up_proj",
        ),
    ],
)
def test_bad_input_for_latent_attention(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse("--multi-latent-attention", *flags.split())


def test_sizes_of_latent_attention() -> None:
    sizes = "--q-lora-rank 6 --kv-lora-rank 5 --qk-head-dim 24 --qk-pos-emb-head-dim 8"
    args = parse("--multi-latent-attention", *sizes.split(), "--v-head-dim", "16")
    heads, hidden = args.num_attention_heads, args.hidden_size
    shape = ModelSizes.from_args(args).attention_shape(1)
    assert shape == AttentionShape(heads, heads, 32, 4, 16)
    assert not args.apply_rope_fusion
    queries, keys = 6 * (hidden + heads * 32), hidden * 13 + 5 * heads * (24 + 16)
    assert ModelSizes.from_args(args).attention_parameters == queries + keys + heads * 16 * hidden
    args.q_lora_rank = None
    queries = hidden * heads * 32
    assert ModelSizes.from_args(args).attention_parameters == queries + keys + heads * 16 * hidden
    with pytest.raises(ValueError, match="yarn needs --multi-latent-attention"):
        parse("--rope-type", "yarn")


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"fp8_recipe": "delayed"}, "", "choose one of tensorwise, blockwise, mxfp8"),
        ({"gradient_accumulation_fusion": True}, "", "--fp8: .* add --no-gradient-accum"),
        ({}, "", None),
        ({}, "--tensor-model-parallel-size 4 --sequence-parallel", "multiple of 32 .* not 16"),
        ({}, "--distca-scheduler wlb-llm", "numbers of tokens, which fp8 .* sequential"),
        ({}, "--distca-scheduler wlb-llm --distca-placement sequential", None),
    ],
)
def test_fp8_layers_with_two_nano_batches(
    changes: dict[str, Any], flags: str, message: str | None
) -> None:
    args = parse("--distca", "--seq-length", "128", *flags.split(), world_size=4)
    vars(args).update({"fp8": "e4m3", "fp8_recipe": "tensorwise"} | changes)
    if message is None:
        check(args)
        return
    with pytest.raises(ValueError, match=message):
        check(args)
    args.distca_ping_pong = False
    check(args)


def test_weights_in_lower_precision_add_to_gradients() -> None:
    args = parse("--distca", "--no-distca-ping-pong", "--distca-chain", "2")
    args.te_precision_config_file = "precision.yaml"
    check(args)
    args.gradient_accumulation_fusion = True
    with pytest.raises(ValueError, match=r"--te-precision-config-file: .* add --no-gradient"):
        check(args)


def shape_of(args: Namespace) -> AttentionShape:
    return schedule_config(DistcaConfig.from_args(args), args, 2).shape


def test_latents_travel_where_servers_can_expand_them() -> None:
    latent = "--distca --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 24".split()
    latent += "--qk-pos-emb-head-dim 8 --v-head-dim 16".split()
    heads = parse().num_attention_heads
    keys = AttentionShape(heads, heads, 32, 4, 16)
    latents = AttentionShape(heads, heads, 32, 4, 16, 16, 8)
    assert shape_of(parse(*latent)) == latents
    off = [*latent, "--distca-latent-rows", "off"]
    assert shape_of(parse(*off)) == keys
    # Two ranks of a node whose links are faster than products.
    near = [*latent, "--distca-gpus-per-node", "8", "--distca-node-gb-per-s", "1e9"]
    assert shape_of(parse(*near)) == keys
    assert shape_of(parse(*near, "--distca-latent-rows", "on")) == latents
    for flags, message in (
        ("--pipeline-model-parallel-size 2", "add --no-distca-pool-stages"),
        ("--distca-servers dedicated:1", "remove --distca-servers"),
        (
            "--no-distca-ping-pong --recompute-granularity selective --recompute-modules "
            "mla_up_proj",
            "mla_up_proj in --recompute-modules",
        ),
    ):
        assert shape_of(parse(*latent, *flags.split(), world_size=4)).kv_rank is None
        with pytest.raises(ValueError, match=re.escape(message)):
            parse(*latent, *flags.split(), "--distca-latent-rows", "on", world_size=4)
    apart = "--pipeline-model-parallel-size 2 --no-distca-pool-stages".split()
    assert shape_of(parse(*latent, *apart, world_size=4)).kv_rank == 16
    with pytest.raises(ValueError, match="add it; or give auto"):
        parse("--distca", "--distca-latent-rows", "on")


def test_chains_go_back_last_first() -> None:
    args = parse("--distca", "--no-distca-ping-pong", "--distca-chain", "2")
    args.fp8 = "e4m3"
    with pytest.raises(ValueError, match="--distca-chain 2 is not covered by --fp8"):
        check(args)


def test_dedicated_servers_are_no_part_of_the_model() -> None:
    args = parse("--distca", "--distca-servers", "dedicated:3", world_size=5)
    assert (args.world_size, args.data_parallel_size) == (2, 2)
    in_place = parse("--distca", "--distca-servers", "inplace", world_size=5)
    assert (in_place.world_size, in_place.data_parallel_size) == (5, 5)
    # Without --distca the same command is plain Megatron on all processes.
    assert parse("--distca-servers", "dedicated:3", world_size=5).data_parallel_size == 5
    with pytest.raises(ValueError, match="a process for each of the 2 tensor-parallel parts"):
        parse(
            "--distca",
            "--distca-servers",
            "dedicated:3",
            "--tensor-model-parallel-size",
            "2",
            world_size=5,
        )


def test_each_nano_batch_has_a_shard_for_each_tensor_parallel_rank() -> None:
    """With sequence parallelism only: without it every rank has all of a nano-batch's tokens."""
    three = "--distca --tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 96"
    three += " --ffn-hidden-size 96 --seq-length 384 --micro-batch-size 1"
    parse(*three.split(), world_size=3)
    parse(*three.split(), "--sequence-parallel", world_size=3)
    odd = three.replace("--seq-length 384", "--seq-length 128").split()
    parse(*odd, world_size=3)
    with pytest.raises(ValueError, match="128 to be a multiple of"):
        parse(*odd, "--sequence-parallel", world_size=3)
    # Several samples together may have the tokens that each alone has not.
    parse(*odd, "--sequence-parallel", "--micro-batch-size", "3", world_size=3)


@pytest.mark.parametrize("value", ["dedicated", "dedicated:", "dedicated:0", "inplace:2", "two"])
def test_servers_that_are_neither_in_place_nor_so_many(value: str) -> None:
    with pytest.raises(ValueError, match=f"'{value}' is neither inplace nor dedicated:N"):
        parse("--distca", "--distca-servers", value)

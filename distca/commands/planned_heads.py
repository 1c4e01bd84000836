"""Flags that describe a model's attention, for `distca plan` and `distca profile`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace

from distca.commands.command_line import Parser
from distca.commands.described import (
    LATENTS,
    WINDOWS,
    Group,
    add_model_flag,
    flag_of,
    given_values,
    latents_of,
    named_model,
    with_windows,
)
from distca.cost.latent_rows import LATENT_ROWS, comm_shape
from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.volume import AttentionShape
from distca.plan import Mask, Plan
from distca.schedule import ScheduleConfig, describe
from distca.wording import ordinal

_HEADS = {
    "heads": "Number of query heads of the whole model.",
    "kv_heads": "Number of key-value heads. Default: that of --heads.",
    "head_dim": "Elements per head. Default: 128.",
}
# The queries' latent never travels.
_OF_KEYS = ("kv_lora_rank", "qk_pos_emb_head_dim", "v_head_dim")
_LATENT_KEYS = {name: LATENTS[name] for name in _OF_KEYS}


def add_flags(parser: Parser) -> None:
    """Adds the flags of `planned_model`, `shape_of` and `travelling_shape_of`."""
    model = parser.add_argument_group(
        "model (--model or the heads, unless --load is given; a flag overrides the model's value)"
    )
    add_shape_flags(model)
    model.add_argument(
        "--dtype-bytes",
        type=int,
        default=2,
        choices=(1, 2, 4),
        help="Bytes per element: 2 for bf16.",
    )
    for name, what in (_LATENT_KEYS | WINDOWS).items():
        if name != "v_head_dim":
            model.add_argument(flag_of(name), type=int, metavar="N", help=what)
    model.add_argument(
        "--latent-rows",
        choices=LATENT_ROWS,
        default="auto",
        help="With multi-latent attention: what ranks send to servers, as --distca-latent-rows "
        "in training. on: latents, which servers expand; off: keys and values; auto: what "
        "takes less time.",
    )


def add_shape_flags(group: Group, default: ModelSize | None = None) -> None:
    """Adds the flags of the heads alone.

    Args:
        group: group of the flags.
        default: model without `--model`, whose heads are the defaults.
    """
    add_model_flag(group)
    for name, what in _HEADS.items():
        if default is not None:
            what = f"{what.split(' Default')[0]} Default: the model's, or {getattr(default, name)}."
        group.add_argument(flag_of(name), type=int, metavar="N", help=what)
    group.add_argument(
        "--v-head-dim",
        type=int,
        metavar="N",
        help="Elements per head of the values. Default: --head-dim.",
    )
    group.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="Number of GPUs that split the heads. All figures are for one of these GPUs.",
    )


def planned_model(args: argparse.Namespace, default: ModelSize | None = None) -> ModelSize:
    """Returns the attention of the model that the flags describe; its other sizes mean nothing.

    Args:
        args: values of the flags.
        default: model without `--model`; None: the heads must be given then.

    Raises:
        ValueError: the flags describe none.
    """
    given = given_values(args, _HEADS)
    for name, value in (given | given_values(args, ("v_head_dim", "dtype_bytes"))).items():
        if value < 1:
            raise ValueError(f"{flag_of(name)} {value} must be at least 1")
    if args.model is not None:
        model = named_model(args.model, given, attention_only=True)
    elif default is not None:
        model = replace(default, **given)
    elif "heads" in given:
        sizes = {"kv_heads": given["heads"], "head_dim": 128} | given
        model = ModelSize(layers=1, hidden_size=0, ffn_hidden_size=0, **sizes)
    else:
        raise ValueError("give --model or --heads (and --kv-heads, where they are fewer)")
    of_keys = given_values(args, _LATENT_KEYS)
    if model.latents is not None or {*of_keys} - {"v_head_dim"}:
        model = replace(model, latents=latents_of(of_keys, model.latents))
    return with_windows(model, given_values(args, WINDOWS))


def shape_of(model: ModelSize, args: argparse.Namespace, dtype_bytes: int) -> AttentionShape:
    """Returns the attention heads of one tensor-parallel rank.

    Raises:
        ValueError: the ranks do not divide them.
    """
    return _with_values(model.attention_shape(args.tensor_model_parallel_size, dtype_bytes), args)


def travelling_shape_of(model: ModelSize, args: argparse.Namespace, links: Links) -> AttentionShape:
    """Returns the same heads with what travels for their keys and values.

    Raises:
        ValueError: latents are asked for, and the model has none.
    """
    # Those of a plan that is loaded are taken to be on several nodes.
    servers = args.servers or links.ranks_per_node + 1
    sizes = args.tensor_model_parallel_size, args.dtype_bytes
    return _with_values(comm_shape(model, *sizes, links, servers, args.latent_rows), args)


def _with_values(shape: AttentionShape, args: argparse.Namespace) -> AttentionShape:
    return shape if args.v_head_dim is None else replace(shape, v_head_dim=args.v_head_dim)


def layers_of(mask: Mask, model: ModelSize) -> str:
    """Says which layers a plan is for, in a model whose layers have several masks."""
    every = f"every {ordinal(model.window_attn_skip_freq or 1)} layer"
    if mask == Mask():
        others = " or ".join(described_mask(each) for each in model.masks.masks if each != mask)
        return f"{every}, which sees all; a query of the others sees {others}"
    return f"those of {described_mask(mask)}; {every} sees all"


def figures_of_other_layers(
    plans: Sequence[Plan], config: ScheduleConfig
) -> list[dict[str, object]]:
    """Returns JSON values of plans of layers that have other masks."""
    return [{"sees": described_mask(p.mask), **asdict(describe(p, config))} for p in plans]


def balance_of(plan: Plan, config: ScheduleConfig) -> str:
    """Says how balanced layers with another mask are."""
    s = describe(plan, config)
    return (
        f"load max/mean {s.load_max_over_mean_before:.3f} -> {s.load_max_over_mean:.3f} "
        f"(mean {s.load_mean:.4g} {s.load_unit}), {s.bytes_total / 1e6:,.2f} MB forward"
    )


def described_mask(mask: Mask) -> str:
    """Says what a query of a layer sees."""
    if mask == Mask():
        return "all earlier tokens"
    if mask.attention_chunk is not None:
        return f"a chunk of {mask.attention_chunk:,} tokens"
    return f"a window of {mask.window_left:,} earlier tokens"

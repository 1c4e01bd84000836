"""Flags of `distca plan` that describe a model's attention heads, and their shape."""

from __future__ import annotations

import argparse
from dataclasses import replace

from distca.commands.command_line import Parser
from distca.cost.latent_rows import LATENT_ROWS, travelling_shape
from distca.cost.link import Links
from distca.cost.model_sizes import MODELS, ModelSize
from distca.cost.volume import AttentionShape


def add_flags(parser: Parser) -> None:
    """Adds the flags of `shape_of` and the mask."""
    model = parser.add_argument_group("model (a preset or the number of heads, unless --load)")
    model.add_argument("--model", metavar="NAME", help=f"A preset: {', '.join(MODELS)}.")
    model.add_argument("--heads", type=int, metavar="N", help="Query heads of the whole model.")
    model.add_argument(
        "--kv-heads", type=int, metavar="N", help="Key-value heads. Default: as many as --heads."
    )
    model.add_argument(
        "--head-dim",
        type=int,
        default=128,
        metavar="N",
        help="Elements of a head; presets bring their own.",
    )
    model.add_argument(
        "--v-head-dim", type=int, metavar="N", help="Those of a value's head. Default: as many."
    )
    model.add_argument(
        "--latent-rows",
        choices=LATENT_ROWS,
        default="auto",
        help="What travels for keys and values of latent attention, as --distca-latent-rows in "
        "training: on, latents, which servers expand; off, keys and values; auto, what takes less "
        "time.",
    )
    model.add_argument(
        "--dtype-bytes", type=int, default=2, metavar="N", help="Bytes of an element: 2 for bf16."
    )
    model.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that divide the heads among them; bytes are of one of them.",
    )
    model.add_argument(
        "--window-left",
        type=int,
        metavar="TOKENS",
        help="Sliding window: a query sees so many earlier tokens. Default: all of its document.",
    )
    model.add_argument(
        "--attention-chunk-size",
        type=int,
        metavar="TOKENS",
        help="Chunked local attention: a query sees the earlier tokens of its own chunk alone.",
    )
    model.add_argument(
        "--window-attn-skip-freq",
        type=int,
        metavar="N",
        help="Every Nth layer has no window and no chunks, and its plan chooses the placement of "
        "all; shown is the plan of the others. Default: all layers are alike.",
    )


def shape_of(args: argparse.Namespace) -> AttentionShape:
    """Returns the attention heads of one tensor-parallel rank.

    Raises:
        ValueError: the flags describe none.
    """
    if (args.model is None) == (args.heads is None):
        raise ValueError("give either --model or --heads (and --kv-heads, where they are fewer)")
    if args.model is not None and args.model not in MODELS:
        raise ValueError(f"no model {args.model!r}: choose from {', '.join(MODELS)}")
    parallel, dtype_bytes = args.tensor_model_parallel_size, args.dtype_bytes
    if args.model is not None:
        return MODELS[args.model].attention_shape(parallel, dtype_bytes)
    size = ModelSize(1, 0, args.heads, args.kv_heads or args.heads, args.head_dim, 0)
    shape = size.attention_shape(parallel, dtype_bytes)
    return replace(shape, v_head_dim=args.v_head_dim)


def travelling_shape_of(args: argparse.Namespace, links: Links) -> AttentionShape:
    """Returns the same heads with what travels for their keys and values.

    Raises:
        ValueError: latents are asked for, and the model has none.
    """
    if args.model is None:
        if args.latent_rows == "on":
            raise ValueError("--latent-rows on needs a --model with latents")
        return shape_of(args)
    parallel, dtype_bytes = args.tensor_model_parallel_size, args.dtype_bytes
    # Those of a plan that is loaded are taken to be on several nodes.
    servers = args.servers or links.ranks_per_node + 1
    model = MODELS[args.model]
    return travelling_shape(model, parallel, dtype_bytes, links, servers, args.latent_rows)

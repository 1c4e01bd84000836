"""Flags of a described model and cluster, which all simulating commands have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from distca.commands.command_line import Parser, unknown
from distca.cost.model_config import CONFIG, read_model_size
from distca.cost.model_sizes import MODELS, Experts, Latents, ModelSize
from distca.plan import BLOCK
from distca.schedule.serving import SELECTORS, STRATEGIES
from distca.schedule.serving.balanced import NAME as TILES
from distca.schedule.serving.partitions import Shares, check_shares, even_shares
from distca.simulate import CLUSTERS, PUBLISHED, UNCHARGED, Charges, Cluster

RUNAHEAD = "runahead"
"""Strategy of prefills by which keys travel down a chain of ranks (KV-Runahead)."""

Group = argparse._ArgumentGroup
Value = TypeVar("Value")
_SIZES = {
    "layers": "Number of transformer layers.",
    "hidden_size": "Hidden size of the model.",
    "heads": "Number of query heads.",
    "kv_heads": "Number of key-value heads.",
    "head_dim": "Elements per head.",
    "ffn_hidden_size": "Width of the gated MLP; in models with experts, the total width of the "
    "shared experts.",
    "vocab_size": "Number of tokens in the vocabulary.",
}
_EXPERTS = {
    "num_experts": "Number of routed experts per layer.",
    "moe_router_topk": "Number of routed experts per token.",
    "moe_ffn_hidden_size": "Width of each expert's gated MLP.",
}
LATENTS = {
    "kv_lora_rank": "With multi-latent attention: size of the latent of keys and values.",
    "qk_pos_emb_head_dim": "With multi-latent attention: number of rotary elements of a key, "
    "which all heads share.",
    "v_head_dim": "Elements per head of the values; --head-dim is for the keys.",
    "q_lora_rank": "With multi-latent attention: size of the latent of queries. Default: the "
    "preset's, or none.",
}
WINDOWS = {
    "window_left": "Sliding window: a query sees N earlier tokens. Default: the preset's, or "
    "all earlier tokens of its document.",
    "attention_chunk_size": "Chunked local attention: a query sees only the earlier tokens in "
    "its own chunk of N tokens. Default: the preset's, or all earlier tokens of its document.",
    "window_attn_skip_freq": "Every Nth layer has full attention instead of a window or "
    "chunks. Default: the preset's, or no layer.",
}
_OVERRIDES = {
    "gpus_per_node": "Number of GPUs per node.",
    "memory_gb": "Memory of a GPU in GB (10^9 bytes).",
    "peak_tflops": "Peak speed of a GPU, in dense 16-bit TFLOP/s.",
    "linear_mfu": "Share of --peak-tflops that linear layers reach, from 0 to 1.",
    "attention_tflops": "Speed of the attention kernel in the forward pass, in TFLOP/s.",
    "node_gb_per_s": "Speed of a GPU's link within a node, in GB/s per direction.",
    "network_gb_per_s": "Speed of a GPU's link between nodes, in GB/s per direction.",
}
_CHARGES = {
    "link_efficiency": "Share of a link's speed that exchanges reach; above 0.",
    "copy_efficiency": "Share of the memory's speed that copies reach; above 0.",
    "interference": "Share of a GPU's compute that an exchange takes while it runs; below 1.",
}
_MOST_GPUS = 65536
"""Most GPUs that are simulated."""


def once(values: Sequence[Value]) -> list[Value]:
    """Returns the values of a flag without those that were given before, in their order."""
    return list(dict.fromkeys(values))


def add_model_flags(parser: Parser, training: bool = False) -> Group:
    """Adds the flags of `model_of`, those of training alone or not; returns their group."""
    model = parser.add_argument_group("model (--model or all sizes; a size overrides the model's)")
    add_model_flag(model)
    for name, what in (_SIZES | _EXPERTS | (LATENTS | WINDOWS if training else {})).items():
        model.add_argument(flag_of(name), type=int, metavar="N", help=what)
    return model


def add_model_flag(group: Group) -> None:
    """Adds the flag of `named_model`."""
    group.add_argument(
        "--model",
        metavar="NAME|FOLDER",
        help="A preset, or a folder with the config.json of a Hugging Face checkpoint. Presets: "
        f"{', '.join(MODELS)}.",
    )


def add_cluster_flags(parser: Parser) -> Group:
    """Adds the flags of `cluster_of`, but for charges; returns their group."""
    cluster = parser.add_argument_group("cluster (a preset; other flags override its values)")
    cluster.add_argument(
        "--cluster",
        default="dgx-h100",
        metavar="NAME|FILE",
        help="A preset, or the file cluster.json that `distca verify` measured. Presets: "
        f"{', '.join(CLUSTERS)}.",
    )
    for name, what in _OVERRIDES.items():
        kind = int if name == "gpus_per_node" else float
        cluster.add_argument(flag_of(name), type=kind, metavar="X", help=what)
    return cluster


def add_charge_flags(parser: Parser) -> Group:
    """Adds the charges of `cluster_of`; returns their group."""
    charges = parser.add_argument_group(
        "charges (losses against ideal hardware, the same for all systems)"
    )
    charges.add_argument(
        "--baseline-ideal",
        action="store_true",
        help="Charge nothing: links and memory reach the speeds of their data sheets, "
        "exchanges do not slow compute down, and context parallelism copies nothing. In "
        "inference, launches, latencies of collectives and the host take no time, too. No "
        "baseline can be faster than this.",
    )
    for name, what in _CHARGES.items():
        default = getattr(PUBLISHED, name)
        what += f" Default: {default:.2f}, as published."
        charges.add_argument(flag_of(name), type=float, metavar="X", help=what)
    return charges


def add_selection_flags(
    group: Group,
    default: str,
    partitions: str,
    splits_weights: bool = True,
    many_prompts: bool = False,
) -> None:
    """Adds the flags of the strategy, and of who chooses it.

    Args:
        group: group of the flags.
        default: strategy without a flag.
        partitions: what else than shares `--partition` may be.
        splits_weights: whether the command's processes can split the weights.
        many_prompts: whether the command computes several prompts together.
    """
    sp_tp = (
        "; sp-tp: hidden states, between processes that split the weights (only with "
        "--tensor-parallel-size alone, where auto chooses sp-ntp or sp-tp)"
    )
    tiles = (
        "; tiles, for many prompts of unequal lengths: each prompt stays on one rank "
        "(data-parallel attention), and ranks with long prompts send tiles of attention to others"
    )
    group.add_argument(
        "--prefill-strategy",
        choices=(
            *(*STRATEGIES, "auto", RUNAHEAD, "sp-ntp"),
            *(["sp-tp"] if splits_weights else []),
            *("csps", "all-gather"),
            *([TILES] if many_prompts else []),
        ),
        default=default,
        help="What ranks send each other in a prefill. pass-kv: keys and values, around a ring; "
        "pass-q: queries around a ring, and their outputs back; auto: pass-kv or pass-q, chosen "
        "for each prefill; runahead: keys and values, down a chain of ranks; csps: keys and "
        "values, to near ranks first, and to far ranks only some; sp-ntp: heads"
        f"{sp_tp * splits_weights}; all-gather: all keys and values to all ranks, a baseline"
        f"{tiles * many_prompts}.",
    )
    add_partition_flag(group, partitions)
    group.add_argument(
        "--selector",
        choices=SELECTORS,
        default="simulated",
        help="How auto chooses. simulated: the plan with the lower predicted time; paper: the "
        "rule of Meta's context parallelism (Algorithm 5).",
    )


def check_selector(args: argparse.Namespace) -> None:
    """Checks that somebody chooses, if flags say how.

    Raises:
        ValueError: the strategy is given.
    """
    if args.selector != SELECTORS[0] and args.prefill_strategy != "auto":
        raise ValueError(
            f"--selector {args.selector} needs --prefill-strategy auto: "
            f"--prefill-strategy {args.prefill_strategy} leaves nothing to choose"
        )


def add_partition_flag(group: Group, partitions: str) -> None:
    """Adds the flag of a chain's partition, beside `partitions` that are not given as shares."""
    group.add_argument(
        "--partition",
        default="even",
        metavar="P",
        help=f"How runahead divides a prompt: even, {partitions}, or the parts' shares in order, "
        "such as 0.4,0.33,0.27.",
    )


def given_shares(args: argparse.Namespace, ranks: int) -> Shares | None:
    """Returns the shares that `--partition` gives or names; None: it is something else.

    Raises:
        ValueError: they are no partition, or there is no chain.
    """
    given = args.partition
    if args.prefill_strategy != RUNAHEAD:
        if given != "even":
            raise ValueError(f"--partition {given} needs --prefill-strategy {RUNAHEAD}")
        return None
    if given == "even":
        return even_shares(ranks)
    try:
        shares = [float(share) for share in given.split(",")]
    except ValueError:
        return None
    return check_shares(shares)


def flag_of(name: str) -> str:
    """Returns the flag of a field."""
    return "--" + name.replace("_", "-")


def model_of(args: argparse.Namespace) -> ModelSize:
    """Returns the model that the flags describe.

    Raises:
        ValueError: it is no model, or has windows or latents that the command doesn't simulate.
    """
    given = given_values(args, _SIZES)
    of_experts = given_values(args, _EXPERTS)
    # With experts there need be no MLP that all tokens use.
    may_be_zero = {"ffn_hidden_size"} if of_experts else set()
    for name, value in (given | of_experts).items():
        if value < (name not in may_be_zero):
            raise ValueError(f"{flag_of(name)} {value} must be at least 1")
    if args.model is None:
        defaults = {field.name for field in fields(ModelSize) if field.name == "vocab_size"}
        missing = [flag_of(name) for name in _SIZES if name not in {*given, *defaults}]
        if missing:
            raise ValueError(f"give --model, or all sizes: {', '.join(missing)} missing")
        model = ModelSize(**given)
    else:
        model = named_model(args.model, given)
    model = replace(model, experts=_experts_of(of_experts, model.experts))
    if hasattr(args, "window_attn_skip_freq"):
        latents = latents_of(given_values(args, LATENTS), model.latents)
        return with_windows(replace(model, latents=latents), given_values(args, WINDOWS))
    for what, there in (
        ("windows or chunks", not model.sees_all),
        ("latents", model.latents is not None),
    ):
        if there:
            raise ValueError(
                f"{args.model} has layers with {what}: only their training is simulated"
            )
    return model


def named_model(name: str, given: dict[str, Any], attention_only: bool = False) -> ModelSize:
    """Returns the model of a preset's name or of a folder with a `config.json`.

    Args:
        name: value of `--model`.
        given: fields of `ModelSize` that flags give; they win over the model's.
        attention_only: see `read_model_size`.

    Raises:
        ValueError: there is no such model, or its configuration cannot be used.
    """
    if name in MODELS:
        return replace(MODELS[name], **given)
    path = Path(name)
    if path.is_file() or (path / CONFIG).is_file():
        return read_model_size(path, given, attention_only)
    if path.is_dir():
        raise ValueError(f"--model {name} has no {CONFIG}: give the folder of a checkpoint")
    raise ValueError(f"{unknown('model', name, MODELS)}, or give a folder with a {CONFIG}")


def with_windows(model: ModelSize, given: dict[str, Any]) -> ModelSize:
    """Returns the model with the windows that the flags give."""
    model = replace(model, **given)
    if model.window_left is not None and model.window_left < 0:
        raise ValueError(f"--window-left {model.window_left} must not be negative")
    if (size := model.attention_chunk_size) is not None:
        if size < 1 or size % BLOCK:
            raise ValueError(f"--attention-chunk-size {size} must be a multiple of {BLOCK}")
        if model.window_left is not None:
            raise ValueError("give one of --window-left and --attention-chunk-size")
    if (every := model.window_attn_skip_freq) is not None:
        if every < 2:
            raise ValueError(f"--window-attn-skip-freq {every} must be at least 2")
        if model.sees_all:
            raise ValueError(
                "--window-attn-skip-freq says which layers have windows or chunks: add "
                "--window-left or --attention-chunk-size"
            )
    return model


def given_values(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Returns the values of those flags that the command has and that are given, by their names."""
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _experts_of(given: dict[str, int], preset: Experts | None) -> Experts | None:
    """Returns the experts that the flags describe, over those of a preset."""
    if not given:
        return preset
    if preset is not None:
        own = preset.number, preset.chosen, preset.ffn_hidden_size
        given = dict(zip(_EXPERTS, own, strict=True)) | given
    if missing := [flag_of(name) for name in _EXPERTS if name not in given]:
        raise ValueError(f"experts need {', '.join(missing)}, too")
    return Experts(*(given[name] for name in _EXPERTS))


def latents_of(given: dict[str, int], preset: Latents | None) -> Latents | None:
    """Returns the latents that the flags describe, over those of a preset."""
    if not given:
        return preset
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{flag_of(name)} {value} must be at least 1")
    if preset is not None:
        own = preset.kv_rank, preset.rotated_dim, preset.v_head_dim, preset.q_rank
        given = {n: v for n, v in zip(LATENTS, own, strict=True) if v is not None} | given
    if missing := [flag_of(name) for name in list(LATENTS)[:3] if name not in given]:
        raise ValueError(f"latent attention needs {', '.join(missing)}, too")
    return Latents(*(given.get(name) for name in LATENTS))  # type: ignore[arg-type]


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Returns the cluster that the flags describe, with its charges."""
    measured = args.cluster not in CLUSTERS and args.cluster.endswith(".json")
    if not measured and args.cluster not in CLUSTERS:
        known = unknown("cluster", args.cluster, CLUSTERS)
        raise ValueError(f"{known}, or give a .json file that `distca verify` wrote")
    base = Cluster.load(Path(args.cluster)) if measured else CLUSTERS[args.cluster]
    given = {name: getattr(args, name) for name in _OVERRIDES if getattr(args, name) is not None}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{flag_of(name)} {value} must be positive and finite")
    if given.get("linear_mfu", 0) > 1:
        raise ValueError(f"--linear-mfu {args.linear_mfu} is a part of the peak: give at most 1")
    cluster = replace(base, **given, charges=_charges(args))
    if cluster.usable_bytes <= 0:
        raise ValueError(
            f"--memory-gb {cluster.memory_gb:g}: the driver, the libraries and fragments take "
            f"{cluster.reserved_gb:g} GB of a GPU's memory: give more"
        )
    if cluster.attention_tflops > cluster.peak_tflops:
        raise ValueError(
            f"attention cannot reach {cluster.attention_tflops:g} TFLOP/s of a GPU with a peak of "
            f"{cluster.peak_tflops:g}: give another --attention-tflops or --peak-tflops"
        )
    return cluster


def check_gpus(gpus: int, cluster: Cluster) -> None:
    """Checks the GPUs of a job.

    Args:
        gpus: their number.
        cluster: cluster that they are in.

    Raises:
        ValueError: there are more than a search ends for, or parts of nodes.
    """
    of_node = cluster.gpus_per_node
    if gpus > _MOST_GPUS:
        raise ValueError(f"--gpus {gpus}: give at most {_MOST_GPUS}")
    if gpus > of_node and gpus % of_node:
        raise ValueError(
            f"--gpus {gpus} are not whole nodes of {of_node}: give a multiple, or --gpus-per-node"
        )


def _charges(args: argparse.Namespace) -> Charges:
    given = {name: getattr(args, name) for name in _CHARGES if getattr(args, name) is not None}
    if args.baseline_ideal and given:
        raise ValueError(
            f"--baseline-ideal charges nothing: leave out {flag_of(next(iter(given)))}"
        )
    try:
        return replace(UNCHARGED if args.baseline_ideal else PUBLISHED, **given)
    except ValueError as error:
        raise ValueError(f"--{str(error).replace('_', '-', 1)}") from error

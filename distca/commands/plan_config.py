"""The configuration by which `distca plan` makes a plan, or judges a saved one, from its flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from distca.commands import planned_heads
from distca.cost.kernel_time import CostModel
from distca.cost.link import Links
from distca.cost.model_sizes import ModelSize
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.schedule import ScheduleConfig

_LINKS = {
    "servers_per_node": "ranks_per_node",
    "node_gb_per_s": "node_gb_per_s",
    "network_gb_per_s": "network_gb_per_s",
}
_OF_MODELS = frozenset(
    "model heads kv_heads head_dim v_head_dim kv_lora_rank qk_pos_emb_head_dim latent_rows "
    "dtype_bytes tensor_model_parallel_size".split()
)
JUDGING = frozenset([*_LINKS, "server_speeds", "profile"])
"""Flags, by the names of their values, by which loads and bytes are judged."""
USED_WITH_LOAD = _OF_MODELS | JUDGING | {"load", "plot", "save", "json"}
"""Flags that are used with a saved plan."""


def config_of(args: argparse.Namespace, model: ModelSize) -> ScheduleConfig:
    """Returns the configuration that the flags describe, to plan a model's attention.

    Raises:
        ValueError: a value is out of range, or was measured for other heads.
    """
    shape = planned_heads.shape_of(model, args, args.dtype_bytes)
    links = Links(args.servers_per_node, args.node_gb_per_s, args.network_gb_per_s)
    return ScheduleConfig(
        tolerance=args.tolerance,
        shape=planned_heads.travelling_shape_of(model, args, links),
        cost_model=_cost_model(args, shape),
        links=links,
        server_speeds=_server_speeds(args),
        max_buffer_bytes=args.max_buffer_bytes,
        context_parallel_size=args.context_parallel_size,
    )


def _cost_model(args: argparse.Namespace, shape: AttentionShape) -> CostModel | None:
    """Returns the measured times of `--profile`, which must be of these heads."""
    if args.profile is None:
        return None
    measured = Profile.load(args.profile)
    differ = [
        f"{flag} {getattr(measured.shape, name)}, not {getattr(shape, name)}"
        for name, flag in (
            ("heads", "--heads"),
            ("kv_heads", "--kv-heads"),
            ("head_dim", "--head-dim"),
            ("value_dim", "--v-head-dim"),
            ("dtype_bytes", "--dtype-bytes"),
        )
        if getattr(measured.shape, name) != getattr(shape, name)
    ]
    if differ:
        raise ValueError(
            f"--profile {args.profile} was measured for {'; '.join(differ)} (of one rank): run "
            "`distca profile` with your heads and --dtype"
        )
    return measured.of_training()


def _server_speeds(args: argparse.Namespace) -> tuple[float, ...] | None:
    if args.server_speeds is None:
        return None
    try:
        return tuple(float(part) for part in args.server_speeds.split(","))
    except ValueError as error:
        raise ValueError(
            f"--server-speeds {args.server_speeds}: give numbers with commas between them, such as "
            "1,1,0.5"
        ) from error


def saved_config(
    args: argparse.Namespace, given: Mapping[str, str], saved: dict[str, Any]
) -> ScheduleConfig:
    """Returns the configuration that was saved with a plan, where flags win.

    Measured times are not saved.

    Args:
        args: values of the flags.
        given: flags that are given, by the names of their values.
        saved: JSON values that were saved with the plan.

    Raises:
        ValueError: they cannot be used.
    """
    model_flags = {*given} & _OF_MODELS
    links = dict(saved.get("links", {}))
    links |= {
        field: getattr(args, name) for name, field in _LINKS.items() if name in given or not links
    }
    try:
        of_plan = Links(**links)
        if args.model is not None or args.heads is not None or "shape" not in saved:
            model = planned_heads.planned_model(args)
            shape = planned_heads.shape_of(model, args, args.dtype_bytes)
            travelling = planned_heads.travelling_shape_of(model, args, of_plan)
        elif model_flags:
            flags = ", ".join(given[name] for name in sorted(model_flags))
            raise ValueError(f"{flags} with --load: add --model or --heads, or leave it out")
        else:
            travelling = shape = AttentionShape(**saved["shape"])
        speeds = saved.get("server_speeds") if args.server_speeds is None else _server_speeds(args)
        return ScheduleConfig(
            tolerance=float(saved.get("tolerance", args.tolerance)),
            shape=travelling,
            cost_model=_cost_model(args, shape),
            links=of_plan,
            server_speeds=None if speeds is None else tuple(speeds),
            max_buffer_bytes=saved.get("max_buffer_bytes"),
        )
    except TypeError as error:
        raise ValueError(f"{args.load}: its configuration cannot be read ({error})") from error


def to_json(config: ScheduleConfig) -> dict[str, object]:
    """JSON values that are saved with a plan."""
    return {
        "tolerance": config.tolerance,
        "shape": asdict(config.shape),
        "links": asdict(config.links),
        "server_speeds": config.server_speeds,
        "max_buffer_bytes": config.max_buffer_bytes,
        "cost_model": None if config.cost_model is None else config.cost_model.description,
    }

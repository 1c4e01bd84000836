"""The `--distca` flags as one value, which alone reads them."""

from __future__ import annotations

import ast
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.parts import build_parser
from support.arguments import parse

CODE = Path(__file__).parents[3] / "megatron_patches"


def flags_of_ours() -> set[str]:
    parser = build_parser()
    return {action.dest for action in parser._actions if action.dest.startswith("distca")}


def test_every_flag_of_ours_is_read() -> None:
    read: set[str] = set()

    class Watched(Namespace):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    args = parse("--distca", "--distca-trace", "trace.json")
    DistcaConfig.from_args(Watched(**vars(args)))
    assert flags_of_ours() - read == set()


def reads_of(path: Path) -> set[str]:
    """The arguments of ours that a file reads."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.attr.startswith("distca_")
    }


def test_nothing_else_reads_them() -> None:
    config = CODE / "flags" / "config.py"
    assert reads_of(config) == flags_of_ours() - {"distca"}
    others = {path for path in CODE.rglob("*.py") if path != config and reads_of(path)}
    assert others == set()


def test_arguments_that_checkpoints_hold_are_no_classes_of_ours() -> None:
    values = vars(parse("--distca", "--distca-server-speeds", "1", "1", "1", "1")).values()
    assert not {type(each) for each in values if type(each).__module__.startswith("megatron_patch")}


def test_values_are_checked_where_they_apply() -> None:
    flags = ("--distca-nccl-max-ctas", "12")
    assert DistcaConfig.from_args(parse(*flags)).transport.nccl_max_ctas == 12
    with pytest.raises(ValueError, match="not a power of two"):
        DistcaConfig.from_args(parse("--distca", *flags))


def test_dedicated_processes_serve_with_distca_alone() -> None:
    flags = ("--distca-servers", "dedicated:1")
    assert DistcaConfig.from_args(parse(*flags)).dedicated == 0
    assert DistcaConfig.from_args(parse("--distca", *flags, world_size=5)).dedicated == 1

"""Flags that only newer versions of Megatron-LM have."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def newer_flag(args: Namespace, name: str) -> Any:
    """Returns the value of a flag that Megatron-LM has from 0.18 on; None before."""
    return getattr(args, name, None)

"""Loops on live ranks that differ between ranks, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from distca.library import AttentionShape, Batch, Mask, Planner, core_attention
from support.library_loops import BLOCK, documents
from support.refused_rollouts import message_of

SHAPE = AttentionShape(4, 2, 16, 4)
LENGTHS = (40, 300, 33)
OTHER: dict[str, Any] = {
    "tolerance": 0.5,
    "scheduler": "greedy",
    "masks": Mask(window_left=7),
    "softcap": 30.0,
    "block": 32,
    "max_live_batches": 2,
    "vocabulary": 500,
    "shape": AttentionShape(2, 2, 16, 4),
}
"""Other values of a planner's arguments than those of `planner`."""

WRONG: dict[str, tuple[Any, str]] = {
    "vocabulary": (-1, "vocabulary is -1: give a whole number of at least 1"),
    "masks": (None, "masks is None: give a Mask, or a list"),
    "masks, 2": ([7], r"masks is \[7\]: give a Mask, or a list"),
    "max_live_batches": ("8", "max_live_batches is '8': give a whole number"),
    "max_live_batches, 2": (2.5, "max_live_batches is 2.5: give a whole number"),
    "block": (3.5, "block is 3.5: give a whole number"),
    "softcap": ("x", "softcap is 'x': give a positive bound"),
    "softcap, 2": (math.nan, "softcap is nan: give a positive bound"),
    "softcap, 3": (math.inf, "softcap is inf: give a positive bound"),
    "tolerance": ("x", "tolerance is 'x': give a number"),
    "scheduler": ([], r"no scheduler \[\]: choose from"),
    "cost_model": (4, "cost_model is 4: give a cost model"),
    "shape": (5, "shape is 5: give an AttentionShape"),
    "group": (3, "group is 3: give a process group"),
    "device": ("foo", "device is 'foo': give cpu or cuda"),
    "device, 2": ("meta", "device is 'meta': give cpu or cuda"),
}
"""Values that a planner's arguments cannot have, and what is said of them."""


def planner(**arguments: Any) -> Planner:
    return Planner(**{"shape": SHAPE, "block": BLOCK} | arguments)


def rows(
    batch: Batch, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a batch."""
    made, count = torch.Generator().manual_seed(3), len(batch.tokens)
    q, k, v = (
        torch.randn(count, heads, SHAPE.head_dim, generator=made).to(dtype).requires_grad_()
        for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    )
    return q, k, v


def other_arguments() -> dict[str, str]:
    """What is said where rank 1 makes a planner with another argument, or cannot make one."""
    second = bool(dist.get_rank())
    found = {}
    wrong = {f"wrong {name}": value for name, (value, _) in WRONG.items()}
    for name, value in (OTHER | wrong).items():
        mine = {name.removeprefix("wrong ").partition(",")[0]: value} if second else {}
        found[name] = message_of(lambda: planner(**mine))  # noqa: B023
    one, other = planner(), planner(tolerance=0.5)
    chosen = other if second else one
    found["order"] = message_of(lambda: chosen.place(documents(0, LENGTHS)))
    for each in (one, other):
        each.close()
    return found


def other_batches(waits: bool) -> dict[str, str]:
    """What is said where rank 1 places something else after many batches.

    Args:
        waits: whether ranks compare a batch where they place it, as on CPUs.
    """
    second, made = bool(dist.get_rank()), planner()
    same = documents(0, LENGTHS)
    for _ in range(12):
        made.place(same)
    made._comparisons.waits = waits
    loose = replace(made.collate, config=replace(made.collate.config, block=128))
    given: dict[str, Any] = {
        "tokens": documents(1, LENGTHS),
        "lengths": documents(0, LENGTHS[::-1]),
        "more": [*same, same[0]],
        "plans": loose(same),
        "floats": [same[0].float()],
    }
    found = {}
    for name, each in given.items():
        found[name] = message_of(lambda: made.place(each if second else same))  # noqa: B023
        if not waits:
            found[f"{name}, later"] = message_of(lambda: made.place(same))
    found["after all"] = message_of(lambda: made.place(same))
    made.close()
    return found


def other_calls(waits: bool) -> dict[str, str]:
    """What `place` says after rank 1 has called something else than rank 0.

    Args:
        waits: see `other_batches`.
    """
    second, made = bool(dist.get_rank()), planner()
    same = documents(0, LENGTHS)
    for _ in range(8):
        one = made.place(same)
    made._comparisons.waits = waits

    def forwards(batches: Sequence[Batch]) -> list[torch.Tensor]:
        return [core_attention(*rows(each), each) for each in batches]

    def backwards(outs: Sequence[torch.Tensor]) -> None:
        for each in outs:
            each.sum().backward()  # type: ignore[no-untyped-call]

    def in_turn(values: Sequence[Any]) -> list[Any]:
        return list(values[::-1] if second else values)

    ways: dict[str, Callable[[Batch, Batch], object]] = {
        "none": lambda one, two: backwards(forwards([one, two])),
        "forward": lambda one, two: forwards(in_turn([one, two])),
        "backward": lambda one, two: backwards(in_turn(forwards([one, two]))),
        "scale": lambda one, two: core_attention(*rows(one), one, scale=0.5 if second else 0.25),
    }
    found = {}
    for name, way in ways.items():
        one, two = made.place(same), made.place(same)
        way(one, two)
        found[name] = message_of(lambda: made.place(same))
        if not waits:
            found[f"{name}, later"] = message_of(lambda: made.place(same))
    made.close()
    return found


def other_tensors() -> dict[str, str]:
    """What a planner's first call says where rank 1 has another dtype, or wrong rows."""
    second = bool(dist.get_rank())
    found = {}
    for name, dtype in (("dtype", torch.float16), ("wrong", torch.float64)):
        made = planner(shape=replace(SHAPE, dtype_bytes=2))
        batch = made.place(documents(0, LENGTHS))
        mine = rows(batch, dtype if second else torch.bfloat16)
        found[name] = message_of(lambda: core_attention(*mine, batch))  # noqa: B023
        good = rows(batch, torch.bfloat16)
        found[f"{name}, then"] = message_of(lambda: core_attention(*good, batch))  # noqa: B023
        made.close()
    return found


DTYPES = (
    torch.int16,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
    torch.bfloat16,
    torch.float64,
)


def gathered() -> tuple[dict[str, str], list[tuple[torch.dtype, bool]]]:
    """What is said of values on one rank that cannot be gathered, and which dtypes can be."""
    second, made = bool(dist.get_rank()), planner()
    same = documents(0, LENGTHS)
    batch = made.place(same)
    good, sums = torch.ones(len(batch.tokens), 2), torch.ones(len(batch.predictions.rows))
    found = {
        name: message_of(lambda: batch.gather(other if second else good))  # noqa: B023
        for name, other in (("sparse", good.to_sparse()), ("meta", good.to("meta")))
    }
    found["sparse sums"] = message_of(
        lambda: batch.sum_rollouts(sums.to_sparse() if second else sums)
    )
    found["sums of a byte"] = message_of(lambda: batch.sum_rollouts(sums.to(torch.float8_e4m3fn)))
    equal = []
    for dtype in DTYPES:
        values = (batch.tokens % 2)[:, None].expand(-1, 3).to(dtype)
        of_documents = batch.gather(values)
        equal += [
            (each.dtype, torch.equal(each.long(), (own % 2)[:, None].expand(-1, 3)))
            for each, own in zip(of_documents, same, strict=True)
        ]
    made.close()
    return found, equal

"""Checks of a planner's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import TypeGuard

import torch
import torch.distributed as dist

from distca.attention import select_kernel, select_kernel_of_heads
from distca.attention.kernel import Kernel
from distca.attention.softcap import SoftCapped
from distca.cost.volume import AttentionShape
from distca.library.documents import check_integer
from distca.plan import Mask
from distca.schedule.schedulers import SCHEDULERS


def check_member(given: object) -> None:
    """Raises a `ValueError` if this rank is not in the group, whose ranks do not wait for it."""
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: make the planner on its ranks alone")


def check_group(given: object) -> None:
    """Raises a `ValueError` if the ranks of a planner are no process group."""
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise ValueError(f"group is {given!r}: give a process group, or None for all ranks")


def masks_of_layers(given: object) -> tuple[Mask, ...]:
    """Returns the masks of a planner.

    Raises:
        ValueError: one is none, or is there twice, or there are none.
    """
    if isinstance(given, Mask):
        return (given,)
    found = tuple(given) if isinstance(given, Iterable) else None
    if found is None or not all(isinstance(each, Mask) for each in found):
        raise ValueError(f"masks is {given!r}: give a Mask, or a list of them")
    if not found or len(set(found)) < len(found):
        raise ValueError("masks has none, or one twice: give each mask of the layers once")
    return found


def device_of(given: object) -> torch.device:
    """Returns the device of a planner, a GPU with its number.

    Args:
        given: a device or its name; None: the current GPU, or the CPU where there is none.

    Raises:
        ValueError: it is neither the CPU nor a GPU that there is.
    """
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(given)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {given!r}: give cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {given!r}: give cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {given!r}, but torch finds no GPU: give cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_arguments(
    shape: object,
    scheduler: object,
    tolerance: object,
    block: object,
    cost_model: object,
    max_live_batches: object,
    memory_bytes: object,
    vocabulary: object,
) -> None:
    """Checks arguments of a planner; see `Planner`.

    Raises:
        ValueError: one of them is of another kind, or out of range.
    """
    if not isinstance(shape, AttentionShape):
        raise ValueError(f"shape is {shape!r}: give an AttentionShape")
    if scheduler not in tuple(SCHEDULERS):
        raise ValueError(f"no scheduler {scheduler!r}: choose from {', '.join(SCHEDULERS)}")
    if not _is_number(tolerance):
        raise ValueError(f"tolerance is {tolerance!r}: give a number, such as 0.1")
    check_integer("block", block, 1)
    if cost_model is not None and not hasattr(cost_model, "seconds"):
        raise ValueError(f"cost_model is {cost_model!r}: give a cost model, or None")
    check_integer("max_live_batches", max_live_batches, 1)
    if memory_bytes is not None and not (_is_number(memory_bytes) and float(memory_bytes) >= 1):  # type: ignore[arg-type]
        raise ValueError(f"memory_bytes is {memory_bytes!r}: give a number of bytes, or None")
    if vocabulary is not None:
        check_integer("vocabulary", vocabulary, 1)


def check_dtype(shape: AttentionShape, device: torch.device) -> None:
    """Raises a `ValueError` if no kernel of a device computes in a shape's dtype."""
    if shape.dtype_bytes not in (2, 4):
        raise ValueError(
            f"the shape has {shape.dtype_bytes} bytes an element: give 2 for bfloat16 and "
            "float16, or 4 for float32"
        )
    if device.type == "cuda" and shape.dtype_bytes != 2:
        raise ValueError(
            f"the shape has {shape.dtype_bytes} bytes an element, but kernels of GPUs compute "
            "in bfloat16 and float16 only: give 2, and queries, keys and values of that dtype"
        )


def kernel_of(shape: AttentionShape, softcap: object, device: torch.device) -> Kernel:
    """Returns the kernel of a planner.

    Args:
        shape: attention heads of a rank.
        softcap: bound of the scores, or None.
        device: device of the model.

    Raises:
        ValueError: the soft cap is no positive number, or no kernel computes such heads.
    """
    if softcap is None:
        return select_kernel_of_heads(device.type, shape.head_dim, shape.value_dim)
    if not (_is_number(softcap) and math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap is {softcap!r}: give a positive bound, or None")
    if shape.head_dim != shape.value_dim:
        raise ValueError("a soft cap needs keys and values with heads of one size")
    return SoftCapped(select_kernel(device.type, shape.head_dim, softcaps=True), softcap)


def _is_number(given: object) -> TypeGuard[float]:
    return isinstance(given, Real) and not isinstance(given, bool)

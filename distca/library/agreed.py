"""Values that ranks exchange: all ranks give one dtype and the same sizes, or all refuse them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from distca.transport import naming_lost_ranks

_KIND_BYTES = 256
"""Bytes in which a rank describes its values to others."""


def agreed_values(
    operation: str,
    check: Callable[[], torch.Tensor],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Returns this rank's values, whose kind all ranks have compared. Collective.

    gloo ends a process that receives more bytes than it expects, and NCCL mixes them up.

    Args:
        operation: name of what exchanges the values, for messages.
        check: checks this rank's values, and returns them, `[rows, …]`.
        device: device on which the group exchanges.
        group: the ranks; None: all.

    Raises:
        ValueError: `check` raised it on some rank, or ranks have values on another device, of other
            dtypes or of other sizes than rank 0, the number of rows aside; on all ranks.
        LostRankError: another rank has ended or does not answer.
    """
    values, wrong, kind = None, None, ""
    try:
        values = check()
        if values.device.type != device.type:
            raise ValueError(
                f"values for {operation} are on the device {values.device}, but the batch on "
                f"{device}: move them there"
            )
        sizes = ", ".join(["rows", *map(str, values.shape[1:])])
        kind = f"{values.dtype} [{sizes}]"
    except ValueError as error:
        wrong = error
    kinds = _of_all_ranks(operation, kind, device, group)
    if wrong is not None:
        raise wrong
    assert values is not None
    if "" in kinds:
        raise ValueError(
            f"rank {kinds.index('')} gives {operation} values that cannot be used, and says why"
        )
    for rank, other in enumerate(kinds):
        if other != kinds[0]:
            raise ValueError(
                f"rank {rank} gives {operation} values of {other}, but rank 0 of {kinds[0]}: give "
                "one dtype, and the same sizes except for the rows, on all ranks"
            )
    return values


def _of_all_ranks(
    operation: str, kind: str, device: torch.device, group: dist.ProcessGroup | None
) -> list[str]:
    """Returns the kind of values that each rank has. Collective."""
    written = bytearray(kind.encode()[:_KIND_BYTES].ljust(_KIND_BYTES))
    mine = torch.frombuffer(written, dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with naming_lost_ranks(operation):
        dist.all_gather(everyone, mine, group)
        found = torch.stack(everyone).cpu()
    return [each.numpy().tobytes().decode().rstrip() for each in found]

"""What a checkpoint keeps beside tensors, read as data, whatever megatron-core wrote it.

Up to 0.18 it is the file `common.pt`, from 0.19 on an object among the tensors. Its flags are of
classes that other versions may not have: attributes of unknown classes are kept as they are, and no
code of theirs runs.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_patches.checkpoint_data import load_object, read_index


def read_common_state(checkpoint: str | Path) -> dict[str, Any]:
    """Reads what is no tensor of a checkpoint.

    Args:
        checkpoint: folder of one iteration, such as `SAVE/iter_0000010`.

    Raises:
        ValueError: there is something in it that only running code could make, or it is corrupt.
    """
    checkpoint = Path(checkpoint)
    file = checkpoint / "common.pt"
    if file.exists():
        with file.open("rb") as content:
            common: dict[str, Any] = load_object(content, str(file))
        return common
    (common,) = load_object(_object_among_tensors(checkpoint), f"{checkpoint}: its common state")
    return common


def _object_among_tensors(checkpoint: Path) -> io.BytesIO:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    index = read_index(checkpoint)
    name = ShardedObject("common_state", None, (1,), (0,)).unique_key
    place = index.storage_data.get(MetadataIndex(name))
    if place is None:
        raise ValueError(
            f"{checkpoint} has neither common.pt nor {name}: it is no checkpoint of Megatron's, or "
            "is not whole"
        )
    with (checkpoint / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return io.BytesIO(file.read(place.length))

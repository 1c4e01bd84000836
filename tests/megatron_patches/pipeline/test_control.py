"""What the first rank tells dedicated servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.loop.data import share_place_in_data
from megatron_patches.pipeline.processes import Control
from support.models import parse


def told(resumed: dict[str, Any]) -> dict[str, Any]:
    """Where in the data a rank goes on, of which the first alone has loaded a checkpoint."""
    args = parse(["--seq-length", "128"])
    if dist.get_rank() == 0:
        vars(args).update(resumed)
    config = DistcaConfig.from_args(args)
    control = Control(dist.group.WORLD, torch.device("cpu"))
    config = share_place_in_data(control, config, args)
    assert config.documents.max_length == args.distca_max_document_length
    return {name: getattr(args, name) for name in resumed}


@pytest.mark.parametrize("longest", [None, 1024])
def test_dedicated_servers_go_on_in_the_data_as_all_ranks_do(ranks, longest: int | None) -> None:
    resumed = {
        "consumed_train_samples": 6,
        "consumed_valid_samples": 2,
        "train_stream_start": -512,
        "valid_stream_start": 384,
        "distca_max_document_length": longest,
        "iteration": 3,
    }
    # The default is a window.
    expected = resumed | {"distca_max_document_length": longest or 256}
    assert ranks.run(told, resumed, world_size=2) == [expected] * 2

"""Which training loop runs a job."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from megatron_patches.job import Job


def choose_loop() -> Callable[[Job], None]:
    """Megatron-LM's own loop where `megatron.training` is installed, else the lean one."""
    if importlib.util.find_spec("megatron.training") is not None:
        from megatron_patches import upstream

        return upstream.pretrain
    from megatron_patches.lean import training

    return training.pretrain

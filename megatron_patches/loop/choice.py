"""The choice of the training loop that runs a job."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial

from megatron_patches.loop.job import Job


def choose_loop(environment: Mapping[str, str]) -> Callable[[Job], None]:
    """Returns Megatron-LM's own loop where `megatron.training` is installed, else the lean one.

    Args:
        environment: environment variables of the launcher, for the lean loop.
    """
    if importlib.util.find_spec("megatron.training") is not None:
        from megatron_patches import upstream

        return upstream.pretrain
    from megatron_patches.loop.lean import training

    return partial(training.pretrain, process=training.LaunchedProcess.by_torchrun(environment))

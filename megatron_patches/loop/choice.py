"""The choice of the training loop that runs a job."""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron_patches.flags.loop import add_loop_argument
from megatron_patches.loop.job import Job


def choose_loop(
    environment: Mapping[str, str], argv: Sequence[str] | None = None
) -> Callable[[Job], None]:
    """Returns the loop that `--training-loop` names.

    Args:
        environment: environment variables of the launcher.
        argv: command line; None: this process's.

    Raises:
        SystemExit: the loop is not installed, or the flag has another value.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_loop_argument(parser)
    chosen, _ = parser.parse_known_args(argv)
    if chosen.training_loop == "lean":
        from megatron_patches.loop.lean import training

        return partial(training.pretrain, process=training.LaunchedProcess.by_torchrun(environment))
    if importlib.util.find_spec("megatron.training") is None:
        sys.exit(
            "error: --training-loop megatron needs megatron.training, which megatron-core's wheels "
            "hold from 0.17 on (Python 3.12): pip install 'megatron-core>=0.17,<0.20', or put a "
            "checkout of Megatron-LM on PYTHONPATH"
        )
    from megatron_patches import upstream

    return partial(upstream.pretrain, environment=environment)

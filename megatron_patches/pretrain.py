"""Pretrains a GPT, as `pretrain_gpt.py` of a checkout does, also from an installed wheel.

torchrun --nproc-per-node 4 -m megatron_patches.pretrain --distca --num-layers 4 ...
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from distca.progress import progress
from megatron_patches.loop.launcher import end_with_launcher
from megatron_patches.loop.messages import exit_with_message, show_our_messages

_MISSING = (
    "error: Megatron-LM's loop is not installed: pip install 'megatron-core>=0.17,<0.20' "
    "(Python 3.12 or later), or put a checkout of Megatron-LM on PYTHONPATH"
)


def main() -> None:
    """Trains as the flags in `sys.argv` say."""
    end_with_launcher(os.environ)
    if importlib.util.find_spec("megatron") is None or (
        importlib.util.find_spec("megatron.training") is None
    ):
        sys.exit(_MISSING)
    _refuse_early(sys.argv[1:], os.environ)

    # These imports take seconds, and where many processes share few cores a minute.
    shown: AbstractContextManager[object] = nullcontext()
    if os.environ.get("RANK", "0") == "0":
        shown = progress("pretrain_gpt.py", doing="ranks import Megatron-LM")
    with shown:
        from megatron_patches.megatron_lm import pretrain

    pretrain(os.environ)


def _refuse_early(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ends all ranks where the command line alone shows that they would end later.

    All ranks check flags, which they share. The first one checks names of data alone: another
    machine may lack them, which all ranks tell each other when they have met.
    """
    from megatron_patches.flags.early import check_names_of_data, check_our_flags

    rank = int(environment.get("RANK", 0))
    try:
        check_our_flags(argv)
        if rank == 0:
            check_names_of_data(argv)
    except (ValueError, OSError) as error:
        show_our_messages(rank, environment)
        exit_with_message(str(error), rank)


if __name__ == "__main__":
    main()

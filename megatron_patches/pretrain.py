"""Pretrains a GPT, as `pretrain_gpt.py` of a checkout does, also from an installed wheel.

torchrun --nproc-per-node 4 -m megatron_patches.pretrain --distca --num-layers 4 ...
"""

import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext

from distca.progress import progress
from megatron_patches.loop.launcher import end_with_launcher

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

    # These imports take seconds, and where many processes share few cores a minute.
    shown: AbstractContextManager[object] = nullcontext()
    if os.environ.get("RANK", "0") == "0":
        shown = progress("pretrain_gpt.py", doing="ranks import Megatron-LM")
    with shown:
        from megatron_patches.megatron_lm import pretrain

    pretrain(os.environ)


if __name__ == "__main__":
    main()

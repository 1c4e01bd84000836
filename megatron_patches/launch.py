"""Starts the ranks of a run, as torchrun does, after its flags are checked; the cause comes last.

    python -m megatron_patches.launch --nproc-per-node 4 pretrain_gpt.py --distca --num-layers 4 ...

Options before the script are torchrun's. `megatron_patches.launcher` does the work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distca.progress import progress


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, and returns the exit status when they have ended.

    Args:
        argv: torchrun's options, the script and its flags; None: those of this process.
    """
    # The import takes seconds, and longer where other processes run.
    with progress("python -m megatron_patches.launch", doing="importing torch"):
        from megatron_patches import launcher
    return launcher.main(argv)


if __name__ == "__main__":
    sys.exit(main())

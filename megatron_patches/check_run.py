"""Checks the flags of a run, and the files that they name, without starting any rank.

    python -m megatron_patches.check_run --ranks 8 -- --distca --num-layers 4 ...

It ends with 0, or with 2 and one line that says what is wrong; lines before say what is checked.
`megatron_patches.launch` runs it before it starts ranks.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from distca.lifetime import end_with_parent

STEP = "checking: "
"""What lines about steps begin with."""
STEPS = (
    "flags of DistCA and names of data",
    "importing Megatron-LM",
    "flags",
    "tokenizer",
    "data, checkpoint and folders",
)
PASSED = "all checks passed"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True, help="how many would be started")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="after --: flags of the run")
    args = parser.parse_args(argv)

    def told(step: str) -> None:
        left = len(STEPS) - STEPS.index(step)
        sys.stderr.write(f"{STEP}{step} (checks so far passed; {left} left)\n")

    try:
        check(args.flags, args.ranks, told)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stderr.write(f"{STEP}{PASSED}\n")
    return 0


def check(flags: Sequence[str], ranks: int, told: Callable[[str], object]) -> None:
    """Checks what needs no other process.

    Args:
        flags: command line of `pretrain_gpt.py`.
        ranks: number of processes of the run.
        told: function that is called with each of `STEPS` as it begins.

    Raises:
        ValueError: some flag is wrong, or something that it names cannot be used.
        OSError: a file of the tokenizer cannot be read.
    """
    steps = iter(STEPS)
    told(next(steps))
    from megatron_patches.flags.early import check_names_of_data, check_our_flags

    check_our_flags(flags)
    check_names_of_data(flags)
    told(next(steps))
    from megatron_patches.flags.config import DistcaConfig
    from megatron_patches.loop.preflight import check_alone
    from megatron_patches.parts import parse_args

    told(next(steps))
    args = parse_args(flags, world_size=ranks)
    from megatron.training.global_vars import rebuild_tokenizer

    told(next(steps))
    vocab_size = rebuild_tokenizer(args).vocab_size
    told(next(steps))
    check_alone(DistcaConfig.from_args(args), Namespace(**vars(args) | {"vocab_size": vocab_size}))


if __name__ == "__main__":
    end_with_parent()
    # Ctrl-C ends it without a word, and the run itself says what it warns of.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.disable(logging.WARNING)
    sys.exit(main())

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

from distca.documents.index import check_files_exist
from distca.lifetime import end_with_parent

STEP = "checking: "
"""What lines about steps begin with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True, help="how many would be started")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="after --: flags of the run")
    args = parser.parse_args(argv)
    try:
        check(args.flags, args.ranks, lambda step: sys.stderr.write(f"{STEP}{step}\n"))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def check(flags: Sequence[str], ranks: int, told: Callable[[str], object]) -> None:
    """Checks what needs no other process.

    Args:
        flags: command line of `pretrain_gpt.py`.
        ranks: number of processes of the run.
        told: function that is called with each step that begins.

    Raises:
        ValueError: some flag is wrong, or something that it names cannot be used.
        OSError: a file of the tokenizer cannot be read.
    """
    told("names of data")
    _check_names_of_data(flags)
    told("importing Megatron-LM")
    from megatron_patches.flags.config import DistcaConfig
    from megatron_patches.loop.preflight import check_alone
    from megatron_patches.parts import parse_args

    told("flags")
    args = parse_args(flags, world_size=ranks)
    from megatron.training.global_vars import rebuild_tokenizer

    told("tokenizer")
    vocab_size = rebuild_tokenizer(args).vocab_size
    told("data, checkpoint and folders")
    check_alone(DistcaConfig.from_args(args), Namespace(**vars(args) | {"vocab_size": vocab_size}))
    told("nothing wrong was found")


def _check_names_of_data(flags: Sequence[str]) -> None:
    """Checks that the files of `--data-path` exist, before the import, which takes seconds.

    All else about data is left to the checks that know all flags.

    Raises:
        ValueError: one does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for split in ("", "train-", "valid-", "test-"):
        parser.add_argument(f"--{split}data-path", nargs="*", default=[])
    # These name files of other kinds.
    for other in ("--sft", "--distca-documents"):
        parser.add_argument(other, dest="other", nargs="?", const=other)
    args, _ = parser.parse_known_args(flags)
    if args.other:
        return
    for words in (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path):
        # Weights alternate with prefixes, or there are none. Object stores are read by others.
        for prefix in words if len(words) % 2 else words[1::2]:
            if "://" not in prefix:
                check_files_exist(prefix)


if __name__ == "__main__":
    end_with_parent()
    # Ctrl-C ends it without a word, and the run itself says what it warns of.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.disable(logging.WARNING)
    sys.exit(main())

"""What a command line alone shows to be wrong, before Megatron-LM is imported.

The import takes seconds, and where many processes share few cores a minute. So our own flags, and
the names of data, are checked here first. `validation` then checks them with Megatron-LM's flags.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn

from distca.documents.index import check_files_exist
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import add_distca_arguments
from megatron_patches.flags.unknown import nearest

_OURS = "--distca-"


class _OurParser(ArgumentParser):
    """A parser that raises what it refuses."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def check_our_flags(argv: Sequence[str]) -> None:
    """Checks the `--distca` flags of a command line: names, values and the file of a profile.

    A command line that asks for help is not checked.

    Args:
        argv: command line of `pretrain_gpt.py`.

    Raises:
        ValueError: there is no flag of such a name, a value is out of range, or two of our flags do
            not go together.
    """
    if "--help" in argv or "-h" in argv:
        return
    parser = _OurParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_distca_arguments(parser)
    # It says whether documents are conversations.
    parser.add_argument("--sft", action="store_true")
    try:
        args, others = parser.parse_known_args(argv)
    except ArgumentError as error:
        raise ValueError(str(error)) from None
    known = list(parser._option_string_actions)
    names = [word.partition("=")[0] for word in others]
    if unknown := [name for name in names if name.startswith(_OURS)]:
        raise ValueError("; ".join(nearest(name, known) for name in unknown))
    DistcaConfig.from_args(args)


def check_names_of_data(argv: Sequence[str]) -> None:
    """Checks that the files of `--data-path` exist.

    All else about data is left to the checks that know all flags.

    Args:
        argv: command line of `pretrain_gpt.py`.

    Raises:
        ValueError: one does not exist.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for split in ("", "train-", "valid-", "test-"):
        parser.add_argument(f"--{split}data-path", nargs="*", default=[])
    # These name files of other kinds.
    for other in ("--sft", "--distca-documents"):
        parser.add_argument(other, dest="other", nargs="?", const=other)
    args: Namespace = parser.parse_known_args(argv)[0]
    if args.other:
        return
    for words in (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path):
        # Weights alternate with prefixes, or there are none. Object stores are read by others.
        for prefix in words if len(words) % 2 else words[1::2]:
            if "://" not in prefix:
                check_files_exist(prefix)

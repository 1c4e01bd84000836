"""Common parts of all commands: the format of help, and checks of files to write."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help as it is written, and adds a flag's default unless its help states one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        says_it = "Default:" in (action.help or "") or action.required
        if action.nargs == 0 or default in (None, argparse.SUPPRESS) or says_it:
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{action.help} Default: {shown}.".replace("%", "%%")


def check_output(flag: str, path: Path | None) -> None:
    """Refuses a file that could not be written, before any work is done for it.

    Args:
        flag: flag that names the file.
        path: file to write; None: the flag is not given.

    Raises:
        ValueError: the path is a folder, or is in a folder that cannot be written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(f"{flag} {path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} {path}: {folder} cannot be written to")

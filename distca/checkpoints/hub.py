"""Models by their names on the Hugging Face hub, which is asked once, before its files are."""

from __future__ import annotations

import re
from pathlib import Path

_SECONDS = 10.0
"""Seconds in which the hub answers, or cannot be reached."""


def check_path(path: str) -> None:
    """Checks that a model is a folder, or is in the hub's cache, or on the hub.

    Its own libraries try several times for each file before they say so.

    Args:
        path: folder of the model, or its name on the Hugging Face hub.

    Raises:
        ValueError: it is not.
    """
    if Path(path).exists():
        return
    if not _may_be_on_hub(path):
        raise ValueError(f"{path}: no such folder")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return
    try:
        HfApi().model_info(path, timeout=_SECONDS)
    except RepositoryNotFoundError:
        raise ValueError(
            f"{path} is not a folder, and the Hugging Face hub has no model of this name: correct "
            "the name, or log in by `hf auth login` if the model is private"
        ) from None
    # Which errors of the network there are is up to the client that the hub's library uses.
    except Exception as error:
        told = "answers" if isinstance(error, HfHubHTTPError) else "cannot be reached"
        raise ValueError(
            f"{path} is not a folder and not in the Hugging Face hub's cache, and the hub {told} "
            f"({_line(error)}): give the folder of the model"
        ) from None


def _may_be_on_hub(path: str) -> bool:
    """Whether a path that does not exist can be a name on the Hugging Face hub: OWNER/NAME.

    Where there is a folder called as the owner, a folder in it is meant.
    """
    is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None
    return is_name and not Path(path).parent.exists()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

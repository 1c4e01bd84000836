"""What vLLM calls in its processes where DistCA is installed: a plugin of `vllm.general_plugins`.

vLLM makes its connectors in the engine's processes. What is raised there reaches a user as several
tracebacks, and some of it after minutes. So the process that the user has started checks its
configuration, and asks the prefill ranks whether they would work for it, before it starts others.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

NAME, PATH = "DistCAConnector", "distca.vllm"
"""Of the connector, in `--kv-transfer-config`."""

logger = logging.getLogger("vllm.distca")

TESTED = ("0.31.0", "0.32.0")
"""Versions of vLLM that were tested. `docs/vllm.md` names them."""


class Refused(ValueError):
    """Raised if vLLM's configuration cannot work with the connector; the message says why."""


def register() -> None:
    """Lets vLLM check its configuration by `check_start`.

    vLLM has no hook for a whole configuration outside of the engine's processes. So this wraps the
    function that makes it, in processes that have that function.
    """
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is None:
        return
    make = arguments.EngineArgs.create_engine_config

    @functools.wraps(make)
    def make_and_check(self: Any, *args: Any, **named: Any) -> VllmConfig:
        try:
            check_names(self.kv_transfer_config)
            config: VllmConfig = make(self, *args, **named)
            check_start(config)
        except Refused as error:
            usage = named.get("usage_context", args[0] if args else None)
            if getattr(usage, "name", "") == "OPENAI_API_SERVER":
                # A command's message is the last line, without a traceback.
                raise SystemExit(f"vllm serve: {error}") from None
            raise
        return config

    arguments.EngineArgs.create_engine_config = make_and_check


def check_names(transfer: KVTransferConfig | None) -> None:
    """Refuses a connector's names if one of them is ours and vLLM finds no connector by them.

    Raises:
        Refused: they are such; the message says what to change.
    """
    if transfer is None:
        return
    name, path = transfer.kv_connector, transfer.kv_connector_module_path
    fits = name == NAME if path == PATH else name != NAME or _is_there(path)
    if not fits:
        raise Refused(
            f'"kv_connector": {json.dumps(name)} and "kv_connector_module_path": '
            f'{json.dumps(path)}: give "{NAME}" and "{PATH}"'
        )


def _is_there(path: str | None) -> bool:
    """Whether there is a module."""
    try:
        return bool(path) and find_spec(str(path)) is not None
    except (ImportError, ValueError):
        return False


def check_start(config: VllmConfig) -> None:
    """Refuses a configuration of the connector that cannot work; others have none to check.

    Raises:
        Refused: it cannot work; the message is one line that says what to change.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != NAME:
        return
    check_version()
    from distca.vllm.settings import checked_settings, refusal_of_ranks

    try:
        why = refusal_of_ranks(config, checked_settings(config))
    except ValueError as error:
        raise Refused(str(error)) from None
    if why is not None:
        raise Refused(f"the prefill ranks refuse this engine: {why}")


def check_version() -> None:
    """Refuses versions of vLLM that are too old, and warns of those that were not tested.

    Raises:
        Refused: the version is too old.
    """
    import vllm

    try:
        version = Version(vllm.__version__)
    except InvalidVersion:
        # A build from source without tags.
        return
    if version < Version(TESTED[0]):
        raise Refused(
            f"DistCAConnector needs vLLM {TESTED[0]} or later, and {version} is installed"
        )
    if version.base_version not in TESTED:
        logger.warning(
            "DistCA: it was tested with vLLM %s, and this is %s", " and ".join(TESTED), version
        )

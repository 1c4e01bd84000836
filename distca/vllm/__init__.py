"""DistCA in vLLM: `--kv-transfer-config '{"kv_connector_module_path": "distca.vllm", …}'`.

* in the process that a user starts: `plugin.py` finds mistakes before vLLM starts its engine;
* in vLLM's processes: `connector.py` asks prefill ranks for long prompts and writes what they send,
  `settings.py` checks its settings, `stats.py` counts for vLLM's log and metrics;
* on the prefill ranks: `model.py` runs vLLM's model classes with our attention, `families.py` says
  which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distca.vllm.connector import DistCAConnector

__all__ = ["DistCAConnector"]


def __getattr__(name: str) -> type[DistCAConnector]:
    # vLLM imports this package for the plugin in each of its processes. Those that have no
    # connector should not import it.
    if name != "DistCAConnector":
        raise AttributeError(f"module {__name__} has no {name}")
    from distca.vllm.connector import DistCAConnector

    return DistCAConnector

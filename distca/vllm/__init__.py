"""DistCA in vLLM: `--kv-transfer-config '{"kv_connector_module_path": "distca.vllm", …}'`.

* in vLLM's processes: `connector.py` asks prefill ranks for long prompts and writes what they send,
  `settings.py` checks its settings, `stats.py` counts for vLLM's log and metrics;
* on the prefill ranks: `model.py` runs vLLM's model classes with our attention, `families.py` says
  which.
"""

from distca.vllm.connector import DistCAConnector

__all__ = ["DistCAConnector"]

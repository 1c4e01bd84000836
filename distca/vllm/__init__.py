"""DistCA in vLLM: `--kv-transfer-config '{"kv_connector_module_path": "distca.vllm", …}'`."""

from distca.vllm.connector import DistCAConnector

__all__ = ["DistCAConnector"]

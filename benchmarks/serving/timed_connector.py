"""vLLM's connector with a count of the CPU seconds that its methods and its thread take.

`vllm_prefill.py` gives it to vLLM. What a connector costs short requests is less than what the CPU
seconds of whole processes differ by from run to run, so it is counted where it arises.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from benchmarks.serving.vllm_prefill import FOLDER
from distca.vllm import DistCAConnector


class TimedConnector(DistCAConnector):
    """The connector, each of whose methods adds its CPU seconds to a file of the process."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config.pop(FOLDER))
        # Seconds of methods, and of the thread that keeps the connection.
        path = folder / f"{os.getpid()}-{role.name}"
        self._counted = np.memmap(path, np.float64, "w+", shape=2)
        self._inside = False
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See `DistCAConnector`, which knows all settings but one."""
        known = {name: value for name, value in extra_config.items() if name != FOLDER}
        return super().requires_piecewise_for_cudagraph(known)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found
        return functools.partial(self._timed, found)

    def _timed(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method; one that another method calls is a part of that."""
        if self._inside:
            return method(*args, **kwargs)
        self._inside = True
        begun = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            self._inside = False
            self._counted[0] += time.thread_time() - begun
            self._counted[1] = sum(
                time.clock_gettime(time.pthread_getcpuclockid(each.ident))
                for each in threading.enumerate()
                if each.name == "distca prefill" and each.ident is not None
            )

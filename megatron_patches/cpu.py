"""Megatron on CPUs and gloo: stand-ins for what it assumes about CUDA.

`hooks` puts them in place where there is no CUDA. Megatron's modules then see a `torch` whose
`cuda` is the CPU; for everybody else torch stays what it is. Functions that take what they replace
return the replacement.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib
import logging
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

# Parameters of glibc's `mallopt`, from its malloc.h: how much free memory at the heap's end is kept
# (-1 is the greatest size), and how many blocks have mappings of their own, which are not kept.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_ALL = -1

# Modules of megatron-core that are loaded lazily, or that nothing else imports before training.
_MODULES = (
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.tensor_parallel.random",
)


def prepare_process() -> None:
    """Loads the modules that `hooks` changes, and lets this process keep the memory it frees."""
    for name in _MODULES:
        importlib.import_module(name)
    _keep_freed_memory()
    # Megatron warns of each change of the CPU generator, which is the one that is meant here.
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    if not log.filters:
        log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def without_cuda() -> bool:
    """Returns whether Megatron must run on CPUs."""
    return not torch.cuda.is_available()


def log_what_replaces_gpus() -> None:
    """Logs what `set_megatron_arguments` sets, whatever the command line says."""
    if without_cuda():
        logger.info(
            "there is no GPU: the layers are Megatron's local ones (--transformer-impl local), "
            "without fused kernels, and gloo connects the ranks"
        )


def set_megatron_arguments(args: Any) -> None:
    """Sets arguments of Megatron-LM's loop for a CPU, before it checks them."""
    if not without_cuda():
        return
    args.transformer_impl = "local"
    args.distributed_backend = "gloo"
    args.use_cpu_initialization = True
    args.no_persist_layer_norm = True
    for fusion in (
        "apply_rope_fusion",
        "bias_dropout_fusion",
        "bias_gelu_fusion",
        "bias_swiglu_fusion",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
    ):
        # Compiled for the CPU in the first step, which takes longer than they ever save.
        setattr(args, fusion, False)
    # Set for Megatron-LM, not read by us: it refuses tensor parallelism without, for a GPU's sake.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"


class _Stream:
    """The CPU as a stream, whose work is done as soon as it is submitted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CPU

    def wait_stream(self, stream: Any) -> None:
        """Returns at once: there is nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Returns at once: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Returns at once: there is nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event on the CPU: a moment of its clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Returns at once: the event has happened."""

    def synchronize(self) -> None:
        """Returns at once: the event has happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end._time - self._time) * 1e3


_STREAM = _Stream()


def nothing(*_: Any, **__: Any) -> None:
    """Ignores a request to the GPU, which is void on a CPU."""


# Replaced members of `torch.cuda` inside Megatron; all others are the real ones.
_CUDA_ON_CPU: dict[str, Any] = {
    # Tensors are made on the "current device" in some forty places.
    "current_device": lambda: CPU,
    "device_count": lambda: 1,
    "set_device": nothing,
    "synchronize": nothing,
    "empty_cache": nothing,
    # Schedules and gradient buffers order their work by streams.
    "Stream": _Stream,
    "Event": _Event,
    "current_stream": lambda *_: _STREAM,
    "default_stream": lambda *_: _STREAM,
    "stream": lambda *_: contextlib.nullcontext(),
    # Dropout and recomputation save and restore the random state.
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    # Megatron-LM's loop logs memory.
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    "max_memory_reserved": lambda *_: 0,
    "device_memory_used": lambda *_: 0,
    "memory_stats": lambda *_: collections.Counter(),
    # Kernels and defaults are chosen by the compute capability of the device.
    "get_device_capability": lambda *_: (9, 0),
    "get_device_properties": lambda *_: types.SimpleNamespace(
        major=9, minor=0, name="cpu", total_memory=0, multi_processor_count=1
    ),
}

# Factory functions that Megatron calls with `device="cuda"`.
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange", "empty_like", "zeros_like")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


class _Module(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, original: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(original.__name__)
        self.__dict__["_original"] = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


TORCH_ON_CPU = _Module(
    torch,
    {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    | {"cuda": _Module(torch.cuda, _CUDA_ON_CPU)},
)
"""What Megatron's modules see as `torch`."""


def _called_by_megatron() -> bool:
    """Returns whether the method that calls this function was called by Megatron (two frames
    up)."""
    return _is_megatrons(sys._getframe(2).f_globals.get("__name__", ""))


def _is_megatrons(module: str) -> bool:
    """Returns whether a module is Megatron's, as is the script, which may be Megatron-LM's own."""
    return module == "__main__" or module.startswith("megatron.")


def type_of_a_gpu(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Names a tensor's type as that of a GPU's: optimizers sort parameters by such names."""

    @functools.wraps(theirs)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = theirs(self, *args, **kwargs)
        if isinstance(answer, str) and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return tensor_type


def stay_on_cpu(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves a tensor or a module where it is when Megatron moves it to the GPU."""

    @functools.wraps(theirs)
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Methods cannot be replaced for some modules only, so they look at who calls them.
        return self if _called_by_megatron() else theirs(self, *args, **kwargs)

    return cuda


def exchange_by_numbers(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Gives torch the sizes of experts' exchanges as numbers, which they become on GPUs."""

    @functools.wraps(theirs)
    def all_to_all(*inputs: Any, **others: Any) -> Any:
        group, tokens, *sizes = inputs
        numbers = [each.tolist() if isinstance(each, torch.Tensor) else each for each in sizes]
        return theirs(group, tokens, *numbers, **others)

    return all_to_all


def get_random_state(theirs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns the CPU generator's state as the GPU's."""
    return functools.wraps(theirs)(lambda *_, **__: torch.get_rng_state())


def set_random_state(theirs: Callable[..., None]) -> Callable[..., None]:
    """Sets the CPU generator's state as the GPU's."""
    return functools.wraps(theirs)(lambda state, *_, **__: torch.set_rng_state(state))


def initialize_without_cuda(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Lets Megatron-LM start where there is no CUDA."""
    return functools.wraps(theirs)(functools.partial(theirs, allow_no_cuda=True))


def _keep_freed_memory() -> None:
    """Lets this process keep the memory that tensors free, as CUDA's caching allocator does.

    glibc returns much of it to the system, and each step then takes it again, page by page: some
    percent of the step, in some processes and not in others. Other C libraries stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _ALL)
        mallopt(_MMAP_MAX, 0)

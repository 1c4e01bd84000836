"""Megatron on CPUs and gloo: stands in for what it assumes about CUDA.

No other file knows that there is no GPU.

Megatron's modules see a `torch` whose `cuda` is the CPU. The replacement is scoped to modules whose
name starts with `megatron.` and to the script: for everybody else torch stays what it is. Nothing
happens where CUDA is present.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

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


def _import(name: str) -> Any:
    return importlib.import_module(name)


def adapt_megatron() -> None:
    """Lets megatron-core run without CUDA. May be called again after more modules were loaded."""
    if torch.cuda.is_available():
        return
    for name in _MODULES:
        importlib.import_module(name)
    _adapt_tensor_methods()
    _adapt_random_state()
    _adapt_sizes_of_exchanges()
    _keep_freed_memory()
    _replace_torch_in_megatron()


def adapt_megatron_training() -> None:
    """Lets Megatron-LM's own `megatron.training` run without CUDA."""
    if torch.cuda.is_available():
        return
    adapt_megatron()
    initialize = _import("megatron.training.initialize")
    training = _import("megatron.training.training")
    # `initialize_megatron` insists on CUDA unless it is told otherwise.
    training.initialize_megatron = functools.partial(
        initialize.initialize_megatron, allow_no_cuda=True
    )
    # Warming up the fused kernels allocates on the GPU; there are none to warm up.
    initialize.set_jit_fusion_options = training.set_jit_fusion_options = lambda *_, **__: None
    # The older fused kernels are compiled for the GPU's architecture.
    if hasattr(initialize, "fused_kernels"):
        initialize.fused_kernels.load = _nothing
    _replace_torch_in_megatron()


def set_megatron_arguments(args: Any) -> None:
    """Sets arguments of Megatron-LM's loop for a CPU, before it checks them."""
    if torch.cuda.is_available():
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


def _nothing(*_: Any, **__: Any) -> None:
    """Ignores a request to the GPU, which is void on a CPU."""


# Replaced members of `torch.cuda` inside Megatron; all others are the real ones.
_CUDA_ON_CPU: dict[str, Any] = {
    # Tensors are made on the "current device" in some forty places.
    "current_device": lambda: CPU,
    "device_count": lambda: 1,
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
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
    "memory_stats": lambda *_: {},
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


_TORCH_ON_CPU = _Module(
    torch,
    {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    | {"cuda": _Module(torch.cuda, _CUDA_ON_CPU)},
)


def _megatron_modules() -> Iterator[types.ModuleType]:
    for name, module in list(sys.modules.items()):
        if _is_megatrons(name) and module is not None:
            yield module


def _replace_torch_in_megatron() -> None:
    for module in _megatron_modules():
        if module.__dict__.get("torch") is torch:
            module.torch = _TORCH_ON_CPU  # type: ignore[attr-defined]


def _called_by_megatron() -> bool:
    """Whether the method that calls this function was called by Megatron (two frames up)."""
    return _is_megatrons(sys._getframe(2).f_globals.get("__name__", ""))


def _is_megatrons(module: str) -> bool:
    """Whether a module is Megatron's; so is the script, which may be Megatron-LM's own."""
    return module == "__main__" or module.startswith("megatron.")


def _adapt_tensor_methods() -> None:
    """Adapts methods of tensors and modules for calls by Megatron.

    Methods cannot be replaced for some modules alone, so they look at who calls them.
    """
    if hasattr(torch.Tensor.type, "__wrapped__"):
        return
    original_type, original_cuda = torch.Tensor.type, torch.Tensor.cuda

    @functools.wraps(original_type)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Optimizers sort parameters by type names such as "torch.cuda.FloatTensor".
        answer = original_type(self, *args, **kwargs)
        if isinstance(answer, str) and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    @functools.wraps(original_cuda)
    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Checkpoint loading moves tensors to the GPU.
        return self if _called_by_megatron() else original_cuda(self, *args, **kwargs)

    torch.Tensor.type = tensor_type  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign,assignment]

    original_module_cuda = torch.nn.Module.cuda

    @functools.wraps(original_module_cuda)
    def module_cuda(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # Megatron-LM's loop moves the model to the GPU.
        return self if _called_by_megatron() else original_module_cuda(self, *args, **kwargs)

    torch.nn.Module.cuda = module_cuda  # type: ignore[method-assign,assignment]


def _adapt_sizes_of_exchanges() -> None:
    """Gives torch the sizes of experts' exchanges as numbers, which they become on GPUs."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.all_to_all
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def all_to_all(*inputs: Any, **others: Any) -> Any:
        group, tokens, *sizes = inputs
        numbers = [each.tolist() if isinstance(each, torch.Tensor) else each for each in sizes]
        return original(group, tokens, *numbers, **others)

    token_dispatcher.all_to_all = all_to_all


def _keep_freed_memory() -> None:
    """Lets this process keep the memory that tensors free, as CUDA's caching allocator does.

    glibc returns much of it to the system, and each step then takes it again, page by page: some
    percent of the step, in some processes and not in others. Other C libraries stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _ALL)
        mallopt(_MMAP_MAX, 0)


def _adapt_random_state() -> None:
    """Lets Megatron's tracker of random states keep the CPU generator's."""
    random = _import("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # Megatron warns of each change of the CPU generator, which is the one that is meant here.
    log = importlib.import_module("logging").getLogger(random.__name__)
    if not log.filters:
        log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())

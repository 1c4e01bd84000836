"""Repairs of megatron-core where something that it counts on is not installed."""

from __future__ import annotations

import functools
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


def repair_megatron() -> None:
    """Mends megatron-core where it needs what is missing. May be called again."""
    _repair_recompute()
    _repair_distributed_optimizer()
    _repair_adam_state()
    _repair_compiling_of_helpers()
    _repair_reading_of_checkpoints()
    _repair_router()
    _repair_latent_attention()


def _repair_router() -> None:
    """Mends routers of experts in 0.16, which ask for a function of Transformer Engine's."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _repair_latent_attention() -> None:
    """Mends multi-latent attention: it takes Transformer Engine for installed where it is not, and
    from 0.18 on fills values of packed documents up to the size of keys, whatever core attention
    takes.
    """
    from megatron.core.transformer import multi_latent_attention as latent

    if not isinstance(latent.TELinear, type):
        latent.HAVE_TE = False
    original = getattr(latent, "_prepare_mla_core_attention_value", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def prepare(layer: Any, query: Any, value: Any, packed_seq_params: Any) -> Any:
        if getattr(layer.core_attention, "takes_any_heads", False):
            size = value.shape[-1]
            return value, False, size, size
        return original(layer, query, value, packed_seq_params)

    latent._prepare_mla_core_attention_value = prepare


def _repair_compiling_of_helpers() -> None:
    """Leaves compiled helpers of datasets as they are in the wheel, which has no Makefile for them.

    Megatron-LM's loop ends the first rank when `make` fails.
    """
    from megatron.core.datasets import utils

    assert utils.__file__ is not None
    if not (Path(utils.__file__).parent / "Makefile").exists():
        utils.compile_helpers = lambda: None


def _repair_recompute() -> None:
    """Mends selective recomputation, which takes `fp8=False` for fp8, Transformer Engine's."""
    from megatron.core.tensor_parallel import random

    original = random.CheckpointWithoutOutput.__init__
    if random.HAVE_TE or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False

    random.CheckpointWithoutOutput.__init__ = init


def _repair_distributed_optimizer() -> None:
    """Mends loading of the state: it writes to a view of a leaf, and misses Adam's `step`."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if HAVE_APEX_OR_TE or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        own = {k: v for k, v in self.optimizer.state[main_param].items() if k == "step"}
        with torch.no_grad():
            return original(self, model_param, own | tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _repair_adam_state() -> None:
    """Mends loading into torch's Adam, which megatron-core takes for apex's or the Engine's."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    for kind in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
        if not hasattr(kind.sharded_state_dict, "__wrapped__"):
            kind.sharded_state_dict = _after_filling_state(kind.sharded_state_dict)
            kind.load_state_dict = _before_unsharing_steps(kind.load_state_dict)


def _after_filling_state(original: Any) -> Any:
    """Gives torch's Adam the state that it would make at its first step, before one is loaded.

    The distributed optimizer loads into that state, and asserts that it exists.
    """

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_state: Any, is_loading: bool = False, *more: Any, **named: Any
    ) -> Any:
        if is_loading:
            for parameter, _, state in _adam_state(self.optimizer):
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
        return original(self, model_state, is_loading, *more, **named)

    return sharded_state_dict


def _before_unsharing_steps(original: Any) -> Any:
    """Gives every parameter a `step` tensor of its own after loading.

    megatron-core loads one tensor for all of them, which torch's Adam then increments once for
    each parameter; some formats leave it at zero and keep the count in the parameter group.
    """

    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **named: Any) -> Any:
        answer = original(self, *args, **named)
        for _, group, state in _adam_state(self.optimizer):
            if "step" in state:
                state["step"] = torch.tensor(float(group.get("step", state["step"])))
        return answer

    return load_state_dict


def _adam_state(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any], dict[str, Any]]]:
    """Yields each parameter of torch's Adam with its group and state; nothing of others."""
    if isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group, optimizer.state[parameter]


def _repair_reading_of_checkpoints() -> None:
    """Lets megatron-core read what checkpoints of other versions keep beside tensors, as data."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    from megatron_patches.checkpoint_data import read_checkpoints_as_data
    from megatron_patches.common_state import read_common_state

    read_checkpoints_as_data()
    serialization.load_common_state_dict = read_common_state
    dist_checkpointing.load_common_state_dict = read_common_state
    # Loading reads it, too: by a method in 0.16, by another function in 0.17 and 0.18.
    if hasattr(common, "TorchCommonLoadStrategy"):
        common.TorchCommonLoadStrategy.load_common = lambda _, path: read_common_state(path)
    if hasattr(serialization, "load_common"):
        serialization.load_common = read_common_state


def write_checkpoints_in_this_process() -> None:
    """Lets threads of this process write checkpoints. For jobs without `--async-save`.

    megatron-core starts a process for the writers' results, and up to 0.16 one for each writer.
    They take hundreds of megabytes and seconds to start, outlive a rank that is killed, and one
    that is killed itself is waited for.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Up to 0.16 with an underscore, and by processes; then by threads, which log what fails.
    names = ("get_write_results_queue", "_get_write_results_queue")
    setattr(filesystem_async, _defined(filesystem_async, *names), queue.Queue)
    writer = filesystem_async.FileSystemWriterAsync
    names = ("write_preloaded_data_multithread", "write_preloaded_data_multiproc")
    setattr(writer, _defined(writer, *names), staticmethod(_write_files))


def _defined(owner: Any, *names: str) -> str:
    return next(name for name in names if hasattr(owner, name))


def _write_files(
    transforms: Any, use_msc: bool, rank: int, files: Sequence[Any], results: queue.Queue[Any]
) -> None:
    """Writes a rank's files of a checkpoint, a thread for each, as megatron-core calls it.

    Args:
        transforms: transforms of the files' content.
        use_msc: whether files are those of the multi-storage client.
        rank: this rank.
        files: what megatron-core's `write_preloaded_data` writes, each.
        results: takes what was written by the file's number, or the error of a file.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def write(number: int) -> Any:
        answers: queue.Queue[Any] = queue.Queue()
        unfinished: queue.Queue[int] = queue.Queue()
        unfinished.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            transforms, number, files[number], answers, unfinished, use_fsync=True, use_msc=use_msc
        )
        return answers.get()[1]

    with ThreadPoolExecutor(len(files)) as threads:
        written = list(threads.map(write, range(len(files))))
    errors = [_operating_system_s(each) for each in written if isinstance(each, Exception)]
    results.put(errors[0] if errors else dict(enumerate(written)))


def _operating_system_s(error: BaseException) -> BaseException:
    """Returns the operating system's error that an error came of, or the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else cause

"""Mends of megatron-core and of torch's checkpoints, which `hooks` puts in place.

Each function takes what it replaces and returns the replacement. `hooks` says why, for which
versions, and where the defect is.
"""

from __future__ import annotations

import functools
import logging
import queue
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch


def has_transformer_engine() -> bool:
    """Returns whether megatron-core found Transformer Engine."""
    from megatron.core.tensor_parallel import random

    return bool(random.HAVE_TE)


def has_apex_or_engine() -> bool:
    """Returns whether megatron-core's optimizers are apex's or Transformer Engine's."""
    from megatron.core.optimizer import distrib_optimizer

    return bool(distrib_optimizer.HAVE_APEX_OR_TE)


def has_makefile_of_helpers() -> bool:
    """Returns whether the compiled helpers of datasets can be compiled: a wheel lacks their
    Makefile."""
    from megatron.core.datasets import utils

    assert utils.__file__ is not None
    return (Path(utils.__file__).parent / "Makefile").exists()


def values_of_any_size(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves values of packed documents at their own size where core attention takes it."""

    @functools.wraps(theirs)
    def prepare(layer: Any, query: Any, value: Any, packed_seq_params: Any) -> Any:
        if getattr(layer.core_attention, "takes_any_heads", False):
            size = value.shape[-1]
            return value, False, size, size
        return theirs(layer, query, value, packed_seq_params)

    return prepare


def keep_compiled_helpers(theirs: Callable[[], None]) -> Callable[[], None]:
    """Leaves the compiled helpers of datasets as the wheel has them."""

    @functools.wraps(theirs)
    def compile_helpers() -> None:
        return None

    return compile_helpers


def recompute_without_fp8(theirs: Callable[..., None]) -> Callable[..., None]:
    """Makes `fp8=False` mean no fp8."""

    @functools.wraps(theirs)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        self.fp8 = False

    return init


def set_states_of_torch_adam(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Sets the state of torch's Adam, which has a `step` for each parameter."""

    @functools.wraps(theirs)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        own = {k: v for k, v in self.optimizer.state[main_param].items() if k == "step"}
        with torch.no_grad():
            return theirs(self, model_param, tensors | own)

    return set_states


def with_whole_state(theirs: Callable[..., None]) -> Callable[..., None]:
    """Gives torch's Adam and SGD the whole state of their first step, before one is loaded into it.

    megatron-core loads one `step` tensor for all parameters of Adam, which it then increments once
    for each: so each gets its own after loading.
    """

    @functools.wraps(theirs)
    def init(self: Any, optimizer: Any, config: Any, init_state_fn: Any = None) -> None:
        if isinstance(optimizer, torch.optim.Adam):
            init_state_fn = _fill_moments
            # Of a checkpoint's state, and where the distributed optimizer has shared parameters
            # out, whose state it counts on from then on.
            optimizer.register_load_state_dict_post_hook(_own_steps)
        theirs(self, optimizer, config, init_state_fn or _fill_momentum)

    return init


def _fill_moments(optimizer: torch.optim.Adam, config: Any = None) -> None:
    """Sets both moments of each parameter of Adam to zero, where it has no state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not (state := optimizer.state[parameter]):
                state["step"] = _step_of(group, parameter, 0.0)
                state["exp_avg"] = torch.zeros_like(parameter.data)
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)


def _own_steps(optimizer: Any) -> None:
    """Gives each parameter of Adam its `step`, which some formats keep in the parameter group."""
    _fill_moments(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = _step_of(group, parameter, group.get("step", state["step"]))


def _step_of(group: dict[str, Any], parameter: torch.Tensor, value: Any) -> torch.Tensor:
    """Makes a `step` where torch's Adam makes it."""
    on_device = group["capturable"] or group["fused"]
    return torch.tensor(float(value), device=parameter.device if on_device else None)


def _fill_momentum(optimizer: Any, config: Any = None) -> None:
    """Sets each momentum to zero, from which the first step makes its gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.data)


def write_files(_: Callable[..., None]) -> Any:
    """Writes a rank's files of a checkpoint by threads of this process."""
    return staticmethod(_write_files)


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


def escape_percent_signs(parser: ArgumentParser) -> None:
    """Lets `--help` print: a help text of megatron-core 0.19 has a bare percent sign."""
    for action in parser._actions:
        try:
            parser._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            assert action.help is not None
            action.help = action.help.replace("%", "%%")


def leave_out_warnings_of_calls() -> None:
    """Leaves out what torch and megatron-core say of Megatron-LM's calls: users can't mend it."""
    # Functions that torch will rename, or replace.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    for message in (
        # A rank reads what a checkpoint has beside tensors.
        r"torch\.distributed is disabled, unavailable or uninitialized",
        r"The argument order of load has been changed",
        # The optimizer asks each parameter whether it has a gradient; some are views.
        r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
        # A process that converts a checkpoint is alone.
        r"Could not determine rank from torch\.distributed",
    ):
        warnings.filterwarnings("ignore", message, UserWarning)
    # Its successor is no model that we train.
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_is_of_use)


def leave_out_messages_of_a_run() -> None:
    """Leaves out what megatron-core says at the start of a run, where a command trains nothing."""
    logging.getLogger("megatron.core.rerun_state_machine").addFilter(_is_of_use)
    leave_out_the_warning_of_async_saves()


def leave_out_the_warning_of_async_saves() -> None:
    """Leaves out advice on asynchronous saves, where checkpoints are saved at once."""
    saving = "megatron.core.dist_checkpointing.strategies.torch"
    logging.getLogger(saving).addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    of_no_use = (
        "GPTModel IS DEPRECATED",
        "RerunStateMachine initialized in mode",
        "MCore's async save is deprecated",
    )
    return not record.getMessage().startswith(of_no_use)

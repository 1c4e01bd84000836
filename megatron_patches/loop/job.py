"""The interface between DistCA and the training loops that can run it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.pipeline.data_iterators import DataIterators


@dataclass(frozen=True)
class Job:
    """The parts of a pretraining run that a loop calls; `args` are Megatron-LM's arguments.

    Attributes:
        add_arguments: `(parser) -> parser`, adds our flags to Megatron's.
        validate_arguments: `(config, args)`, raises ValueError before any work starts.
        build_model: `(config, args, transformer, pre_process, post_process, vp_stage,
            pg_collection) -> model`, builds one stage of the model.
        build_data: `(config, args, train_samples, valid_samples, test_samples, processes) ->
            DataIterators`, resumes from the consumed samples in `args`; `processes` are those of a
            job with dedicated servers, or None.
        forward_step: `(data_iterator, model) -> (output, loss_function)`, Megatron's
            `forward_step_func`; the loss is a sum over tokens, and every `[sum, count]` pair of the
            report becomes a field of the log line.
        forward_backward_func: `(config) -> function`, makes what runs the micro-batches of a global
            batch in place of megatron-core's `get_forward_backward_func()`; None: that one does.
    """

    add_arguments: Callable[[ArgumentParser], ArgumentParser]
    validate_arguments: Callable[[DistcaConfig, Namespace], None]
    build_model: Callable[..., Any]
    build_data: Callable[..., DataIterators]
    forward_step: Callable[..., tuple[Any, Any]]
    forward_backward_func: Callable[[DistcaConfig], Callable[..., Any] | None]

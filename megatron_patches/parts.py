"""Parts of Megatron-LM's loop, for programs that run no more: arguments, start, model."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.enums import ModelType

from megatron_patches import hooks
from megatron_patches.batches.micro_batch import forward_step
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.unknown import explained
from megatron_patches.loop.checkpoint_folder import (
    checkpoint_name,
    explaining_loading,
    explaining_saving,
    latest_iteration,
)
from megatron_patches.loop.dropped_weights import refuse_dropped_weights
from megatron_patches.loop.from_hugging_face import with_model_flags
from megatron_patches.loop.kept_tokenizer import keep_tokenizer
from megatron_patches.loop.run import checked, refusal_of_a_file
from megatron_patches.megatron_lm import add_our_arguments, build_stage
from megatron_patches.pipeline.tick_pipeline import forward_backward_func
from megatron_patches.versions import INITIALIZING_CHECKS


def _adapted(module: str) -> Any:
    """Returns a module of Megatron-LM's loop, mended for this installation."""
    importlib.import_module("megatron.training.training")
    hooks.apply(hooks.CPU_LOOP)
    hooks.adapt_megatron_core()
    return importlib.import_module(f"megatron.training.{module}")


def build_parser() -> ArgumentParser:
    """Makes a parser of Megatron-LM's flags and ours."""
    arguments = _adapted("arguments")
    parser = ArgumentParser(allow_abbrev=False)
    return add_our_arguments(arguments.add_megatron_arguments(parser))


def parse_args(argv: Sequence[str], rank: int = 0, world_size: int = 1) -> Namespace:
    """Parses and checks a command line as the loop does.

    Args:
        argv: command line.
        rank: rank of this process.
        world_size: number of processes, dedicated attention servers among them.

    Raises:
        ValueError: a flag is unknown, or flags don't go together; the message says what to do.
    """
    arguments = _adapted("arguments")

    def add(parser: ArgumentParser) -> ArgumentParser:
        parser = add_our_arguments(parser)
        parser.error = functools.partial(_raise, parser)  # type: ignore[method-assign]
        given = parser.parse_args(with_model_flags(parser, argv))
        if given.yaml_cfg is not None:
            raise ValueError(refusal_of_a_file(given.yaml_cfg))
        # It is called without a command line, and would take that of the process.
        parser.parse_args = lambda: given  # type: ignore[method-assign,assignment]
        return parser

    args = arguments.parse_args(add)
    args.rank, args.world_size = rank, world_size
    # It prints all arguments.
    with contextlib.redirect_stdout(io.StringIO()):
        checked(arguments.validate_args, DistcaConfig.from_args(args), args)
    return args


def _raise(parser: ArgumentParser, message: str) -> NoReturn:
    raise ValueError(explained(message, list(parser._option_string_actions)))


def initialize(args: Namespace) -> Namespace:
    """Sets Megatron-LM's process-wide state; `torch.distributed` must be initialised. Collective.

    Args:
        args: arguments that `parse_args` returned.

    Returns:
        The same, with the vocabulary's padded size.
    """
    initialize_megatron = _adapted("initialize").initialize_megatron
    with contextlib.redirect_stdout(io.StringIO()):
        if INITIALIZING_CHECKS:
            hooks.apply((hooks.CHECKED,))
            try:
                initialize_megatron(parsed_args=args, allow_no_cuda=True)
            finally:
                hooks.CHECKED.undo()
        else:
            _adapted("global_vars").set_global_variables(args)
            initialize_megatron(allow_no_cuda=True)
    return args


def save_weights(model: Any, args: Namespace, folder: Path, iteration: int = 0) -> None:
    """Saves the model of one process in Megatron-LM's format.

    Args:
        model: model that `build_model` returned.
        args: arguments that `initialize` was given, with `--no-save-optim` and `--no-save-rng`.
        folder: folder of checkpoints.
        iteration: iteration that the checkpoint is of.

    Raises:
        ValueError: it cannot be written, with the reason.
    """
    checkpointing = _adapted("checkpointing")
    args.save = str(folder)
    with explaining_saving(folder), contextlib.redirect_stdout(io.StringIO()):
        keep_tokenizer(args.tokenizer_type, args.tokenizer_model, folder)
        checkpointing.save_checkpoint(iteration, [model], None, None, 0)


def load_weights(model: Any, args: Namespace, folder: Path) -> None:
    """Loads the weights of the latest checkpoint of a folder into the model of one process.

    Args:
        model: model that `build_model` returned.
        args: arguments that `initialize` was given, with `--no-load-optim` and `--no-load-rng`.
        folder: folder of checkpoints.

    Raises:
        ValueError: there is none, or what is wrong with it.
    """
    checkpointing = _adapted("checkpointing")
    args.load, args.exit_on_missing_checkpoint, args.finetune = str(folder), True, True
    with explaining_loading(folder, None), contextlib.redirect_stdout(io.StringIO()):
        iteration = latest_iteration(folder)
        if iteration is not None:
            refuse_dropped_weights([model], checkpoint_name(folder, iteration))
        checkpointing.load_checkpoint([model], None, None)


@dataclass
class BuiltModel:
    """The built model of a run, and what trains it.

    Attributes:
        args: Megatron-LM's arguments.
        model: model chunks of this rank, wrapped for data parallelism.
        optimizer: Megatron's optimizer.
        scheduler: schedule of learning rate and weight decay.
        forward_step: Megatron's `forward_step_func`.
    """

    args: Namespace
    model: list[Any]
    optimizer: Any
    scheduler: Any
    forward_step: Callable[..., tuple[Any, Any]] = field(default=forward_step, kw_only=True)

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        from megatron.core.utils import get_model_config

        return get_model_config(self.model[0])

    @functools.cached_property
    def forward_backward_func(self) -> Callable[..., list[Any]]:
        """Function that runs the micro-batches of a global batch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        own = forward_backward_func(DistcaConfig.from_args(self.args))
        return get_forward_backward_func() if own is None else own

    def begin_step(self) -> None:
        """Sets gradients to zero, and turns dropout on."""
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(self, iterators: Any) -> list[dict[str, Any]]:
        """Runs the passes of a global batch, and leaves the gradients.

        Args:
            iterators: iterator of micro-batches or ticks, or one for each model chunk.

        Returns:
            The reports of the loss function for each micro-batch, on the last stage.
        """
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        reruns = get_rerun_state_machine()
        while reruns.should_run_forward_backward(None):
            reports = self.forward_backward_func(
                forward_step_func=self.forward_step,
                data_iterator=iterators,
                model=self.model,
                num_microbatches=get_num_microbatches(),
                seq_length=self.args.seq_length,
                micro_batch_size=self.args.micro_batch_size,
                forward_only=False,
            )
        return reports


def build_model(args: Namespace) -> Any:
    """Builds the model of one process, which is not wrapped for data parallelism.

    Args:
        args: arguments that `initialize` was given.
    """
    return build_stage(DistcaConfig.from_args(args))


def build_run(args: Namespace) -> BuiltModel:
    """Builds this rank's model and optimizer, and loads `--load`. Collective.

    Args:
        args: arguments that `initialize` was given, or others for the same processes.
    """
    from megatron.core.distributed import finalize_model_grads

    training, global_vars = _adapted("training"), _adapted("global_vars")
    args.padded_vocab_size = global_vars.get_args().padded_vocab_size
    global_vars.set_args(args)
    with contextlib.redirect_stdout(io.StringIO()):
        made = training.setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder,
            model_provider_func=functools.partial(build_stage, DistcaConfig.from_args(args)),
            checkpointing_context={},
        )
    run = BuiltModel(args, *made)
    # As `train()` sets them.
    config, model = run.config, run.model
    config.grad_scale_func = run.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])
    return run


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions

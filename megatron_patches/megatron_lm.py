"""DistCA under Megatron-LM's own `pretrain()`.

In Megatron-LM's `pretrain_gpt.py`, after its imports, add two lines:

    from megatron_patches.megatron_lm import with_distca
    pretrain = with_distca(pretrain)

With `--distca` the run then uses our documents, model and forward step. Without it nothing of
Megatron-LM changes: our flags are added to its parser, by one function that is replaced until the
command line is parsed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.enums import ModelType

from distca.documents.document_list import DocumentList
from megatron_patches import cpu, hooks
from megatron_patches.batches.custom_dataset import name_of
from megatron_patches.batches.micro_batch import forward_step
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import add_distca_arguments, given_in_vain
from megatron_patches.flags.numbers import refuse_what_cannot_be_read
from megatron_patches.loop.data import build_data
from megatron_patches.loop.failure_report import ending_the_job_on_failure
from megatron_patches.loop.run import (
    LoopRun,
    arguments_with_vocabulary,
    asks_for_distca,
    refuse_a_file_of_flags,
    refuse_in_a_line,
    refuse_in_vain,
)
from megatron_patches.model.gpt import build_model, core_attention_kind
from megatron_patches.pipeline.data_iterators import DataIterators
from megatron_patches.versions import FIRST, LAST, script_parses

# Arguments of Megatron-LM's loop when the data iterators are ours.
OUR_DATA = {"dataloader_type": "external", "calculate_per_token_loss": True}


def pretrain(environment: Mapping[str, str]) -> None:
    """Pretrains, with or without `--distca`, in Megatron-LM's own loop.

    Args:
        environment: environment variables of the launcher.
    """
    from megatron.training import pretrain as megatron_pretrain

    def add(parser: ArgumentParser) -> ArgumentParser:
        # Megatron-LM's message follows the usage, hundreds of lines, on every rank.
        parser.error = functools.partial(  # type: ignore[method-assign]
            refuse_in_a_line, parser, environment
        )
        return add_our_arguments(parser)

    def parsed(args: Namespace, whole: bool) -> None:
        refuse_a_file_of_flags(args.yaml_cfg, environment)
        hooks.adapt_megatron_loop(run, args.async_save)

    run = LoopRun(environment, add, parsed)
    hooks.apply((hooks.ADD_FLAGS,), run)
    given: dict[str, Any] = {}
    with ending_the_job_on_failure(environment, run.end_if_late):
        if script_parses(megatron_pretrain):
            given["cfg_container"] = _parsed_configuration()
        else:
            hooks.apply((hooks.ALLOW_NO_CUDA,))
        providers = Providers(run)
        with providers.closing_data():
            megatron_pretrain(
                train_valid_test_dataset_provider=providers.data_iterators,
                model_provider=providers.model,
                model_type=ModelType.encoder_or_decoder,
                forward_step_func=forward_step,
                **given,
            )


def _parsed_configuration() -> Any:
    """Parses the command line, which Megatron-LM 0.18 and later leave to the script."""
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    with warnings.catch_warnings():
        # It recommends a configuration of the model instead of the provider that we give.
        warnings.simplefilter("ignore")
        return pretrain_cfg_container_from_args(args)


def with_distca(
    megatron_pretrain: Callable[..., None],
    # Megatron-LM's script is to need no more than two lines.
    environment: Mapping[str, str] = os.environ,
    documents: Callable[[Namespace, str], DocumentList | None] | None = None,
) -> Callable[..., None]:
    """Wraps Megatron-LM's `pretrain` so that `--distca` runs our data, model and forward step.

    Called before the command line is parsed, to which it adds our flags. When it is parsed
    `--distca` applies the table of `megatron_patches.hooks`; without `--distca` Megatron-LM is then
    as it was before this call, and its `pretrain` gets what the script gives it; the run ends with
    a line if the command line has other flags of ours.

    Args:
        megatron_pretrain: Megatron-LM's function, or a wrapper of it with the same parameters.
        environment: environment variables of the launcher.
        documents: function that gives the documents of a split, as `--distca-documents` names it.

    Returns:
        A function with the same parameters.

    Raises:
        ValueError: the function lacks a parameter that we replace: this Megatron-LM is not known;
            or `documents` is no function that a module defines by name.
    """
    signature = inspect.signature(megatron_pretrain)
    replaced = ("train_valid_test_dataset_provider", "model_provider", "forward_step_func")
    missing = [name for name in replaced if name not in signature.parameters]
    if missing:
        raise ValueError(
            f"pretrain() has no parameter {', '.join(missing)}: this Megatron-LM is not supported, "
            f"use core_v{FIRST} to core_v{LAST}"
        )
    name = None if documents is None else name_of(documents)
    add = add_arguments if name is None else _adding(name)

    def parsed(args: Namespace, whole: bool) -> None:
        # The configuration is made in the hooks that this applies.
        if args.distca:
            refuse_a_file_of_flags(args.yaml_cfg, environment)
            hooks.adapt_megatron_loop(run, args.async_save)
        elif whole:
            hooks.ADD_FLAGS.undo()
            refuse_in_vain(given_in_vain(args, name), environment)

    run = LoopRun(environment, add, parsed)
    hooks.apply((hooks.ADD_FLAGS,), run)
    parsed_before = script_parses(megatron_pretrain)

    @functools.wraps(megatron_pretrain)
    def pretrain_with_distca(*args: Any, **kwargs: Any) -> None:
        if not asks_for_distca():
            if parsed_before:
                hooks.ADD_FLAGS.undo()
            megatron_pretrain(*args, **kwargs)
            return
        try:
            call = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"pretrain() {error}") from None
        call.apply_defaults()
        given, providers = call.arguments, Providers(run)
        _check_what_the_last_rank_runs(given)
        given["train_valid_test_dataset_provider"] = providers.data_iterators
        given["model_provider"] = providers.model
        given["forward_step_func"] = forward_step
        if parsed_before:
            _check_parsed_with_our_flags()
            # A configuration of the model would win over the provider.
            given["cfg_container"] = replace(given["cfg_container"], model=None)
        else:
            hooks.apply((hooks.ALLOW_NO_CUDA,))
        ending = ending_the_job_on_failure(environment, run.end_if_late)
        with ending, providers.closing_data():
            megatron_pretrain(*call.args, **call.kwargs)

    return pretrain_with_distca


def _check_what_the_last_rank_runs(given: Mapping[str, Any]) -> None:
    """Refuses the forward that Megatron-LM's evaluation runs on the last rank alone.

    Args:
        given: arguments of Megatron-LM's `pretrain`.

    Raises:
        ValueError: the last rank would wait for the others for ever.
    """
    name = "process_non_loss_data_func"
    if given.get(name) is not None and given.get("non_loss_data_func") is None:
        raise ValueError(
            f"pretrain() is given {name}, for which Megatron-LM runs a forward pass only on "
            "the last rank, and with --distca all ranks take part in one: give non_loss_data_func, "
            f"which all ranks call, or remove {name}"
        )


def _check_parsed_with_our_flags() -> None:
    """Refuses a command line that was parsed before our flags were added.

    Raises:
        ValueError: it was.
    """
    from megatron.training import get_args

    if not hasattr(get_args(), "distca"):
        raise ValueError(
            "the command line was parsed before `pretrain = with_distca(pretrain)`: put the two "
            "lines after the imports of the script"
        )


def add_our_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the `--distca` flags and our defaults to Megatron-LM's parser, in programs of ours."""
    # Checkpoints load at other parallel sizes.
    parser.set_defaults(**OUR_DATA, dist_ckpt_optim_fully_reshardable=True)
    refuse_what_cannot_be_read(parser)
    return add_distca_arguments(parser)


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the `--distca` flags to the parser of Megatron-LM's script; with `--distca` also our
    defaults."""
    if asks_for_distca():
        parser.set_defaults(**OUR_DATA)
        refuse_what_cannot_be_read(parser)
    return add_distca_arguments(parser)


def _adding(documents: str) -> Callable[[ArgumentParser], ArgumentParser]:
    """Returns a function that adds the flags, with a default of `--distca-documents`."""

    def add(parser: ArgumentParser) -> ArgumentParser:
        add_arguments(parser)
        parser.set_defaults(distca_documents=documents)
        return parser

    return add


def build_stage(
    distca: DistcaConfig,
    /,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Builds a stage of the model that Megatron-LM's arguments describe.

    Args:
        distca: our flags.
        pre_process: whether the stage has the embedding.
        post_process: whether the stage has the output layer.
        vp_stage: number of the model chunk; None: a stage is one.
        config: Megatron's configuration of the model; None: that of the arguments.
        pg_collection: Megatron's process groups; None: its default.
    """
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    if config is None:
        config = core_transformer_config_from_args(args)
    backend = args.attention_backend.name
    if core_attention_kind(distca.enabled, args.transformer_impl, backend) == "dense mask":
        # Megatron's local softmax drops the document mask when it is given a window.
        config.window_size = None
    if cpu.without_cuda():
        # An output's memory is freed once its send is issued, which gloo may read later.
        config.deallocate_pipeline_outputs = False
    return build_model(
        distca,
        args,
        config,
        vp_stage,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=pg_collection,
    )


class Providers:
    """Our functions with the signatures that Megatron-LM's `pretrain` calls.

    Args:
        run: run of the loop.
    """

    def __init__(self, run: LoopRun) -> None:
        self._run = run
        self._built: list[DataIterators] = []
        self.data_iterators = self._data_iterators_provider()

    @contextlib.contextmanager
    def closing_data(self) -> Iterator[None]:
        """Closes the iterators when the loop ends without an error, also by `sys.exit`."""
        try:
            yield
        except SystemExit as end:
            if end.code:
                raise
            self._close_data()
            raise
        self._close_data()

    def _close_data(self) -> None:
        self._run.stop_watch()
        for iterators in self._built:
            iterators.close()

    def model(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        return build_stage(
            self._run.config,
            pre_process,
            post_process,
            vp_stage,
            config,
            pg_collection,
        )

    def _data_iterators_provider(self) -> Callable[..., Any]:
        def provide(num_samples: tuple[int, int, int], vp_stage: int | None = None) -> Any:
            # Ticks hold the micro-batches of all model chunks.
            if not (self._run.config.enabled and self._built):
                complete = arguments_with_vocabulary()
                self._built.append(
                    build_data(self._run.config, complete, *num_samples, self._run.processes)
                )
            iterators = self._built[-1]
            return iterators.train, iterators.valid, iterators.test

        provide.is_distributed = True  # type: ignore[attr-defined]
        return provide

"""DistCA under Megatron-LM's own `pretrain()`.

In Megatron-LM's `pretrain_gpt.py`, before `pretrain(...)` is called, add two lines:

    from megatron_patches.upstream import with_distca
    pretrain = with_distca(pretrain)

With `--distca` the run then uses our documents, model and forward step; without it nothing of
Megatron-LM changes. From Megatron-LM 0.18 the arguments are parsed before `pretrain()`: also give
`parse_and_validate_args` this module's `add_arguments`, as `extra_args_provider=add_arguments` (not
tried yet).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.enums import ModelType

from megatron_patches import cpu
from megatron_patches.batches.resuming import go_on_from
from megatron_patches.flags.distca import add_distca_arguments
from megatron_patches.flags.loop import add_loop_argument
from megatron_patches.loop.gpt_job import GPT_JOB
from megatron_patches.loop.job import Job
from megatron_patches.model.gpt import uses_dense_mask
from megatron_patches.model.without_te import repair_megatron


def pretrain(job: Job) -> None:
    """Runs a job, with or without `--distca`, in Megatron-LM's own loop."""
    if not torch.cuda.is_available():
        cpu.adapt_megatron_training()
    from megatron.training import pretrain as megatron_pretrain

    def add_arguments(parser: ArgumentParser) -> ArgumentParser:
        _load_our_data(parser)
        add_loop_argument(parser)
        return job.add_arguments(parser)

    run = _Providers(job)
    replace_schedules(job)
    keep_place_in_data(lambda args: True)
    megatron_pretrain(
        run.data_iterators,
        run.model,
        ModelType.encoder_or_decoder,
        job.forward_step,
        extra_args_provider=add_arguments,
    )


def with_distca(megatron_pretrain: Callable[..., None], job: Job = GPT_JOB) -> Callable[..., None]:
    """Wraps Megatron-LM's `pretrain` so that `--distca` runs our data, model and forward step.

    Args:
        megatron_pretrain: Megatron-LM's function, or a wrapper of it with the same parameters.
        job: job that `--distca` runs.

    Returns:
        A function with the same parameters.

    Raises:
        ValueError: the function lacks a parameter that we replace: this Megatron-LM is not known.
    """
    signature = inspect.signature(megatron_pretrain)
    replaced = ("train_valid_test_dataset_provider", "model_provider", "forward_step_func")
    missing = [name for name in replaced if name not in signature.parameters]
    if missing:
        raise ValueError(
            f"pretrain() has no parameter {', '.join(missing)}: this Megatron-LM is not supported, "
            "use core_v0.16 or core_v0.17"
        )

    def pretrain_with_distca(*args: Any, **kwargs: Any) -> None:
        if not torch.cuda.is_available():
            cpu.adapt_megatron_training()
        repair_megatron()
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if "extra_args_provider" in signature.parameters:
            given["extra_args_provider"] = _add_also(given["extra_args_provider"], job)
        run = _Providers(job)
        given["train_valid_test_dataset_provider"] = _if_distca(
            run.data_iterators, given["train_valid_test_dataset_provider"]
        )
        # We build every rank's iterators, so that each knows its documents.
        given["train_valid_test_dataset_provider"].is_distributed = True
        given["model_provider"] = _if_distca(run.model, given["model_provider"])
        given["forward_step_func"] = _if_distca(job.forward_step, given["forward_step_func"])
        replace_schedules(job)
        keep_place_in_data(lambda args: args.distca)
        megatron_pretrain(*call.args, **call.kwargs)

    return pretrain_with_distca


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the `--distca` flags to Megatron-LM's parser; `--distca` also turns on what it needs."""
    add_distca_arguments(parser)
    for action in parser._actions:
        if action.dest == "distca":
            _turn_on_with(parser, action)
    return parser


def _add_also(given: Callable[..., Any] | None, job: Job) -> Callable[..., Any]:
    def add_both(parser: ArgumentParser) -> ArgumentParser:
        if given is not None:
            parser = given(parser)
        return add_arguments(parser)

    return add_both


# Arguments of Megatron-LM's loop when the data iterators are ours.
_OUR_DATA = {"dataloader_type": "external", "calculate_per_token_loss": True}


def _load_our_data(parser: ArgumentParser) -> None:
    parser.set_defaults(**_OUR_DATA)


def _turn_on_with(parser: ArgumentParser, distca: Action) -> None:
    """Makes the flag `--distca` set `_OUR_DATA`, too."""

    class DistcaAction(Action):
        def __call__(
            self, parser: ArgumentParser, namespace: Namespace, values: Any, option: Any = None
        ) -> None:
            namespace.distca = True
            vars(namespace).update(_OUR_DATA)

    for option in distca.option_strings:
        parser._option_string_actions[option] = DistcaAction(
            distca.option_strings, "distca", nargs=0, default=False, help=distca.help
        )


def _if_distca(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls `ours` with `--distca`, else `theirs`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # Decided here, since arguments are parsed after the function is made.
        from megatron.training import get_args

        return (ours if get_args().distca else theirs)(*args, **kwargs)

    return call


def replace_schedules(job: Job) -> None:
    """Lets Megatron-LM's loop run the job's own schedule, where it has one for the arguments.

    The loop has no hook for that: it looks `get_forward_backward_func` up in its own module.
    """
    training = importlib.import_module("megatron.training.training")
    theirs = training.get_forward_backward_func
    if hasattr(theirs, "__wrapped__"):
        return
    own: list[Any] = []

    @functools.wraps(theirs)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        # Made once, since the loop asks in every iteration, and a timeline records several.
        if not own:
            own.append(job.forward_backward_func(get_args()))
        return theirs(*args, **kwargs) if own[0] is None else own[0]

    training.get_forward_backward_func = get_forward_backward_func  # type: ignore[attr-defined]


def keep_place_in_data(with_our_data: Callable[[Namespace], bool]) -> None:
    """Lets a run that Megatron-LM's loop resumes go on in our data where its checkpoint's ended.

    The loop has no hook for that: here it compares a checkpoint's arguments with the run's.

    Args:
        with_our_data: function from a run's arguments to whether its data is ours.
    """
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    theirs = checkpointing.check_checkpoint_args
    if hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def check_checkpoint_args(saved: Namespace, *args: Any, **kwargs: Any) -> None:
        from megatron.training import get_args

        theirs(saved, *args, **kwargs)
        if with_our_data(get_args()):
            go_on_from(vars(saved), get_args())

    checkpointing.check_checkpoint_args = check_checkpoint_args  # type: ignore[attr-defined]


class _Providers:
    """A job's functions with the signatures that Megatron-LM's `pretrain` calls."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.data_iterators = self._data_iterators_provider()

    def model(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        from megatron.training import get_args
        from megatron.training.arguments import core_transformer_config_from_args

        args = get_args()
        self._job.validate_arguments(args)
        if args.distca and args.distca_servers:
            raise ValueError(
                "--distca-servers dedicated:N needs the loop of this repository, since "
                "Megatron-LM's gives every process a model: run pretrain_gpt.py where "
                "megatron.training is not installed"
            )
        if config is None:
            config = core_transformer_config_from_args(args)
        if uses_dense_mask(args):
            # Megatron's local softmax drops the document mask when it is given a window.
            config.window_size = None
        return self._job.build_model(
            args, config, pre_process, post_process, vp_stage, pg_collection
        )

    def _data_iterators_provider(self) -> Callable[..., Any]:
        def provide(num_samples: tuple[int, int, int], vp_stage: int | None = None) -> Any:
            from megatron.training import get_args, get_tokenizer

            # In Megatron-LM `vocab_size` is a flag, which may be missing or lack the end token.
            vocab_size = get_tokenizer().vocab_size
            args = Namespace(**vars(get_args()) | {"vocab_size": vocab_size})
            iterators = self._job.build_data(args, *num_samples)
            return iterators.train, iterators.valid, iterators.test

        provide.is_distributed = True  # type: ignore[attr-defined]
        return provide

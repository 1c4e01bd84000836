"""What is replaced in Megatron-LM's own loop, which looks these functions up by name.

Each replacement calls the original; without `--distca` it does nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from megatron_patches import cpu
from megatron_patches.batches.resuming import go_on_from
from megatron_patches.batches.validation_sets import WholeSet
from megatron_patches.flags.megatron_table import EVAL_INTERVAL
from megatron_patches.flags.unknown import nearest
from megatron_patches.loop.job import Job
from megatron_patches.loop.launcher import kill_leftovers
from megatron_patches.loop.megatron_checkpoints import (
    WholeTracker,
    explain_loading,
    explain_saving,
    open_tracker_whole,
)
from megatron_patches.loop.messages import exit_with_message, message_handlers, message_level
from megatron_patches.loop.near_gpu import stay_near_gpu
from megatron_patches.repairs import write_checkpoints_in_this_process


def replace_functions(
    job: Job,
    add_arguments: Callable[[ArgumentParser], ArgumentParser],
    always: bool,
    told: Mapping[str, str],
) -> None:
    """Lets Megatron-LM's loop parse and check our flags, run our schedule, and log its speed.

    Args:
        job: job that runs.
        add_arguments: adds flags to Megatron-LM's.
        always: whether the job runs without `--distca`, too.
        told: environment variables of this process, which are the launcher's interface.
    """
    arguments = importlib.import_module("megatron.training.arguments")
    initialize = importlib.import_module("megatron.training.initialize")
    training = importlib.import_module("megatron.training.training")
    checkpointing: Any = importlib.import_module("megatron.training.checkpointing")
    _replace(arguments, "add_megatron_arguments", functools.partial(_and_add, add_arguments, told))
    # From 0.18 on the script parses its arguments, up to 0.17 initialisation does.
    for module in (arguments, initialize):
        if hasattr(module, "validate_args"):
            _replace(module, "validate_args", functools.partial(_and_check, job, always))
    _replace(training, "get_forward_backward_func", _OrOwnSchedule(job))
    _replace(training, "train_step", _and_tokens_per_second)
    _replace(training, "evaluate", functools.partial(_mean_over_tokens, always))
    _replace(training, "evaluate_and_print_results", functools.partial(_over_whole_sets, always))
    _replace(training, "cyclic_iter", _unless_endless)
    _replace(training, "setup_model_and_optimizer", _AfterPreflight(always, told))
    # Here the loop compares a checkpoint's arguments with its own.
    _replace(checkpointing, "check_checkpoint_args", functools.partial(_and_go_on, always))
    _replace(training, "save_checkpoint", explain_saving)
    _replace(training, "load_checkpoint", explain_loading)
    if hasattr(checkpointing, "open_file"):
        _replace(checkpointing, "open_file", open_tracker_whole)
    elif not isinstance(checkpointing.maybe_msc, WholeTracker):
        checkpointing.maybe_msc = WholeTracker(checkpointing.maybe_msc)


def _replace(module: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts `wrapper(original, ...)` in place of a module's function, once."""
    original = getattr(module, name)
    if hasattr(original, "replaced_by_distca"):
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    replacement.replaced_by_distca = True  # type: ignore[attr-defined]
    setattr(module, name, replacement)


def _and_add(
    add_arguments: Callable[[ArgumentParser], ArgumentParser],
    told: Mapping[str, str],
    theirs: Callable[[ArgumentParser], ArgumentParser],
    parser: ArgumentParser,
) -> ArgumentParser:
    parser = add_arguments(theirs(parser))
    # Its message follows the usage, hundreds of lines, on every rank.
    parser.error = functools.partial(_refuse_in_a_line, parser, told)  # type: ignore[method-assign]
    return parser


def _refuse_in_a_line(parser: ArgumentParser, told: Mapping[str, str], message: str) -> NoReturn:
    """Ends the process for a command line that cannot be parsed; the first rank says why."""
    _, is_unknown, words = message.partition("unrecognized arguments: ")
    options = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
    if is_unknown and options:
        known = list(parser._option_string_actions)
        message = "; ".join(nearest(option, known) for option in options)
    rank = int(told.get("RANK", 0))
    _show_our_messages(rank)
    exit_with_message(message, rank)


def _and_check(
    job: Job, always: bool, theirs: Callable[..., Any], args: Namespace, *more: Any, **named: Any
) -> Any:
    """Checks arguments as Megatron-LM does, then ours, and ends every rank alike with a line."""
    if not torch.cuda.is_available():
        cpu.set_megatron_arguments(args)
    if not (always or args.distca):
        return theirs(args, *more, **named)
    _show_our_messages(args.rank)
    try:
        answer = theirs(args, *more, **named)
    except AssertionError as error:
        # Its checks are assertions, many of which say no more than their condition.
        said = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        exit_with_message(f"Megatron-LM refuses the flags: {said}", args.rank)
    # From 0.17 on Megatron-LM divides by this without a default.
    if args.eval_interval is None:
        args.eval_interval = EVAL_INTERVAL
    if args.async_save:
        kill_leftovers()
    else:
        write_checkpoints_in_this_process()
    try:
        if args.multiple_validation_sets and args.virtual_pipeline_model_parallel_size:
            raise ValueError(
                "--multiple-validation-sets goes without virtual pipeline stages in Megatron-LM's "
                "loop: remove one"
            )
        if args.distca and args.distca_servers:
            raise ValueError(
                "--distca-servers dedicated:N needs --training-loop lean of this repository's "
                "pretrain_gpt.py: Megatron-LM's loop gives every process a model"
            )
        from megatron_patches.loop.preflight import check_boards

        job.validate_arguments(args)
        # Megatron-LM opens them before the process group exists.
        check_boards(args)
    except ValueError as error:
        exit_with_message(str(error), args.rank)
    return answer


class _AfterPreflight:
    """The building of model and optimizer, before which all that flags name is tried.

    Holds the lock of `--save` until the process ends.

    Args:
        always: whether the job runs without `--distca`, too.
        told: environment variables, in which a launcher names the job.
    """

    def __init__(self, always: bool, told: Mapping[str, str]) -> None:
        self._always, self._told = always, told
        self._held = contextlib.ExitStack()

    def __call__(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args, get_tokenizer

        from megatron_patches.loop.preflight import preflight

        given = get_args()
        if self._always or given.distca:
            if torch.cuda.is_available():
                stay_near_gpu(torch.cuda.current_device())
            vocab_size = get_tokenizer().vocab_size
            complete = Namespace(**vars(given) | {"vocab_size": vocab_size})
            self._held.enter_context(preflight(complete, self._told))
        return theirs(*args, **kwargs)


def _show_our_messages(rank: int) -> None:
    """Shows what DistCA logs, and leaves Megatron-LM's logging as it is."""
    for package in ("distca", "megatron_patches"):
        ours = logging.getLogger(package)
        if not ours.handlers:
            ours.handlers = message_handlers(rank)
            ours.setLevel(message_level(rank))
            ours.propagate = False


def _and_go_on(
    always: bool, theirs: Callable[..., None], saved: Namespace, *more: Any, **named: Any
) -> None:
    from megatron.training import get_args

    theirs(saved, *more, **named)
    if always or get_args().distca:
        go_on_from(vars(saved), get_args())


def _mean_over_tokens(always: bool, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Evaluates with a mean over all tokens that count, as without `--sft`.

    With it Megatron-LM averages micro-batches and ranks, of which some may have no such token.
    """
    from megatron.training import get_args

    given = get_args()
    sft = given.sft
    given.sft = sft and not (always or given.distca)
    try:
        return theirs(*args, **kwargs)
    finally:
        given.sft = sft


def _over_whole_sets(
    always: bool,
    theirs: Callable[..., Any],
    prefix: str,
    forward_step: Any,
    iterators: Any,
    *more: Any,
    **named: Any,
) -> Any:
    """Evaluates as many global batches as a set has, which Megatron-LM notes for several alone."""
    from megatron.training import get_args

    args = get_args()
    if (always or args.distca) and args.full_validation and not args.multiple_validation_sets:
        first = iterators[0] if isinstance(iterators, list) else iterators
        # Taken by its first entry, though it is a number where there is one set.
        args.eval_iters = [len(first.iterable)]
    return theirs(prefix, forward_step, iterators, *more, **named)


def _unless_endless(theirs: Callable[..., Any], iterable: Any) -> Any:
    """Returns an iterator of ours as it is, since it is endless and knows its ticks."""
    return iterable if isinstance(iterable, WholeSet) else theirs(iterable)


class _OrOwnSchedule:
    """The job's schedule where it has one for the arguments, else Megatron's.

    Made once, since the loop asks in every iteration, and a timeline records several.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._made: list[Callable[..., Any] | None] = []

    def __call__(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        if not self._made:
            self._made.append(self._job.forward_backward_func(get_args()))
        (own,) = self._made
        return theirs(*args, **kwargs) if own is None else own


def _and_tokens_per_second(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Adds the speed of a step to the figures that the loop logs."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args

    begin = time.perf_counter()
    figures, *others = theirs(*args, **kwargs)
    if figures and get_args().distca:
        tokens = get_current_global_batch_size() * get_args().seq_length
        device = next(iter(figures.values())).device
        seconds = time.perf_counter() - begin
        figures["tokens/s"] = torch.tensor([tokens / seconds], device=device)
    return figures, *others

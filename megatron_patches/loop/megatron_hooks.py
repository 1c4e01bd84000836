"""What is replaced in Megatron-LM's own loop, which looks these functions up by name.

Each function takes what it replaces, and the run, and returns the replacement, which calls the
original. `megatron_patches.hooks` has the table.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from megatron_patches import cpu
from megatron_patches.batches.resuming import go_on_from
from megatron_patches.batches.validation_sets import WholeSet
from megatron_patches.flags.megatron_table import EVAL_INTERVAL
from megatron_patches.flags.unknown import nearest
from megatron_patches.loop.job import Job
from megatron_patches.loop.launcher import kill_leftovers
from megatron_patches.loop.messages import exit_with_message, message_handlers, message_level


@dataclass(frozen=True)
class Run:
    """What Megatron-LM's loop runs.

    Attributes:
        job: job to run.
        told: environment variables of this process, which are the launcher's interface.
        add_arguments: function that adds flags to Megatron-LM's parser.
        parsed: function `(args, whole)` that is called when the command line is parsed; `whole` is
            False where flags that are not known were left out, as fault tolerance does before.
    """

    job: Job
    told: Mapping[str, str]
    add_arguments: Callable[[ArgumentParser], ArgumentParser]
    parsed: Callable[[Namespace, bool], None]


def asks_for_distca(argv: Sequence[str] | None = None) -> bool:
    """Whether a command line has `--distca`. Megatron-LM's parser takes no abbreviations, either.

    Args:
        argv: command line; None: this process's.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--distca", action="store_true")
    return bool(parser.parse_known_args(argv)[0].distca)


def add_flags(theirs: Callable[..., ArgumentParser], run: Run) -> Callable[..., ArgumentParser]:
    """Adds our flags to Megatron-LM's parser, and calls us when it has parsed."""

    @functools.wraps(theirs)
    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = run.add_arguments(theirs(parser))
        parse, parse_known, refuse = parser.parse_args, parser.parse_known_args, parser.error

        def parse_known_args(*given: Any, **named: Any) -> Any:
            arguments, others = parse_known(*given, **named)
            run.parsed(arguments, False)
            return arguments, others

        def parse_args(*given: Any, **named: Any) -> Any:
            arguments = parse(*given, **named)
            run.parsed(arguments, True)
            return arguments

        def error(message: str) -> NoReturn:
            if asks_for_distca():
                # Megatron-LM's follows the usage, hundreds of lines, on every rank.
                _refuse_in_a_line(parser, run.told, message)
            refuse(message)

        parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
        parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
        parser.error = error  # type: ignore[method-assign]
        return parser

    return add_megatron_arguments


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


def check_arguments(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Checks arguments as Megatron-LM does, then ours, and ends every rank with one line."""

    @functools.wraps(theirs)
    def validate_args(args: Namespace, *more: Any, **named: Any) -> Any:
        cpu.set_megatron_arguments(args)
        _show_our_messages(args.rank)
        try:
            answer = theirs(args, *more, **named)
        except AssertionError as error:
            # Its checks are assertions, many of which say no more than their condition.
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(str(error).split()) or place.line
            exit_with_message(f"Megatron-LM refuses the flags: {said}", args.rank)
        # From 0.17 on Megatron-LM divides by this without a default.
        if args.eval_interval is None:
            args.eval_interval = EVAL_INTERVAL
        if args.async_save:
            kill_leftovers()
        try:
            _refuse_what_this_loop_lacks(args)
            run.job.validate_arguments(args)
            from megatron_patches.loop.preflight import check_boards

            # Megatron-LM opens them before the process group exists.
            check_boards(args)
        except ValueError as error:
            exit_with_message(str(error), args.rank)
        return answer

    return validate_args


def _refuse_what_this_loop_lacks(args: Namespace) -> None:
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


def after_preflight(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Tries all that flags name before model and optimizer are built.

    Holds the lock of `--save` until the process ends.
    """
    held = contextlib.ExitStack()

    @functools.wraps(theirs)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args, get_tokenizer

        from megatron_patches.loop.preflight import preflight

        vocab_size = get_tokenizer().vocab_size
        complete = Namespace(**vars(get_args()) | {"vocab_size": vocab_size})
        held.enter_context(preflight(complete, run.told))
        return theirs(*args, **kwargs)

    return setup_model_and_optimizer


def _show_our_messages(rank: int) -> None:
    """Shows what DistCA logs, and leaves Megatron-LM's logging as it is."""
    for package in ("distca", "megatron_patches"):
        ours = logging.getLogger(package)
        if not ours.handlers:
            ours.handlers = message_handlers(rank)
            ours.setLevel(message_level(rank))
            ours.propagate = False


def go_on_in_data(theirs: Callable[..., None], run: Run) -> Callable[..., None]:
    """Goes on in the data where the run of a checkpoint ended."""

    @functools.wraps(theirs)
    def check_checkpoint_args(saved: Namespace, *more: Any, **named: Any) -> None:
        from megatron.training import get_args

        theirs(saved, *more, **named)
        go_on_from(vars(saved), get_args())

    return check_checkpoint_args


def mean_over_tokens(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Evaluates with a mean over all tokens that count, as without `--sft`.

    With it Megatron-LM averages micro-batches and ranks, of which some may have no such token.
    """

    @functools.wraps(theirs)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        given = get_args()
        sft, given.sft = given.sft, False
        try:
            return theirs(*args, **kwargs)
        finally:
            given.sft = sft

    return evaluate


def over_whole_sets(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Evaluates as many global batches as a set has; Megatron-LM counts them for several sets."""

    @functools.wraps(theirs)
    def evaluate_and_print_results(
        prefix: str, forward_step: Any, iterators: Any, *more: Any, **named: Any
    ) -> Any:
        from megatron.training import get_args

        args = get_args()
        if args.full_validation and not args.multiple_validation_sets:
            first = iterators[0] if isinstance(iterators, list) else iterators
            # Taken by its first entry, though it is a number where there is one set.
            args.eval_iters = [len(first.iterable)]
        return theirs(prefix, forward_step, iterators, *more, **named)

    return evaluate_and_print_results


def unless_endless(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Returns an iterator of ours as it is, since it is endless and knows its ticks."""

    @functools.wraps(theirs)
    def cyclic_iter(iterable: Any) -> Any:
        return iterable if isinstance(iterable, WholeSet) else theirs(iterable)

    return cyclic_iter


def own_schedule(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Returns the job's schedule where it has one for the arguments, else Megatron's.

    Made once, since the loop asks in every iteration, and a timeline records several.
    """

    @functools.cache
    def own() -> Callable[..., Any] | None:
        from megatron.training import get_args

        return run.job.forward_backward_func(get_args())

    @functools.wraps(theirs)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        return own() or theirs(*args, **kwargs)

    return get_forward_backward_func


def tokens_per_second(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Adds the speed of a step to the figures that the loop logs."""

    @functools.wraps(theirs)
    def train_step(*args: Any, **kwargs: Any) -> Any:
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

    return train_step

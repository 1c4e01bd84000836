"""Replacements in Megatron-LM's own loop: command line, start, data, schedule.

Those of its evaluation, log and checkpoints are in `evaluation`, `step_log` and
`megatron_checkpoints`. Each function takes what it replaces, which the loop looks up by name, and
the run; it returns the replacement, which calls the original. `megatron_patches.hooks` has the
table.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_patches import cpu
from megatron_patches.batches.resuming import go_on_from
from megatron_patches.flags.batch_sizes import BatchSizes
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.distca import APPLY_WITHOUT_DISTCA, given_in_vain
from megatron_patches.flags.memory import machine_memory
from megatron_patches.loop.data import build_data
from megatron_patches.loop.finite import check_weights
from megatron_patches.loop.from_hugging_face import set_first_weights, with_model_flags
from megatron_patches.loop.launcher import kill_leftovers
from megatron_patches.loop.messages import (
    exit_with_message,
    leave_out_repetitions,
    show_our_messages,
)
from megatron_patches.loop.run import (
    LoopRun,
    arguments_with_vocabulary,
    asks_for_distca,
    checked,
    refuse_in_a_line,
)
from megatron_patches.mcore_fixes import escape_percent_signs
from megatron_patches.model.latent_attention import softmax_scale
from megatron_patches.pipeline.data_iterators import (
    DataIterators,
    FullValidationIterator,
    unwrap,
)
from megatron_patches.pipeline.processes import Processes, join
from megatron_patches.pipeline.tick_pipeline import forward_backward_func

logger = logging.getLogger(__name__)


def add_flags(theirs: Callable[..., ArgumentParser], run: LoopRun) -> Callable[..., ArgumentParser]:
    """Adds our flags to Megatron-LM's parser, and calls us when it has parsed."""

    @functools.wraps(theirs)
    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = run.add_arguments(theirs(parser))
        escape_percent_signs(parser)
        parse, parse_known, refuse = parser.parse_args, parser.parse_known_args, parser.error

        def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
            argv = sys.argv[1:] if args is None else args
            try:
                argv = with_model_flags(parser, argv)
            except ValueError as problem:
                refuse_in_a_line(parser, run.environment, str(problem))
            arguments, others = parse_known(argv, namespace)
            run.parsed(arguments, False)
            return arguments, others

        def parse_args(*given: Any, **named: Any) -> Any:
            arguments = parse(*given, **named)
            run.parsed(arguments, True)
            return arguments

        def error(message: str) -> NoReturn:
            if asks_for_distca():
                # Megatron-LM's follows the usage, hundreds of lines, on every rank.
                refuse_in_a_line(parser, run.environment, message)
            refuse(message)

        parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
        parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
        parser.error = error  # type: ignore[method-assign]
        return parser

    return add_megatron_arguments


def check_arguments(theirs: Callable[..., Any], run: LoopRun) -> Callable[..., Any]:
    """Checks Megatron-LM's arguments and ours; a wrong one ends all ranks with one line."""

    @functools.wraps(theirs)
    def validate_args(args: Namespace, *more: Any, **named: Any) -> Any:
        show_our_messages(args.rank, run.environment)
        leave_out_repetitions(args.rank)
        cpu.log_what_replaces_gpus()
        _warn_of_flags_without_effect(args)
        # torchrun tells it, and starts a process for each GPU.
        per_node = int(run.environment.get("LOCAL_WORLD_SIZE", 1))
        try:
            run.config = DistcaConfig.from_args(args, per_node)
            memory = machine_memory(run.environment, run.config.dedicated)
            answer = checked(theirs, run.config, args, *more, memory=memory, **named)
            from megatron_patches.loop.preflight import check_boards, check_tracker

            # Megatron-LM opens them before the process group exists.
            check_boards(args)
            check_tracker(args)
            # In which no rank may be as late as this takes.
            set_first_weights(args, run.environment)
        except ValueError as error:
            exit_with_message(str(error), args.rank)
        if args.async_save:
            kill_leftovers()
        return answer

    return validate_args


def _warn_of_flags_without_effect(args: Namespace) -> None:
    """Warns of our flags that do nothing because `--distca` is not given.

    They are no error: a comparison with plain Megatron is the same command without `--distca`.
    """
    if args.rank == 0 and not args.distca:
        names = [name for name in given_in_vain(args) if name not in APPLY_WITHOUT_DISTCA]
        if names:
            logger.warning("no effect without --distca: %s", ", ".join(names))


def beside_servers(theirs: Callable[..., Any], run: LoopRun) -> Callable[..., Any]:
    """Makes the default group of the processes with a model, where others only serve.

    Those serve here until the job ends, and leave without a model.
    """

    @functools.wraps(theirs)
    def initialize_distributed(*given: Any, **named: Any) -> Any:
        from megatron.training import get_args

        args = get_args()
        if run.config.dedicated:
            run.processes = join(run.config.dedicated, args, run.environment)
            if run.processes.serves_only:
                run.start_watch()
                _serve(run, args, run.processes)
        answer = theirs(*given, **named)
        atexit.register(end_process_groups)
        run.start_watch()
        return answer

    return initialize_distributed


def end_process_groups() -> None:
    """Ends all process groups while the interpreter still runs.

    A thread of gloo that frees a tensor while the interpreter ends aborts the process, and torchrun
    calls a finished job failed. Megatron-LM leaves its groups to the interpreter.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(run: LoopRun, args: Namespace, processes: Processes) -> NoReturn:
    """Serves until the job ends, and ends this process."""
    from megatron.training import training

    from megatron_patches.pipeline.attention_server import serve

    training.update_train_iters(args)
    complete = arguments_with_vocabulary()
    train, valid, test = training.get_train_valid_test_num_samples()
    if args.exit_signal_handler:
        # Ranks with a model end at the end of an iteration, and dismiss this process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def build() -> DataIterators:
        data = build_data(run.config, complete, train, valid, test, processes)
        # Where a checkpoint continues, which the first rank has announced.
        run.progress.iteration = complete.iteration
        return data

    skipped = frozenset(args.iterations_to_skip)
    serve(build, args.params_dtype, softmax_scale(args), run.progress, skipped)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


def after_preflight(theirs: Callable[..., Any], run: LoopRun) -> Callable[..., Any]:
    """Tries all that flags name before model and optimizer are built.

    Holds the lock of `--save` until the process ends.
    """
    held = contextlib.ExitStack()

    @functools.wraps(theirs)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_patches.loop.preflight import preflight

        run.progress.enter("the checks of files and flags")
        run.save_lock = held.enter_context(
            preflight(run.config, arguments_with_vocabulary(), run.environment)
        )
        run.progress.enter("the building of the model")
        model, *others = theirs(*args, **kwargs)
        run.progress.enter("the opening of the data")
        check_weights(model, "before the first step", "load another checkpoint", code=2)
        arguments = get_args()
        if arguments.train_samples and arguments.iteration:
            # Megatron-LM counts iterations as if all had the batch size of this run.
            left = BatchSizes.from_args(arguments).iterations(
                arguments.train_samples, arguments.consumed_train_samples
            )
            arguments.train_iters = arguments.iteration + left
        return model, *others

    return setup_model_and_optimizer


def go_on_in_data(theirs: Callable[..., None], run: LoopRun) -> Callable[..., None]:
    """Goes on in the data where the run of a checkpoint ended."""

    @functools.wraps(theirs)
    def check_checkpoint_args(saved: Namespace, *more: Any, **named: Any) -> None:
        from megatron.training import get_args

        theirs(saved, *more, **named)
        run.config = go_on_from(vars(saved), run.config, get_args())

    return check_checkpoint_args


def skip_global_batch(theirs: Callable[..., None], run: LoopRun) -> Callable[..., None]:
    """Leaves out a global batch of our data, which have no tensors by name."""

    @functools.wraps(theirs)
    def dummy_train_step(data_iterator: Any) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        if run.config.enabled:
            # The first one has the ticks of all model chunks.
            unwrap(iterators[0]).skip_global_batch()
            return
        for iterator in iterators:
            for _ in range(get_num_microbatches()):
                next(iterator)

    return dummy_train_step


def unless_endless(theirs: Callable[..., Any], run: LoopRun) -> Callable[..., Any]:
    """Returns an iterator of ours as it is, since it is endless and knows its ticks."""

    @functools.wraps(theirs)
    def cyclic_iter(iterable: Any) -> Any:
        return iterable if isinstance(iterable, FullValidationIterator) else theirs(iterable)

    return cyclic_iter


def own_schedule(theirs: Callable[..., Any], run: LoopRun) -> Callable[..., Any]:
    """Returns our schedule with `--distca`, else Megatron's.

    Made once, since the loop asks in every iteration, and a timeline records several.
    """

    @functools.cache
    def own() -> Callable[..., Any] | None:
        return forward_backward_func(run.config, run.progress)

    @functools.wraps(theirs)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        return own() or of_packed_samples(theirs(*args, **kwargs))

    return get_forward_backward_func


def of_packed_samples(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Tells Megatron's schedule that a micro-batch's samples lie one after the other.

    Pipeline stages send each other tensors of the shape that it is given.
    """

    @functools.wraps(forward_backward)
    def of_packed(*, seq_length: int, micro_batch_size: int, **named: Any) -> Any:
        tokens = seq_length * micro_batch_size
        return forward_backward(seq_length=tokens, micro_batch_size=1, **named)

    return of_packed

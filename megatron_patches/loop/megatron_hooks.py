"""What is replaced in Megatron-LM's own loop, which looks these functions up by name.

Each function takes what it replaces, and the run, and returns the replacement, which calls the
original. `megatron_patches.hooks` has the table.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_patches import cpu
from megatron_patches.batches.resuming import go_on_from
from megatron_patches.flags.batch_sizes import EVAL_INTERVAL, BatchSizes, check_batch
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.memory import check_memory, machine_memory
from megatron_patches.flags.required import check_required
from megatron_patches.flags.unknown import explained
from megatron_patches.flags.validation import validate
from megatron_patches.loop.data import build_data
from megatron_patches.loop.evaluation import Evaluation
from megatron_patches.loop.finite import check_weights
from megatron_patches.loop.late_ranks import RankWatch, watch_ranks
from megatron_patches.loop.launcher import kill_leftovers
from megatron_patches.loop.messages import exit_with_message, message_handlers, message_level
from megatron_patches.loop.step_log import StepLog
from megatron_patches.mcore_fixes import escape_percent_signs
from megatron_patches.model.latent_attention import softmax_scale
from megatron_patches.pipeline.data_iterators import DataIterators, FullValidationIterator
from megatron_patches.pipeline.processes import Processes, join
from megatron_patches.pipeline.progress import Progress
from megatron_patches.pipeline.tick_pipeline import forward_backward_func


@dataclass
class Run:
    """A run of Megatron-LM's loop.

    Attributes:
        environment: variables of this process, which are the launcher's interface.
        add_arguments: function that adds flags to Megatron-LM's parser.
        parsed: function `(args, whole)` that is called when the command line is parsed; `whole` is
            False where flags that are not known were left out, as fault tolerance does before.
        processes: processes of a job with dedicated servers, once they have met; else None.
        evaluation: progress of evaluations.
        progress: how far this rank is.
        log: figures of the steps since the last log line.
        watch: watch over all ranks, once they have met; None: there is none.
    """

    environment: Mapping[str, str]
    add_arguments: Callable[[ArgumentParser], ArgumentParser]
    parsed: Callable[[Namespace, bool], None]
    processes: Processes | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    progress: Progress = field(default_factory=Progress)
    log: StepLog = field(default_factory=StepLog)
    watch: RankWatch | None = None
    _config: DistcaConfig | None = None

    @property
    def config(self) -> DistcaConfig:
        """What our flags say, from the check of the command line on."""
        assert self._config is not None, "the command line is not checked yet"
        return self._config

    @config.setter
    def config(self, config: DistcaConfig) -> None:
        self._config = config

    def start_watch(self) -> None:
        """Watches how far all ranks are, which have met."""
        from megatron.training import get_args

        dedicated = self.config.dedicated
        self.watch = watch_ranks(get_args(), dedicated, self.progress, self.environment)

    def end_if_late(self) -> None:
        """Ends this process by a line if other ranks are late or gone."""
        if self.watch is not None:
            self.watch.end_if_late()

    def stop_watch(self) -> None:
        """Ends the watch over ranks, of which some may leave before others."""
        if self.watch is not None:
            self.watch.close()


def asks_for_distca(argv: Sequence[str] | None = None) -> bool:
    """Returns whether a command line has `--distca`. Megatron-LM's parser takes no abbreviations,
    either.

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
        escape_percent_signs(parser)
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
                refuse_in_a_line(parser, run.environment, message)
            refuse(message)

        parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
        parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
        parser.error = error  # type: ignore[method-assign]
        return parser

    return add_megatron_arguments


def refuse_in_a_line(
    parser: ArgumentParser, environment: Mapping[str, str], message: str
) -> NoReturn:
    """Ends the process for a command line that cannot be parsed; the first rank says why."""
    rank = int(environment.get("RANK", 0))
    _show_our_messages(rank, environment)
    exit_with_message(explained(message, list(parser._option_string_actions)), rank)


def refuse_a_file_of_flags(file: str | None, environment: Mapping[str, str]) -> None:
    """Ends the process where `--yaml-cfg` gives the flags, which Megatron-LM would read next."""
    if file is not None:
        rank = int(environment.get("RANK", 0))
        _show_our_messages(rank, environment)
        exit_with_message(
            f"DistCA does not cover --yaml-cfg {file}: give its flags on the command line",
            rank,
        )


def check_arguments(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Checks Megatron-LM's arguments and ours; a wrong one ends all ranks with one line."""

    @functools.wraps(theirs)
    def validate_args(args: Namespace, *more: Any, **named: Any) -> Any:
        _show_our_messages(args.rank, run.environment)
        cpu.log_what_replaces_gpus()
        # torchrun tells it, and starts a process for each GPU.
        per_node = int(run.environment.get("LOCAL_WORLD_SIZE", 1))
        try:
            run.config = DistcaConfig.from_args(args, per_node)
            memory = machine_memory(run.environment, run.config.dedicated)
            answer = checked(theirs, run.config, args, *more, memory=memory, **named)
            from megatron_patches.loop.preflight import check_boards

            # Megatron-LM opens them before the process group exists.
            check_boards(args)
        except ValueError as error:
            exit_with_message(str(error), args.rank)
        if args.async_save:
            kill_leftovers()
        return answer

    return validate_args


def checked(
    theirs: Callable[..., Any],
    config: DistcaConfig,
    args: Namespace,
    *more: Any,
    memory: int | None = None,
    **named: Any,
) -> Any:
    """Checks parsed arguments, and derives what follows from them.

    Args:
        theirs: Megatron-LM's `validate_args`.
        config: our flags.
        args: arguments, with the rank and the number of all processes.
        memory: bytes that a rank has; None: the run would be on another machine.
        more, named: further arguments of Megatron-LM's function.

    Returns:
        What it returned.

    Raises:
        ValueError: some flags do not go together; the message says what to do.
    """
    cpu.set_megatron_arguments(args)
    check_required(args)
    if args.world_size <= config.dedicated:
        raise ValueError(
            f"--distca-servers dedicated:{config.dedicated} leaves none of {args.world_size} "
            "processes for the model: start more"
        )
    # Megatron-LM knows processes with a model.
    args.world_size -= config.dedicated
    check_batch(args)
    if args.save and args.save_interval is None:
        # Megatron-LM asks for it; a run then saves at its end alone.
        args.save_interval = args.train_iters or args.train_samples
    try:
        answer = theirs(args, *more, **named)
    except AssertionError as error:
        # Its checks are assertions, many of which say no more than their condition.
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split()) or place.line
        raise ValueError(f"Megatron-LM refuses the flags: {said}") from error
    except (ArithmeticError, LookupError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"Megatron-LM cannot check the flags: {error!r} in `{place.line}`"
        ) from error
    # From 0.17 on Megatron-LM divides by this without a default.
    if args.eval_interval is None:
        args.eval_interval = EVAL_INTERVAL
    if args.multiple_validation_sets and args.virtual_pipeline_model_parallel_size:
        raise ValueError(
            "--multiple-validation-sets goes without virtual pipeline stages in Megatron-LM's "
            "loop: remove one"
        )
    if memory is not None:
        # Checks make lists of all layers.
        check_memory(args, memory)
    validate(config, args)
    return answer


def beside_servers(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
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
        run.start_watch()
        return answer

    return initialize_distributed


def arguments_with_vocabulary() -> Namespace:
    """Returns Megatron-LM's arguments with the tokenizer's `vocab_size`.

    In the loop that is a flag, which may be missing or lack the end token.
    """
    from megatron.training import get_args, get_tokenizer

    return Namespace(**vars(get_args()) | {"vocab_size": get_tokenizer().vocab_size})


def _serve(run: Run, args: Namespace, processes: Processes) -> NoReturn:
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
        # Where a checkpoint goes on, which the first rank has told.
        run.progress.iteration = complete.iteration
        return data

    serve(build, args.params_dtype, softmax_scale(args), run.progress)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


def after_preflight(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Tries all that flags name before model and optimizer are built.

    Holds the lock of `--save` until the process ends.
    """
    held = contextlib.ExitStack()

    @functools.wraps(theirs)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_patches.loop.preflight import preflight

        run.progress.enter("the checks of files and flags")
        held.enter_context(preflight(run.config, arguments_with_vocabulary(), run.environment))
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


def _show_our_messages(rank: int, environment: Mapping[str, str]) -> None:
    """Shows what DistCA logs, and leaves Megatron-LM's logging as it is."""
    for package in ("distca", "megatron_patches"):
        ours = logging.getLogger(package)
        if not ours.handlers:
            ours.handlers = message_handlers(rank, environment)
            ours.setLevel(message_level(rank))
            ours.propagate = False


def go_on_in_data(theirs: Callable[..., None], run: Run) -> Callable[..., None]:
    """Goes on in the data where the run of a checkpoint ended."""

    @functools.wraps(theirs)
    def check_checkpoint_args(saved: Namespace, *more: Any, **named: Any) -> None:
        from megatron.training import get_args

        theirs(saved, *more, **named)
        run.config = go_on_from(vars(saved), run.config, get_args())

    return check_checkpoint_args


def unless_endless(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """Returns an iterator of ours as it is, since it is endless and knows its ticks."""

    @functools.wraps(theirs)
    def cyclic_iter(iterable: Any) -> Any:
        return iterable if isinstance(iterable, FullValidationIterator) else theirs(iterable)

    return cyclic_iter


def own_schedule(theirs: Callable[..., Any], run: Run) -> Callable[..., Any]:
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

    Pipeline stages send each other tensors of the shape that it is told.
    """

    @functools.wraps(forward_backward)
    def of_packed(*, seq_length: int, micro_batch_size: int, **named: Any) -> Any:
        tokens = seq_length * micro_batch_size
        return forward_backward(seq_length=tokens, micro_batch_size=1, **named)

    return of_packed

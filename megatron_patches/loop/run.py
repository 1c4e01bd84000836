"""A run of Megatron-LM's loop: its state, and how its command line is checked or refused."""

from __future__ import annotations

import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_patches import cpu
from megatron_patches.flags.batch_sizes import EVAL_INTERVAL, check_batch
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.memory import check_memory
from megatron_patches.flags.refused import LAYERS_OF_SEVERAL_KINDS, refuse
from megatron_patches.flags.required import check_required
from megatron_patches.flags.unknown import explained
from megatron_patches.flags.validation import validate
from megatron_patches.loop.evaluation import Evaluation
from megatron_patches.loop.late_ranks import RankWatch, watch_ranks
from megatron_patches.loop.messages import exit_with_message, show_our_messages
from megatron_patches.loop.save_lock import SaveLock
from megatron_patches.loop.step_log import StepLog
from megatron_patches.model.features import check_features
from megatron_patches.pipeline.processes import Processes
from megatron_patches.pipeline.progress import Progress


@dataclass
class LoopRun:
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
        watch: watch over all ranks, once they have met, or None.
        save_lock: lock of `--save`, on the first rank, or None.
    """

    environment: Mapping[str, str]
    add_arguments: Callable[[ArgumentParser], ArgumentParser]
    parsed: Callable[[Namespace, bool], None]
    processes: Processes | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    progress: Progress = field(default_factory=Progress)
    log: StepLog = field(default_factory=StepLog)
    watch: RankWatch | None = None
    save_lock: SaveLock | None = None
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
        """Ends the watch over ranks; some may leave before others."""
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


def refuse_in_a_line(
    parser: ArgumentParser, environment: Mapping[str, str], message: str
) -> NoReturn:
    """Ends the process for a command line that cannot be parsed; the first rank says why."""
    rank = int(environment.get("RANK", 0))
    show_our_messages(rank, environment)
    exit_with_message(explained(message, list(parser._option_string_actions)), rank)


def refuse_a_file_of_flags(file: str | None, environment: Mapping[str, str]) -> None:
    """Ends the process where `--yaml-cfg` gives the flags, which Megatron-LM would read next."""
    if file is not None:
        rank = int(environment.get("RANK", 0))
        show_our_messages(rank, environment)
        exit_with_message(refusal_of_a_file(file), rank)


def refusal_of_a_file(file: str) -> str:
    """Returns what is said of `--yaml-cfg`."""
    return f"DistCA does not cover --yaml-cfg {file}: give its flags on the command line"


def refuse_in_vain(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ends the process where flags of ours are given to Megatron-LM's script without `--distca`."""
    if names:
        rank = int(environment.get("RANK", 0))
        show_our_messages(rank, environment)
        means, them = ("means", "it") if len(names) == 1 else ("mean", "them")
        exit_with_message(
            f"{', '.join(names)} {means} nothing in this script without --distca: add --distca, "
            f"or remove {them}",
            rank,
        )


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
    refuse((LAYERS_OF_SEVERAL_KINDS,), args)
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
    except (AssertionError, RuntimeError) as error:
        # Most of its checks are assertions, many of which say no more than their condition.
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split()) or f"it needs `{_condition(place.line or '')}`"
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
            "--multiple-validation-sets does not work with virtual pipeline stages in "
            "Megatron-LM's loop: remove one"
        )
    if memory is not None:
        # Checks make lists of all layers.
        check_memory(args, memory)
    validate(config, args)
    check_features(args)
    return answer


def arguments_with_vocabulary() -> Namespace:
    """Returns Megatron-LM's arguments with the tokenizer's `vocab_size`.

    In the loop that is a flag, which may be missing or lack the end token.
    """
    from megatron.training import get_args, get_tokenizer

    return Namespace(**vars(get_args()) | {"vocab_size": get_tokenizer().vocab_size})


def _condition(line: str) -> str:
    """Returns what a line asserts, which may go on in the next line."""
    return line.removeprefix("assert ").rstrip(" ,\\(")

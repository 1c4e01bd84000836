"""Evaluation in Megatron-LM's own loop: it saves first, tells its progress, and obeys signals."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.rerun_state_machine import EXIT_CODE_FAILED_ON_RESULT_VALIDATION

from megatron_patches.flags.batch_sizes import BatchSizes
from megatron_patches.loop.finite import check_evaluation, check_weights
from megatron_patches.pipeline.progress import Progress

logger = logging.getLogger(__name__)

_SILENCE = 5.0
"""Seconds after which the next batch of an evaluation logs the progress."""
_AT_ONCE = 1e-9
"""Minutes after which Megatron-LM ends an evaluation between two batches."""


@dataclass
class Evaluation:
    """Progress of evaluations, and what saving before one needs.

    Attributes:
        training: arguments of Megatron-LM's `train` by name, while it trains; else None.
        consumed: training samples consumed before it trained.
        saved: iteration that was saved before its evaluation, or None.
        latest: iteration that was saved last; None: this run saved none.
        tests: whether the test set is evaluated now.
        place: iteration and data of the evaluation that runs, as Megatron-LM names them.
        batches: batches of the evaluation that runs.
        done: batches of it that are done.
        logged: time at which the progress was logged.
    """

    training: Mapping[str, Any] | None = None
    consumed: int = 0
    saved: int | None = None
    latest: int | None = None
    tests: bool = False
    place: str = ""
    batches: int = 0
    done: int = 0
    logged: float = 0.0

    def begin(self, batches: int) -> None:
        """Begins an evaluation of a number of batches."""
        self.batches, self.done, self.logged = batches, 0, time.monotonic()

    def batch_done(self) -> None:
        """Counts a batch, and logs the progress where nothing was logged for a while."""
        self.done += 1
        if time.monotonic() - self.logged > _SILENCE:
            self.logged = time.monotonic()
            logger.info("evaluated %d of %d batches", self.done, self.batches)


class Evaluating(Protocol):
    """A run that evaluates."""

    evaluation: Evaluation
    progress: Progress


def during_training(theirs: Callable[..., Any], run: Evaluating) -> Callable[..., Any]:
    """Trains as Megatron-LM does, and notes what saving before an evaluation needs.

    The weights that the last step leaves are checked, since nothing may save or use them.
    """

    @functools.wraps(theirs)
    def train(*given: Any, **named: Any) -> Any:
        from megatron.training import get_args

        state = run.evaluation
        state.training = inspect.signature(theirs).bind(*given, **named).arguments
        state.consumed = get_args().consumed_train_samples
        model = state.training["model"]
        try:
            answer = theirs(*given, **named)
        except SystemExit as end:
            # The loop ends so at an interval, after a duration or at a signal.
            if not end.code:
                _check_last_weights(model)
            raise
        finally:
            state.training = None
        _check_last_weights(model)
        return answer

    return train


def _check_last_weights(model: Any) -> None:
    check_weights(
        model,
        "after the last iteration",
        "nothing was saved since the last checkpoint",
        EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    )


def save_once(theirs: Callable[..., None], run: Evaluating) -> Callable[..., None]:
    """Saves unless the iteration was saved before its evaluation."""

    @functools.wraps(theirs)
    def save_checkpoint_and_time(
        iteration: int, *given: Any, non_persistent_ckpt: bool = False, **named: Any
    ) -> None:
        if non_persistent_ckpt or iteration != run.evaluation.saved:
            theirs(iteration, *given, non_persistent_ckpt=non_persistent_ckpt, **named)
            run.evaluation.latest = iteration

    return save_checkpoint_and_time


def save_then_evaluate(theirs: Callable[..., Any], run: Evaluating) -> Callable[..., Any]:
    """Saves what Megatron-LM would save after an evaluation, and evaluates unless a signal came.

    Of a whole set as many global batches are evaluated as it has; Megatron-LM counts them for
    several sets.
    """

    @functools.wraps(theirs)
    def evaluate_and_print_results(
        prefix: str,
        forward_step: Any,
        iterators: Any,
        model: Any,
        iteration: int,
        *more: Any,
        **named: Any,
    ) -> Any:
        from megatron.training import get_args

        args = get_args()
        if args.full_validation and not args.multiple_validation_sets:
            first = iterators[0] if isinstance(iterators, list) else iterators
            # Taken by its first entry, though it is a number where there is one set.
            args.eval_iters = [len(first.iterable)]
        before = args.consumed_valid_samples
        after = before
        if not args.full_validation:
            after += args.eval_iters * BatchSizes.from_args(args).evaluated
        if run.evaluation.training is not None and _saves_at(args, iteration):
            # A run that goes on from there reads what comes after this evaluation's batches.
            args.consumed_valid_samples = after
            _save(run.evaluation, args, iteration)
            args.consumed_valid_samples = before
        run.evaluation.place = prefix
        if not _has_signal(args):
            run.evaluation.tests = "test set" in prefix
            try:
                theirs(prefix, forward_step, iterators, model, iteration, *more, **named)
            finally:
                run.evaluation.tests = False
        args.consumed_valid_samples = after

    return evaluate_and_print_results


def naming_tests(theirs: Callable[[], Any], run: Evaluating) -> Callable[[], Any]:
    """Returns a writer that logs a test where Megatron-LM logs a validation, during a test.

    It gives both losses one name, where the test's would end the curve.
    """

    @functools.wraps(theirs)
    def get_writer() -> Any:
        writer = theirs()
        return writer if writer is None or not run.evaluation.tests else _TestWriter(writer)

    return get_writer


class _TestWriter:
    """Passes figures on to a board's writer, under names that say test where Megatron-LM says
    validation.

    Args:
        writer: writer to pass them to.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add_scalar(self, name: str, *values: Any, **named: Any) -> None:
        """Adds a figure to TensorBoard."""
        self._writer.add_scalar(name.replace("validation", "test"), *values, **named)

    def log(self, figures: Mapping[str, Any], *more: Any, **named: Any) -> None:
        """Adds figures to Weights & Biases."""
        renamed = {name.replace("validation", "test"): each for name, each in figures.items()}
        self._writer.log(renamed, *more, **named)


def mean_over_tokens(theirs: Callable[..., Any], run: Evaluating) -> Callable[..., Any]:
    """Evaluates with a mean over all tokens that count, as without `--sft`.

    With it Megatron-LM averages micro-batches and ranks; some may have no such token.
    A loss that is not finite ends the run: Megatron-LM would log a perplexity of exp(20).
    """
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def evaluate(*given: Any, **named: Any) -> Any:
        from megatron.training import get_args

        args = get_args()
        run.evaluation.begin(named.get("eval_iters") or args.eval_iters)
        run.progress.enter("evaluation")
        sft, args.sft = args.sft, False
        try:
            losses, *others = theirs(*given, **named)
        finally:
            args.sft = sft
        # There are none where a signal ended it.
        if losses is not None and args.check_for_nan_in_loss_and_grad:
            model = signature.bind(*given, **named).arguments["model"]
            _check_losses(losses, model, run.evaluation)
        return losses, *others

    return evaluate


def _check_losses(losses: Mapping[str, torch.Tensor], model: Any, state: Evaluation) -> None:
    from megatron.training.async_utils import maybe_finalize_async_save

    latest = "nothing" if state.latest is None else f"iteration {state.latest} last"
    check_evaluation(
        losses,
        model,
        f"evaluation at {state.place}",
        f"the run ends here, and has saved {latest}",
        functools.partial(maybe_finalize_async_save, blocking=True, terminate=True),
    )


def between_batches(theirs: Callable[[], None], run: Evaluating) -> Callable[[], None]:
    """Tells the progress of an evaluation, and ends it where a signal asks the run to end."""

    @functools.wraps(theirs)
    def on_eval_step_end() -> None:
        from megatron.training import get_args

        theirs()
        run.evaluation.batch_done()
        run.progress.enter(f"evaluation after {run.evaluation.done} batches")
        if _has_signal(get_args()):
            # The loop then saves and exits, as after a step.
            get_args().exit_duration_in_mins = _AT_ONCE

    return on_eval_step_end


def _saves_at(args: Namespace, iteration: int) -> bool:
    """Returns whether Megatron-LM saves at the end of an iteration, after its evaluation."""
    if not args.save:
        return False
    intervals = (args.save_interval, args.exit_interval)
    return iteration == args.train_iters or any(
        interval and iteration % interval == 0 for interval in intervals
    )


def _save(state: Evaluation, args: Namespace, iteration: int) -> None:
    from megatron.training import get_timers, training

    given = state.training
    assert given is not None
    consumed = args.consumed_train_samples - state.consumed
    operations = args.num_floating_point_operations_so_far
    operations += training.num_floating_point_operations(args, consumed)
    # It is stopped before an evaluation, and saving stops it, too.
    get_timers()("interval-time", log_level=0).start()
    training.save_checkpoint_and_time(
        iteration,
        given["model"],
        given["optimizer"],
        given["opt_param_scheduler"],
        operations,
        given["checkpointing_context"],
        train_data_iterator=given["train_data_iterator"],
    )
    get_timers()("interval-time").stop()
    state.saved = iteration


def _has_signal(args: Namespace) -> bool:
    """Returns whether a rank got the signal that asks the run to end; collective where it is
    handled."""
    if not args.exit_signal_handler:
        return False
    from megatron.training.global_vars import get_signal_handler

    return any(get_signal_handler().signals_received())

"""What a training loop runs: the seam between DistCA and the loops that can drive it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.dedicated import Control


@dataclass(frozen=True)
class DataIterators:
    """The micro-batches of each split, or None for a split that is not needed.

    Attributes:
        train: of the training split.
        valid: of the validation split.
        test: of the test split.
        control: of the dedicated servers; None: there are none.
        end: gives back what the splits share, when no micro-batch will follow.
    """

    train: Iterator[Any] | None
    valid: Iterator[Any] | None
    test: Iterator[Any] | None
    control: Control | None = None
    end: Callable[[], None] | None = None

    def close(self) -> None:
        """Ends it all, and dismisses dedicated servers."""
        if self.control is not None:
            self.control.dismiss()
        self.finish()

    def finish(self) -> None:
        """Ends the iterators' threads, and what they share."""
        for iterator in (self.train, self.valid, self.test):
            if iterator is not None:
                iterator.close()  # type: ignore[attr-defined]
        if self.end is not None:
            self.end()


@dataclass(frozen=True)
class Job:
    """The parts of a pretraining run that a loop calls; `args` are Megatron-LM's arguments.

    Attributes:
        add_arguments: `(parser) -> parser`, adds our flags to Megatron's.
        validate_arguments: `(args)`, raises ValueError before any work starts.
        build_model: `(args, config, pre_process, post_process, vp_stage, pg_collection)`, one stage
            of the model.
        build_data: `(args, train_samples, valid_samples, test_samples) -> DataIterators`, resumed
            from the consumed samples in `args`.
        forward_step: `(data_iterator, model) -> (output, loss_function)`, Megatron's
            `forward_step_func`; the loss is a sum over tokens, and every `[sum, count]` pair of the
            report becomes a field of the log line.
        forward_backward_func: `(args)`, what runs the micro-batches of a global batch in the place
            of megatron-core's `get_forward_backward_func()`; None: that.
    """

    add_arguments: Callable[[ArgumentParser], ArgumentParser]
    validate_arguments: Callable[[Namespace], None]
    build_model: Callable[..., Any]
    build_data: Callable[..., DataIterators]
    forward_step: Callable[..., tuple[Any, Any]]
    forward_backward_func: Callable[[Namespace], Callable[..., Any] | None]

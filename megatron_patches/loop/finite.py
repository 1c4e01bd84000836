"""Ends a run whose loss, gradients or weights are not finite, and says so in one line.

Megatron-LM checks the gradients of each rank before it reduces them
(`megatron.core.rerun_state_machine`). It runs a step that fails again on the same data. If that
fails the same way, it saves the state before the step and ends with exit code 16; if not, it ends
with 17. Ours are the line that says what was not finite on which rank, the check of the first step,
the checks of weights (those that a run starts with, saves and ends with), of buffers that a step
updates, and of the loss of an evaluation.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    get_rerun_state_machine,
)

logger = logging.getLogger(__name__)

_REJECTED = "Unexpected result"
"""Start of Megatron-LM's message where `--rerun-mode disabled` makes it raise an error."""
_WEIGHT, _LOSS, _GRADIENT = range(3)
"""What was not finite, the likeliest cause first."""
_NORM = (_GRADIENT, "the norm of the gradients is not finite")
_NOT_FINITE_LOSS = (_LOSS, "the loss is not finite")


def names_of_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Returns the names of tensors with NaN or infinity. Waits for the device, once."""
    checked = [(name, each) for name, each in tensors if each.numel() and each.is_floating_point()]
    if not checked:
        return []
    extremes = torch.stack(
        [torch.stack(torch.aminmax(each.detach())).float() for _, each in checked]
    )
    finite = torch.isfinite(extremes).all(dim=1).tolist()
    return [name for (name, _), is_finite in zip(checked, finite, strict=True) if not is_finite]


def check_weights(model: Sequence[torch.nn.Module], when: str, remedy: str, code: int) -> None:
    """Ends all ranks where one has a weight or persistent buffer that is not finite. Collective.

    Args:
        model: model chunks of this rank.
        when: start of the line.
        remedy: end of the line.
        code: exit code.

    Raises:
        SystemExit: a weight is not finite. The first rank has logged which.
    """
    if _report(when, _bad_weight(_weights(model)), remedy):
        sys.exit(code)


def check_evaluation(
    losses: Mapping[str, torch.Tensor],
    model: Sequence[torch.nn.Module],
    when: str,
    remedy: str,
    before_ending: Callable[[], None],
) -> None:
    """Ends all ranks where one has a loss of an evaluation that is not finite. Collective.

    Args:
        losses: means by name, scalars; empty on ranks that have no loss.
        model: model chunks of this rank.
        when: start of the line.
        remedy: end of the line.
        before_ending: function that all ranks call before the line is logged.

    Raises:
        SystemExit: a loss is not finite. The first rank has logged which weight is not, or else
            that the loss is not.
    """
    is_bad = bool(names_of_not_finite(losses.items()))
    if not _any_rank(is_bad):
        return
    before_ending()
    _report(when, _bad_weight(_weights(model)) or (_NOT_FINITE_LOSS if is_bad else None), remedy)
    sys.exit(EXIT_CODE_FAILED_ON_RESULT_VALIDATION)


def ending_unless_finite(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron-LM's `train_step`: a step that is not finite is reported in one line."""
    signature = inspect.signature(train_step)

    @functools.wraps(train_step)
    def checked_step(*args: Any, **named: Any) -> Any:
        from megatron.training import get_args

        given, machine = get_args(), get_rerun_state_machine()
        when, reports = f"iteration {given.curr_iteration + 1}", []  # type: ignore[var-annotated]
        call = signature.bind(*args, **named)
        schedule = call.arguments["forward_backward_func"]
        call.arguments["forward_backward_func"] = _noting(schedule, reports)
        model = call.arguments["model"]
        # Megatron-LM does not check the first step of a process, after which it could not save.
        first, machine.first_iteration_complete = not machine.first_iteration_complete, True
        # It counts from 0, and adds one now. Megatron-LM starts it at the number of the first step,
        # and does not count those that it skips: its messages and its file of rejected results
        # would name other steps, and later runs skip those.
        machine.current_iteration = given.curr_iteration - 1
        try:
            figures, skipped, saves, ends, code, norm, *others = train_step(
                *call.args, **call.kwargs
            )
        except RuntimeError as error:
            if _REJECTED not in str(error):
                raise
            _, said = _finding(model, reports) or _NORM
            raise ValueError(f"{when}: {said} ({error})") from error
        if ends:
            cannot = first or given.save is None or bool(names_of_not_finite(_weights(model)))
            wanted, saves = saves, saves and not _any_rank(cannot)
            failed = machine.failed_validation_call is not None
            _report(
                when,
                _finding(model, reports) if failed else None,
                "the step was not made. The state before it is saved, to make the step again on "
                "other GPUs; --rerun-mode disabled goes on from there on the same ones"
                if saves
                else "the step was not made, and nothing was saved",
            )
            if wanted and not saves:
                code = EXIT_CODE_FAILED_ON_RESULT_VALIDATION
        elif given.check_for_nan_in_loss_and_grad and not skipped:
            found, norm_is_bad = None, not _is_finite(norm)
            if norm_is_bad:
                found = _finding(model, reports) or _NORM
            elif given.num_experts:
                # The biases of experts reach neither the loss nor the gradients.
                found = _bad_weight(_buffers(model))
            if (norm_is_bad or given.num_experts) and _report(
                when, found, "nothing was saved since the last checkpoint"
            ):
                sys.exit(EXIT_CODE_FAILED_ON_RESULT_VALIDATION)
        return figures, skipped, saves, ends, code, norm, *others

    return checked_step


def _any_rank(value: bool) -> bool:
    """Returns whether a value is true on any rank. Collective."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.tensor([float(value)], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def _report(when: str, found: tuple[int, str] | None, remedy: str) -> bool:
    """Logs on the first rank what is not finite on which ranks. Collective.

    Returns:
        Whether any rank found something.
    """
    if not _any_rank(found is not None):
        return False
    of_ranks: list[tuple[int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    findings = [(*each, rank) for rank, each in enumerate(of_ranks) if each is not None]
    _, text, rank = min(findings, key=lambda each: (each[0], each[2]))
    if dist.get_rank() == 0:
        others = f" (and on {len(findings) - 1} more)" if len(findings) > 1 else ""
        logger.critical("error: %s: %s on rank %d%s: %s", when, text, rank, others, remedy)
    # No rank leaves while another may still be reading what it sent.
    dist.barrier()
    return True


def _finding(model: Sequence[torch.nn.Module], reports: Sequence[Any]) -> tuple[int, str] | None:
    """Returns what is not finite on this rank; None: nothing is."""
    if weight := _bad_weight(_weights(model)):
        return weight
    losses = [(name, pair[0]) for each in reports for name, pair in each.items() if "loss" in name]
    if names_of_not_finite(losses):
        return _NOT_FINITE_LOSS
    if names := names_of_not_finite(_gradients(model)):
        return _GRADIENT, _described("gradient", names)
    return None


def _bad_weight(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, str] | None:
    names = names_of_not_finite(weights)
    return (_WEIGHT, _described("weight", names)) if names else None


def _described(what: str, names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
    return f"the {what} of {names[0]} is not finite{more}"


def _weights(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what checkpoints have of a model, by name: parameters and persistent buffers."""
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            # Types of 8 bits have no infinity, or are scaled by what is checked as a gradient.
            if parameter.dtype.itemsize > 1:
                yield _unwrapped(name), parameter
    yield from _buffers(model)


def _buffers(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields persistent buffers by name, as the biases of experts."""
    for chunk in model:
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                is_kept = name not in module._non_persistent_buffers_set
                if is_kept and buffer.dtype.itemsize > 1:
                    yield _unwrapped(f"{prefix}.{name}"), buffer


def _unwrapped(name: str) -> str:
    return name.removeprefix("module.").removeprefix("module.")


def _gradients(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in _weights(model):
        gradient = getattr(parameter, "main_grad", None)
        if gradient is not None:
            yield name, gradient


def _noting(schedule: Callable[..., Any], reports: list[Any]) -> Callable[..., Any]:
    """Wraps a schedule so that the reports of the loss function's last run are noted."""

    @functools.wraps(schedule)
    def noting(*args: Any, **named: Any) -> Any:
        reports[:] = found = schedule(*args, **named)
        return found

    return noting


def _is_finite(norm: Any) -> bool:
    return norm is None or math.isfinite(norm)

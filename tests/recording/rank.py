"""What one rank records of a run."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from recording.hooks import WORDS, buffers_of, watch_loss, watch_modules, watching
from recording.log import Log, NewStorages, bits
from support.models import (
    bytes_planned,
    make_run,
    memory_stream,
    named_parameters,
    parse,
    start_processes,
)
from support.models import serve as serve_only

BARE_STEPS = 1
"""Steps at first whose new tensors are not counted: some memory is allocated once."""


def record(flags: Sequence[str], lengths: Sequence[int], steps: int) -> dict[str, Any]:
    """Trains for some steps and records this rank's part; collective.

    Args:
        flags: flags of the run.
        lengths: lengths of its documents.
        steps: how many.
    """
    log = Log()
    args = parse(flags)
    with watching(log):
        processes = start_processes(args)
        stream = memory_stream(lengths)
        if processes is not None and processes.serves_only:
            _, made = serve_only(args, stream, processes)
            recorded: dict[str, Any] = {"serving": log.take()}
        else:
            recorded, made = _train(args, stream, processes, steps, log)
    if made is not None:
        transport = made.runtime.core_attention.transport
        recorded["bytes"] = {
            name: {WORDS.get(phase, phase): n for phase, n in sorted(counted.items()) if n}
            for name, counted in (
                ("sent", transport.bytes_sent),
                ("received", transport.bytes_received),
                ("planned", bytes_planned(args, made, steps)),
            )
        }
        recorded["buffers"] = buffers_of(made.runtime.core_attention.buffers)
    torch.distributed.barrier()
    return recorded


def _train(
    args: Namespace, stream: Any, processes: Any, steps: int, log: Log
) -> tuple[dict[str, Any], Any]:
    from support import training

    run, made = make_run(args, stream, processes)
    run.forward_step = watch_loss(log, run.forward_step)
    watch_modules(log, run.model)
    optimizer_step = run.optimizer.step
    gradients: dict[str, str] = {}

    def noted_step() -> Any:
        log.event("optimizer step")
        gradients.clear()
        for chunk in run.model:
            gradients.update((n, bits(p.main_grad)) for n, p in named_parameters(chunk))
        return optimizer_step()

    run.optimizer.step = noted_step
    before = log.take()
    recorded = []
    for step in range(steps):
        new = NewStorages(log)
        rate = run.optimizer.param_groups[0]["lr"]
        with new if step >= BARE_STEPS else contextlib.nullcontext():
            reports, _, norm = training.train_step(run)
        # The one figure that is a time.
        reports.pop("plan wait ms", None)
        recorded.append(
            {
                "learning rate": float(rate).hex(),
                "reports": {name: value.hex() for name, value in sorted(reports.items())},
                "gradient norm": float(norm).hex(),
                "gradients": dict(sorted(gradients.items())),
                "new tensors": new.counts,
                **log.take(),
            }
        )
    run.data.close()
    weights = {name: bits(p) for chunk in run.model for name, p in named_parameters(chunk)}
    return {"before": before, "steps": recorded, "weights": dict(sorted(weights.items()))}, made

"""Figures of a run as metrics of Prometheus, in a file: `--distca-metrics`.

node_exporter's textfile collector serves such files, so that a run needs no port of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distca.run_figures import (
    AFTER,
    ALLOCATED,
    ATTENTION_BUSIEST,
    ATTENTION_MEAN,
    BEFORE,
    BUSIEST,
    GRADIENTS,
    LOSS,
    MEAN,
    MFU,
    MOVED,
    PLAN_WAIT,
    RESERVED,
    RESIDENT,
    SECONDS,
    SPEED,
    TFLOPS,
    WAIT,
)


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        name: its name without the beginning that all have.
        help: what it is.
        label: label and value by which it differs from others of its name; empty: it has none.
        unit: figures times this are in the metric's unit.
    """

    name: str
    help: str
    label: str = ""
    unit: float = 1.0


_ATTENTION = "Seconds of attention kernels in a step."
_CPU = "CPU seconds of a step, on CPUs that stand in for GPUs."
_LOAD = "Core attention of the busiest rank over the mean."
_MEMORY = "Peak memory of the rank with the most."
METRICS = {
    "iteration": Metric("iteration", "Iteration of the last log line."),
    LOSS: Metric("loss", "Loss of the last iteration."),
    GRADIENTS: Metric("grad_norm", "Norm of the gradient."),
    "learning rate": Metric("learning_rate", "Learning rate."),
    SECONDS: Metric("step_seconds", "Seconds of a step."),
    SPEED: Metric("tokens_per_second", "Tokens of all ranks a second."),
    MFU: Metric("mfu", "Model operations over the GPU's peak, from 0 to 1."),
    TFLOPS: Metric("device_tflops", "TFLOP/s of a device, where its peak is not known."),
    BUSIEST: Metric("cpu_seconds", _CPU, 'rank="busiest"'),
    MEAN: Metric("cpu_seconds", _CPU, 'rank="mean"'),
    BEFORE: Metric("load_max_over_mean", _LOAD, 'plan="plain data parallelism"'),
    AFTER: Metric("load_max_over_mean", _LOAD, 'plan="distca"'),
    ATTENTION_BUSIEST: Metric("attention_seconds", _ATTENTION, 'rank="busiest"'),
    ATTENTION_MEAN: Metric("attention_seconds", _ATTENTION, 'rank="mean"'),
    WAIT: Metric("exposed_wait_ratio", "Share of a step in which the mean rank waits."),
    MOVED: Metric("moved_bytes", "Bytes of exchanges of a micro-batch, of all ranks.", unit=1e6),
    PLAN_WAIT: Metric("plan_wait_seconds", "Seconds that a step waits for its plan.", unit=1e-3),
    ALLOCATED: Metric("memory_bytes", _MEMORY, 'kind="allocated"', 1e9),
    RESERVED: Metric("memory_bytes", _MEMORY, 'kind="reserved"', 1e9),
    RESIDENT: Metric("memory_bytes", _MEMORY, 'kind="resident"', 1e9),
}
"""Metrics by the names of figures."""


def format_metrics(figures: Mapping[str, float]) -> str:
    """Returns figures in Prometheus' text format; those that are no metrics are left out."""
    lines: list[str] = []
    told = ""
    for figure, metric in METRICS.items():
        if figure not in figures:
            continue
        name = f"distca_training_{metric.name}"
        if name != told:
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} gauge"]
            told = name
        label = f"{{{metric.label}}}" if metric.label else ""
        value = float(figures[figure]) * metric.unit
        # Prometheus' words for what is not finite.
        text = repr(value) if math.isfinite(value) else {1: "+Inf", -1: "-Inf"}.get(_sign(value))
        lines.append(f"{name}{label} {text or 'NaN'}")
    return "\n".join(lines) + "\n"


def _sign(value: float) -> int:
    """Returns 1 or -1 for what is infinite, 0 for what is no number."""
    return (value > 0) - (value < 0)


def write_metrics(path: Path, figures: Mapping[str, float]) -> None:
    """Replaces a file by the metrics of figures, so that nobody reads half of it."""
    whole = path.with_name(f".{path.name}.part")
    whole.write_text(format_metrics(figures))
    os.replace(whole, path)

"""Table and report files of `throughput.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import pages
from benchmarks.training.run import model_size, parsed
from benchmarks.training.setting import Setting
from distca.runtime.kernel_timing import cpu_name

_Way = dict[str, Any]
_COLUMNS: dict[str, tuple[str, Callable[[_Way], str]]] = {
    "tokens/s": ("tokens_per_second", lambda way: f"{way['tokens_per_second']:.0f}"),
    "ratio": ("ratio", lambda way: f"{way['ratio']:.3f}"),
    "MFU": ("mfu", lambda way: f"{way['mfu']:.1%}"),
    "pairs max/mean": ("pairs_max_over_mean", lambda way: f"{way['pairs_max_over_mean']:.2f}"),
    "kernel s max/mean": (
        "kernels_max_over_mean",
        lambda way: f"{way['kernels_max_over_mean']:.2f}",
    ),
    "exposed": ("exposed_share", lambda way: f"{way['exposed_share']:.1%}"),
    "MB sent": (
        "bytes_sent_of_ranks",
        lambda way: f"{sum(way['bytes_sent_of_ranks']) / 1e6:.1f}",
    ),
    "peak MB": ("peak_bytes", lambda way: f"{way['peak_bytes'] / 1e6:.1f}"),
    "CPU s of ranks": (
        "replayed_seconds",
        lambda way: ", ".join(f"{cpu:.2f}" for cpu in way["cpu_seconds_of_ranks"]),
    ),
    "replayed s": ("replayed_seconds", lambda way: f"{way['replayed_seconds']:.2f}"),
    "replayed ratio": ("replayed_ratio", lambda way: f"{way['replayed_ratio']:.3f}"),
    "ideal": ("ideal_ratio", lambda way: f"{way['ideal_ratio']:.3f}"),
    "of ideal": (
        "ideal_ratio",
        lambda way: f"{way.get('replayed_ratio', way['ratio']) / way['ideal_ratio']:.1%}",
    ),
}
"""By title of a column: the figure that a way must have for it, and the function of its cell."""


def table(setting: Setting, summaries: dict[str, Any]) -> str:
    """Formats the figures as Markdown; a column for which no way has a figure is left out."""
    ways = [
        (mix, name, summary["ways"][name])
        for mix, summary in summaries.items()
        for name in setting.ways()
    ]
    shown = {
        title: cell
        for title, (key, cell) in _COLUMNS.items()
        if any(way.get(key) is not None for _, _, way in ways)
    }
    rows = []
    for mix, name, way in ways:
        cells = [
            cell(way) if way.get(_COLUMNS[title][0]) is not None else "-"
            for title, cell in shown.items()
        ]
        rows.append([mix, name, *cells])
    return pages.table(["mix", "way", *shown], rows)


def write_report(folder: Path, setting: Setting, summaries: dict[str, Any], launched: bool) -> None:
    """Writes throughput.json and throughput.md.

    Args:
        folder: folder of the files, made if need be.
        setting: sizes and ways of the measurement.
        summaries: summary of each mix.
        launched: a launcher started the processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    launcher = "torchrun ..." if launched else "python"
    command = pages.typed("benchmarks/training/throughput.py", launcher)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    versions = {name: version(name) for name in ("torch", "megatron-core")}
    model = model_size(parsed(setting, []))
    found = {
        "command": command,
        "device": device,
        "versions": versions,
        "setting": asdict(setting),
        "model": asdict(model),
        "mixes": summaries,
    }
    (folder / "throughput.json").write_text(json.dumps(found, indent=1) + "\n")
    peak = "not known" if setting.peak_tflops is None else f"{setting.peak_tflops:g} TFLOP/s"
    lines = [
        "# Throughput",
        "",
        f"    {command}",
        "",
        f"{setting.processes} processes on {device} (peak: {peak}); "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f". {model.layers} layers of width {model.hidden_size}, {model.heads} heads and "
        f"{model.kv_heads} key-value heads of {model.head_dim}; tensor size "
        f"{setting.tensor_parallel}, {setting.stages} stages; {setting.micro_batches} "
        f"micro-batches of {setting.seq_length:,} tokens a rank; {setting.batches} batches of each "
        f"mix, medians of {setting.rounds} rounds. What the columns mean: "
        "`benchmarks/training/throughput.py`.",
        "",
        table(setting, summaries),
    ]
    (folder / "throughput.md").write_text("\n".join(lines) + "\n")

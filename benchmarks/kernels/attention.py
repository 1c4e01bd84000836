"""The attention kernel's rate by the length of its shards (the paper's Figure 5: a 128-token knee).

    python benchmarks/kernels/attention.py --output benchmarks/results
    python benchmarks/kernels/attention.py --device cuda --tokens 65536 --keys 32768   # on a GPU

One fused call computes shards of one length, each with the same keys, so that all calls have the
same visible pairs; short shards leave the kernel's blocks half empty.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from distca.attention import Kernel, KernelTasks, select_kernel
from distca.cost.model_sizes import MODELS
from distca.cost.volume import AttentionShape
from distca.palette import colour_in_turn
from distca.whole_file import writing


def seconds_of(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of several runs, after one that warms up."""
    function()
    found = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(
    kernel: Kernel,
    shape: AttentionShape,
    device: torch.device,
    tokens: int,
    keys: int,
    shards: list[int],
    repeats: int,
) -> list[dict[str, float]]:
    """Measures forward and backward rates for each shard length.

    Args:
        kernel: kernel to measure.
        shape: heads.
        device: device of the kernel.
        tokens: queries of a call at most: as many as whole shards make up.
        keys: number of keys of each shard.
        shards: lengths of shards.
        repeats: number of runs of each measurement.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for shard in shards:
        number = max(tokens // shard, 1)
        queries = number * shard
        q, dout = (
            torch.randn(queries, shape.heads, shape.head_dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        k, v = (
            torch.randn(keys, shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
            .unsqueeze(0)
            .expand(number, -1, -1, -1)
            .reshape(number * keys, shape.kv_heads, shape.head_dim)
            for _ in range(2)
        )
        edges = (
            torch.arange(number + 1, dtype=torch.int32) * shard,
            torch.arange(number + 1, dtype=torch.int32) * keys,
        )
        tasks = KernelTasks(*edges, causal=False, window_left=None, softmax_scale=0.1)
        out, lse = kernel.forward(q, k, v, tasks)
        forward = seconds_of(partial(kernel.forward, q, k, v, tasks), device, repeats)
        backward = seconds_of(
            partial(kernel.backward, dout, q, k, v, out, lse, tasks), device, repeats
        )
        flops = 4.0 * queries * keys * shape.heads * shape.head_dim
        rows.append(
            {
                "shard_length": shard,
                "forward_tflops": 1e-12 * flops / forward,
                # A backward pass has five matrix products instead of two.
                "backward_tflops": 2.5e-12 * flops / backward,
            }
        )
    best = max(row["forward_tflops"] for row in rows)
    return [row | {"of_best": row["forward_tflops"] / best} for row in rows]


def table(rows: list[dict[str, float]]) -> str:
    """Formats the rates as a Markdown table."""
    header = ["tokens of a shard", "forward, TFLOP/s", "backward, TFLOP/s", "forward of the best"]
    lines = [
        [
            f"{row['shard_length']:.0f}",
            f"{row['forward_tflops']:.4g}",
            f"{row['backward_tflops']:.4g}",
            f"{row['of_best']:.0%}",
        ]
        for row in rows
    ]
    return pages.table(header, lines, "---:")


def plot(rows: list[dict[str, float]], what: str, path: Path) -> None:
    """Plots rates against shard length."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    colour_in_turn(axes)
    lengths = [row["shard_length"] for row in rows]
    for name in ("forward", "backward"):
        axes.plot(lengths, [row[f"{name}_tflops"] for row in rows], marker="o", label=name)
    axes.axvline(128, color="grey", linestyle=":", label="128 tokens")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of a shard", ylabel="TFLOP/s", title=what, ylim=(0, None))
    axes.legend()
    with writing(path) as written:
        figure.savefig(written, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--tokens", type=int, default=2048, help="queries of a call")
    parser.add_argument("--keys", type=int, default=2048, help="of each shard")
    parser.add_argument(
        "--shards", type=int, nargs="+", default=[16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048]
    )
    parser.add_argument("--model", choices=list(MODELS), default="llama-8b", help="at TP 8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    shape = MODELS[args.model].attention_shape(tensor_parallel=8)
    kernel = select_kernel(device.type, shape.head_dim)
    rows = measure(kernel, shape, device, args.tokens, args.keys, args.shards, args.repeats)
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "a CPU"
    )
    what = {
        "device": name,
        "kernel": type(kernel).__name__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "model": args.model,
        "keys": args.keys,
    }
    pages.save(args.output, f"kernels_{device.type}", table(rows), __file__, what | {"rows": rows})
    plot(rows, f"{args.keys} keys on {name}", args.output / f"kernels_{device.type}.png")


if __name__ == "__main__":
    main()
